"""Fits the constants of `drafters/suffix/suffix_drafter.py`: how likely a retrieved token is accepted, by its kind.

    slipstream bench --target smollm2 --arms none --out RUNS
    python benchmarks/fit_match_kinds.py RUNS/runs.jsonl --tokenizer smollm2
    python benchmarks/fit_match_kinds.py README.md docs/*.md --tokenizer smollm2

Inputs are those of `recorded_texts.py`. The suffix drafter drafts the recorded outputs round by round, from the
row's own text; the tokens of a draft count up to the first that differs from the text. A token's log-odds are a number
for the length of its context plus one for how far its occurrences agree: logistic regression, with a small ridge for
kinds that hardly occur. Printed are the fitted numbers beside those in use, and the log-loss per token of both on texts
that were not fitted (two halves, each judged by the fit of the other), learning from each row as the drafter does.
Then the share of runners-up that came true: at each token of the outputs, those beside a first choice that was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from recorded_texts import Recorded, read_texts, tokenizer_of
from rich.table import Table
from terminal import console, run

from slipstream import SamplingParams, UsageError
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.draft_length.acceptance_model import AcceptanceModel
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.suffix.automaton import SuffixAutomaton
from slipstream.drafters.suffix.suffix_drafter import (
    AGREED,
    BY_AGREEMENT,
    BY_LENGTH,
    candidates,
    prior,
)
from slipstream.models.weights.model_files import quiet
from slipstream.sampling.sampler import Sampler

CPU = torch.device("cpu")
BRANCHES = 2  # runners-up that are looked at beside each first choice
RIDGE = 1.0  # a kind without tokens stays at 0
STEPS = 50  # of Newton's method, which needs fewer than ten
Seen = list[tuple[int, bool]]  # kind and whether it was accepted, in the order of the text
Floats = NDArray[np.float64]


class Recorder(AcceptanceModel):
    """Notes what the drafter would have learned; every draft is as long as it can be."""

    def __init__(self) -> None:
        super().__init__(prior(), shared=False)
        self.seen: Seen = []

    def chance(self, row: Row, kind: int) -> float:
        """Certain, so that no draft ends early."""
        return 1.0

    def learn(self, row: Row, kinds: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> None:
        """Note the tokens up to the first that differs."""
        for kind, token, came in zip(kinds, drafted, text, strict=False):
            self.seen.append((kind, token == came))
            if token != came:
                break


@dataclass(frozen=True)
class Fit:
    """Log-odds by the length of a token's context and by how far its occurrences agree."""

    by_length: Floats
    by_agreement: Floats

    def prior(self) -> list[float]:
        """As `match_kinds.prior`."""
        return [1 / (1 + exp(-a - b)) for a in self.by_length for b in self.by_agreement]


def observe(text: Recorded, vocab_size: int, length: int) -> Seen:
    """The draft tokens of rounds that say a text, and which of them came true."""
    recorder = Recorder()
    drafter = SuffixDrafter(vocab_size, outputs=0, acceptance_model=recorder)
    row = Row(0, list(text.prompt), SamplingParams(max_tokens=len(text.output) + 1), seed=0)
    race = Race(vocab_size, CPU)
    while True:
        drafts = drafter.propose([row], [length], Sampler([row], race, vocab_size, CPU))  # learns from the last round
        left = text.output[row.num_output_tokens :]
        if not left:
            return recorder.seen
        draft: list[int] = drafts.tokens[0, : drafts.lengths[0]].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(draft, left, strict=False)) if a != b), len(draft))
        row.commit(left[: accepted + 1])


def observe_beside(text: Recorded) -> Seen:
    """The runners-up at each token of a text whose first choice was wrong, up to the one that came."""
    own, seen = SuffixAutomaton(), list[tuple[int, bool]]()
    own.learn(text.prompt, newest=False)
    for came in text.output:
        match = own.followed(own.end)
        known = candidates(own, (match, own.count(match) - 1))
        for rank, (token, kind, _) in enumerate(islice(known, 1 + BRANCHES)):
            if rank:
                seen.append((kind, token == came))
            if token == came:
                break
        own.learn([came])
    return seen


