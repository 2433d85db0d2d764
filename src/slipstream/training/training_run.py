"""Runs training steps and saves their state, so that a killed run continues to the same bits.

The texts of a step follow from (seed, step), and its learning rate from the step and the number of planned steps.
Everything else is in the state: weights, optimizers, step. It is written whole or not at all.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.durable_files import replaced
from slipstream.errors import SlipstreamError, one_line
from slipstream.training.held_out import Judgment
from slipstream.training.texts import MadeText
from slipstream.training.trainable_head import Batch, TrainableHead

STATE = "training.pt"
RATE, OTHERS_RATE = 9e-3, 2.7e-3  # learning rates of matrices by Muon, and of the rest by AdamW
WARM_UP = 10  # steps
FALLING = 0.7  # share of the steps, at the end, over which learning rates fall to 0
PASSES = 10  # over the texts, where neither time nor a number of steps ends them sooner
FEWEST_STEPS = 200
JUDGED = 8  # judgments in a run, besides the one before the first step
TIMED = 4  # steps after which a step's time is known
SAVE_SECONDS, SAVE_SHARE = 60.0, 0.05  # least time between two saves, and largest share of time spent on them


def tokens_of_step(device: torch.device) -> tuple[int, int]:
    """Number of tokens that one step learns from, and how many of them are in memory at a time."""
    return (2048, 1024) if device.type == "cpu" else (16384, 4096)


@dataclass
class State:
    """The state from which a run continues."""

    step: int
    planned: int  # steps in all, as many as end within max_seconds
    max_seconds: float
    num_texts: int  # texts of the folder that the run trains with
    num_tokens: int  # tokens of the texts that are learned
    seconds: float  # of all runs so far
    weights: dict[str, Tensor]
    feature_size: Tensor
    token_ids: Tensor
    optimizers: list[dict[str, Any]] = field(default_factory=list)
    # of the head, by step, with the loss since the one before
    judgments: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # since the last judgment

    def save(self, folder: Path) -> None:
        buffer = io.BytesIO()  # torch.save does not always say that a disk is full
        torch.save(vars(self), buffer)
        with replaced(folder / STATE) as partial:
            partial.write_bytes(buffer.getbuffer())

    @classmethod
    def read(cls, folder: Path) -> State | None:
        """The state in a folder; None if there is none yet. SlipstreamError if it is damaged."""
        path = folder / STATE
        if not path.exists():
            return None
        try:
            return cls(**torch.load(path, map_location="cpu", weights_only=True))
        except Exception as error:  # of many kinds, depending on what the file asks to load
            raise SlipstreamError(
                f"{str(path)!r} could not be read: {one_line(error)}; without it, training starts over"
            ) from error


Judge = Callable[[TrainableHead, State], Judgment]


class TrainingRun:
    """Trains a head on texts, starting from a state.

    The state's max_seconds limit all runs together, the last judgment included; a step that would exceed them is
    skipped.
    """

    def __init__(self, folder: Path, head: TrainableHead, texts: Sequence[MadeText], state: State, seed: int) -> None:
        self.head, self.state = head, state
        self._folder, self._texts, self._seed, self._max_seconds = folder, texts, seed, state.max_seconds
        self._device = head.target.device
        named = list(head.weights.items())
        # Muon trains matrices, except the output layer, whose rows are tokens
        matrices = [weight for name, weight in named if weight.dim() == 2 and name != "lm_head"]
        others = [weight for name, weight in named if weight.dim() != 2 or name == "lm_head"]
        self._optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=RATE, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"), RATE),
            (torch.optim.AdamW(others, lr=OTHERS_RATE, betas=(0.9, 0.95), weight_decay=0.0), OTHERS_RATE),
        ]
        for (optimizer, _), saved in zip(self._optimizers, state.optimizers, strict=False):
            optimizer.load_state_dict(saved)
        self._seconds_before, self._began_at, self._saved_at = state.seconds, monotonic(), monotonic()
        self._save_seconds, self._judge_seconds = 0.0, 0.0  # of the last save and the last judgment
        self._num_timed, self._timed_seconds = 0, 0.0  # steps of this run, and their seconds

    @property
    def seconds(self) -> float:
        return self._seconds_before + monotonic() - self._began_at

    @property
    def seconds_left(self) -> float:
        """Seconds until the last judgment ends: what the planned steps need, at most what the time allows."""
        allowed = max(0.0, self._max_seconds - self.seconds)
        if not self._num_timed:
            return allowed
        steps = self.state.planned - self.state.step
        needed = steps * self._timed_seconds / self._num_timed + self._judge_seconds * self._num_judgments_left
        return min(allowed, needed)

    @property
    def _num_judgments_left(self) -> int:
        return JUDGED - self.state.step * JUDGED // self.state.planned

    def steps(self, judge: Judge) -> Iterator[State]:
        """The state after each step. judge: judges the head after a step, and writes its files."""
        state = self.state
        if not state.judgments:
            self._judge(judge)
        while state.step < state.planned:
            begun = monotonic()
            loss = self._step()
            if loss is None:
                break
            self._num_timed += 1
            self._timed_seconds += monotonic() - begun
            state.losses.append(loss)
            state.step += 1
            self._shorten()
            if self._is_due():
                self._judge(judge)
            elif monotonic() - self._saved_at > max(SAVE_SECONDS, self._save_seconds / SAVE_SHARE):
                self.save()
            yield state
        if state.step < state.planned:  # the time is over
            state.planned = state.step
            if state.losses:
                self._judge(judge)
            yield state

    def save(self) -> None:
        begun, state = monotonic(), self.state
        state.weights = {name: weight.detach() for name, weight in self.head.weights.items()}
        state.optimizers = [optimizer.state_dict() for optimizer, _ in self._optimizers]
        state.seconds = self.seconds
        state.save(self._folder)
        self._saved_at = monotonic()
        self._save_seconds = self._saved_at - begun

    def _judge(self, judge: Judge) -> None:
        state, begun = self.state, monotonic()
        judgment = judge(self.head, state)
        self._judge_seconds = monotonic() - begun
        loss = sum(state.losses) / len(state.losses) if state.losses else None
        state.judgments.append({"step": state.step, "seconds": round(self.seconds, 1), "loss": loss} | asdict(judgment))
        state.losses = []
        self.save()

    def _is_due(self) -> bool:
        """True if the head is judged after this step."""
        step, planned = self.state.step, self.state.planned
        return step == planned or step * JUDGED // planned > (step - 1) * JUDGED // planned

    def _shorten(self) -> None:
        """Plan fewer steps if time is short; checked after the first steps and after every judgment."""
        state, is_due = self.state, self._is_due()
        step_seconds = self._timed_seconds / self._num_timed
        remaining = self._max_seconds - self.seconds - self._judge_seconds * is_due
        if remaining < step_seconds + self._judge_seconds:
            state.planned = state.step
        elif self._num_timed == TIMED or (self._num_timed > TIMED and is_due):
            training = remaining - self._judge_seconds * self._num_judgments_left
            state.planned = max(state.step, min(state.planned, state.step + int(training / step_seconds)))

    def _step(self) -> float | None:
        """Learn from the texts of this step; the mean loss per token, or None if time ran out before the step."""
        step, planned = self.state.step, self.state.planned
        share = min(1.0, (step + 1) / WARM_UP, (1 - step / planned) / FALLING)
        total, count = 0.0, 0
        for optimizer, rate in self._optimizers:
            optimizer.zero_grad(set_to_none=True)
            for group in optimizer.param_groups:
                group["lr"] = rate * share
        for batch in batches(self._chosen(step), self._device):
            if self._max_seconds - self.seconds < self._judge_seconds:
                return None
            loss, counted = self.head.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
            count += counted
        if not total < float("inf"):
            raise SlipstreamError(
                f"the loss is {total} at step {step + 1}; continue from the saved state, or train on other texts"
            )
        for weight in self.head.parameters():
            if weight.grad is not None:
                weight.grad /= count
        nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer, _ in self._optimizers:
            optimizer.step()
        return total / count

    def _chosen(self, step: int) -> list[MadeText]:
        dice = Random(f"{self._seed} {step}")
        chosen = list[MadeText]()
        count = 0
        while count < tokens_of_step(self._device)[0]:
            chosen.append(self._texts[dice.randrange(len(self._texts))])
            count += len(chosen[-1].ids)
        return chosen


def batches(texts: Sequence[MadeText], device: torch.device) -> list[Batch]:
    """Batches of texts of similar length, each as large as memory allows at a time."""
    groups: list[list[MadeText]] = []
    for text in sorted(texts, key=lambda text: (-len(text.ids), text.number)):
        if groups and (len(groups[-1]) + 1) * len(groups[-1][0].ids) <= tokens_of_step(device)[1]:
            groups[-1].append(text)
        else:
            groups.append([text])
    return [Batch.padded([(text.ids, text.start) for text in group], device) for group in groups]