def fit(seen: Sequence[Seen]) -> Fit:
    """Newton's method on the log-loss plus the ridge."""
    lengths, kinds = len(BY_LENGTH), len(BY_LENGTH) * AGREED
    counts, accepted = np.zeros(kinds), np.zeros(kinds)
    for kind, came in (one for text in seen for one in text):
        counts[kind] += 1
        accepted[kind] += came
    design = np.zeros((kinds, lengths + AGREED))
    for kind in range(kinds):
        design[kind, kind // AGREED] = design[kind, lengths + kind % AGREED] = 1
    weights = np.zeros(lengths + AGREED)
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-design @ weights))
        slope = design.T @ (accepted - counts * chance) - RIDGE * weights
        curve = design.T @ (design * (counts * chance * (1 - chance))[:, None]) + RIDGE * np.eye(len(weights))
        weights += np.linalg.solve(curve, slope)
    shift = float(np.mean(BY_AGREEMENT) - weights[lengths:].mean())  # only sums count: as the numbers in use have it
    return Fit(weights[:lengths] - shift, weights[lengths:] + shift)


def log_loss(chances: Sequence[float], texts: Sequence[Seen]) -> float:
    """Nats per token, with the row's weight learned on the way."""
    total, count = 0.0, 0
    for seen in texts:
        model, row = AcceptanceModel(chances, shared=False), Row(0, [0], SamplingParams(), seed=0)
        for kind, came in seen:
            chance = model.chance(row, kind)
            total -= log(chance if came else 1 - chance)
            count += 1
            model.learn(row, [kind], [1], [1 if came else 0])
    return total / max(count, 1)


def main(
    inputs: list[Path],
    tokenizer: Annotated[str, typer.Option(help="model whose tokenizer is used; toy for bytes")] = "toy",
    prompt_file: Annotated[
        Path | None, typer.Option(help="the prompts of runs.jsonl, if not the package's own")
    ] = None,
    num_draft_tokens: Annotated[int, typer.Option(min=1, max=64)] = 15,
    prompt_share: Annotated[float, typer.Option(min=0.01, max=0.99, help="of a text file")] = 0.5,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each output")] = 1000,
) -> None:
    """Print the fitted constants beside those in use."""
    quiet()
    texts = read_texts(inputs, tokenizer_of(tokenizer), prompt_file, prompt_share, max_tokens)
    if len(texts) < 2:
        raise UsageError("one text; allowed: two or more, as each half is judged by the fit of the other")
    vocab_size = 1 + max(token for text in texts for token in (*text.prompt, *text.output))
    seen = [observe(text, vocab_size, num_draft_tokens) for text in texts]
    halves = seen[::2], seen[1::2]
    whole = fit(seen)
    beside = [observe_beside(text) for text in texts]
    for title, fitted, used in (
        ("BY_LENGTH", whole.by_length, BY_LENGTH),
        ("BY_AGREEMENT", whole.by_agreement, BY_AGREEMENT),
    ):
        table = Table("", *map(str, range(len(used))), title=title)
        table.add_row("fitted", *(f"{value:.2f}" for value in fitted))
        table.add_row("in use", *(f"{value:.2f}" for value in used))
        console.print(table)
    other = [log_loss(fit(halves[1 - i]).prior(), halves[i]) for i in (0, 1)]
    own = [log_loss(prior(), half) for half in halves]
    sizes = [sum(map(len, half)) for half in halves]
    fitted_loss, used_loss = (float(np.average(losses, weights=sizes)) for losses in (other, own))
    console.print(f"{len(texts)} texts, {sum(sizes)} draft tokens")
    came = [came for text in beside for _, came in text]
    console.print(f"{len(came)} runners-up, of which {sum(came) / max(1, len(came)):.1%} came true")
    console.print(f"log-loss per token on unfitted texts: fitted {fitted_loss:.4f}, in use {used_loss:.4f}")


if __name__ == "__main__":
    run(main)
