"""Fits the constants of `drafters/suffix/suffix_drafter.py`: how likely each kind of retrieved token is accepted.

    slipstream bench --target smollm2 --arms none --out RUNS
    python benchmarks/fit_match_kinds.py RUNS/runs.jsonl --tokenizer smollm2
    python benchmarks/fit_match_kinds.py README.md docs/*.md --tokenizer smollm2

An input is a benchmark's `runs.jsonl`, of which the first arm's outputs are read, or a text file, whose first part is
the prompt. The suffix drafter drafts the outputs round by round from the row's own text. A draft's tokens count up to
the first that differs from the output. A token's kind is the length of its context and how far its occurrences
agree. Logistic regression gives each length and each agreement a number, whose sum is the token's log-odds, with a
small ridge for kinds that hardly occur. The script prints the fitted numbers next to those in use, and the log-loss per
token of both on outputs that were not fitted: each half is judged by the fit of the other, learning from each row as
the drafter does. It also prints how often a runner-up is right where the first choice is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import exp, log
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from rich.table import Table
from terminal import console, run

from slipstream import SamplingParams, UsageError
from slipstream.bench.records import FILE, read_records
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
from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
from slipstream.sampling.sampler import Sampler
from slipstream.text.prompt_sets import read_prompts
from slipstream.tokenization.tokenizer import Tokenizer

CPU = torch.device("cpu")
BRANCHES = 2  # runners-up considered after each first choice
RIDGE = 1.0  # keeps a kind without tokens at 0
STEPS = 50  # of Newton's method, which needs fewer than ten
Seen = list[tuple[int, bool]]  # of each drafted token, in the order of the text: its kind, and if it was accepted
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recorded:
    """A prompt and its output, as token ids."""

    prompt: list[int]
    output: list[int]


def read_texts(inputs: Sequence[Path], tokenizer: Tokenizer, share: float, max_tokens: int) -> list[Recorded]:
    """Read all inputs, without texts that lack a prompt or an output. share: of a text file that is its prompt."""
    recorded: list[Recorded] = []
    for path in inputs:
        if path.name == FILE:
            recorded += _of_runs(path.parent, tokenizer)
        else:
            ids = tokenizer.encode(read_prompts(path)[0].prompt)
            cut = int(len(ids) * share)
            recorded.append(Recorded(ids[:cut], ids[cut:]))
    texts = [Recorded(t.prompt, t.output[:max_tokens]) for t in recorded if t.prompt and t.output]
    if not texts:
        raise UsageError(f"{', '.join(map(str, inputs))}: no texts; allowed: inputs with a prompt and an output")
    return texts


def _of_runs(folder: Path, tokenizer: Tokenizer) -> Iterator[Recorded]:
    """The first arm's output for each prompt."""
    header, runs = read_records(folder)
    chat = tokenizer.has_chat_template and header.settings["chat"]
    outputs = {
        name: output
        for measured in reversed(runs)
        if measured.arm == header.settings["arms"][0]
        for name, output in zip(measured.prompts, measured.texts, strict=measured.error is None)
    }
    for name, output in outputs.items():
        prompt = header.prompts[name]
        yield Recorded(
            tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt), output
        )


class Recorder(AcceptanceModel):
    """Records the tokens that the drafter would learn from. Every draft is as long as it can be."""

    def __init__(self) -> None:
        super().__init__(prior(), shared=False)
        self.seen: Seen = []

    def chance(self, row: Row, kind: int) -> float:
        """1, so that no draft ends early."""
        return 1.0

    def learn(self, row: Row, kinds: Sequence[int], drafted: Sequence[int], text: Sequence[int]) -> None:
        """Record the tokens up to the first that differs from the text."""
        for kind, token, actual in zip(kinds, drafted, text, strict=False):
            self.seen.append((kind, token == actual))
            if token != actual:
                break


@dataclass(frozen=True)
class Fit:
    """Log-odds by the length of a token's context and by how far its occurrences agree."""

    by_length: Floats
    by_agreement: Floats

    def prior(self) -> list[float]:
        """The acceptance probability of every kind, in the order of `suffix_drafter.prior`."""
        return [1 / (1 + exp(-a - b)) for a in self.by_length for b in self.by_agreement]


def observe(text: Recorded, vocab_size: int, length: int) -> Seen:
    """Draft a recorded output round by round; returns the drafted tokens' kinds and which were accepted."""
    recorder = Recorder()
    drafter = SuffixDrafter(vocab_size, outputs=0, acceptance_model=recorder)
    row = Row(0, list(text.prompt), SamplingParams(max_tokens=len(text.output) + 1), seed=0)
    race = Race(vocab_size, CPU)
    while True:
        drafts = drafter.propose([row], [length], Sampler([row], race, vocab_size, CPU))  # learns from the last round
        remaining = text.output[row.num_output_tokens :]
        if not remaining:
            return recorder.seen
        draft: list[int] = drafts.tokens[0, : drafts.lengths[0]].tolist()
        accepted = next((i for i, (a, b) in enumerate(zip(draft, remaining, strict=False)) if a != b), len(draft))
        row.commit(remaining[: accepted + 1])


def observe_beside(text: Recorded) -> Seen:
    """At each token where the first choice is wrong: the runners-up, up to the right one."""
    automaton, seen = SuffixAutomaton(), list[tuple[int, bool]]()
    automaton.learn(text.prompt, newest=False)
    for actual in text.output:
        match = automaton.followed(automaton.end)
        choices = candidates(automaton, (match, automaton.count(match) - 1))
        for rank, (token, kind, _) in enumerate(islice(choices, 1 + BRANCHES)):
            if rank:
                seen.append((kind, token == actual))
            if token == actual:
                break
        automaton.learn([actual])
    return seen


def fit(seen: Sequence[Seen]) -> Fit:
    """Newton's method on the log-loss plus the ridge."""
    lengths, kinds = len(BY_LENGTH), len(BY_LENGTH) * AGREED
    counts, accepted = np.zeros(kinds), np.zeros(kinds)
    for kind, was_accepted in (token for text in seen for token in text):
        counts[kind] += 1
        accepted[kind] += was_accepted
    design = np.zeros((kinds, lengths + AGREED))
    for kind in range(kinds):
        design[kind, kind // AGREED] = design[kind, lengths + kind % AGREED] = 1
    weights = np.zeros(lengths + AGREED)
    for _ in range(STEPS):
        chance = 1 / (1 + np.exp(-design @ weights))
        slope = design.T @ (accepted - counts * chance) - RIDGE * weights
        curve = design.T @ (design * (counts * chance * (1 - chance))[:, None]) + RIDGE * np.eye(len(weights))
        weights += np.linalg.solve(curve, slope)
    shift = float(np.mean(BY_AGREEMENT) - weights[lengths:].mean())  # only sums matter: center the agreements as in use
    return Fit(weights[:lengths] - shift, weights[lengths:] + shift)


def log_loss(chances: Sequence[float], texts: Sequence[Seen]) -> float:
    """Nats per token; the row's own weight is learned along the text, as in use."""
    total, count = 0.0, 0
    for seen in texts:
        model, row = AcceptanceModel(chances, shared=False), Row(0, [0], SamplingParams(), seed=0)
        for kind, was_accepted in seen:
            chance = model.chance(row, kind)
            total -= log(chance if was_accepted else 1 - chance)
            count += 1
            model.learn(row, [kind], [1], [1 if was_accepted else 0])
    return total / max(count, 1)


def main(
    inputs: list[Path],
    tokenizer: Annotated[str, typer.Option(help="model whose tokenizer is used; toy: bytes")] = "toy",
    num_draft_tokens: Annotated[int, typer.Option(min=1, max=64)] = 15,
    prompt_share: Annotated[
        float, typer.Option(min=0.01, max=0.99, help="part of a text file that is the prompt")
    ] = 0.5,
    max_tokens: Annotated[int, typer.Option(min=1, help="tokens read of each output")] = 1000,
) -> None:
    """Print the fitted constants next to the ones in use."""
    quiet()
    text_tokenizer = inspect_vocabulary(tokenizer).tokenizer
    if text_tokenizer is None:
        raise UsageError(f"model {tokenizer!r} has no tokenizer; allowed: a model with one, or toy")
    texts = read_texts(inputs, text_tokenizer, prompt_share, max_tokens)
    if len(texts) < 2:
        raise UsageError("only one text; allowed: two or more, as each half is judged by the fit of the other")
    vocab_size = 1 + max(token for text in texts for token in (*text.prompt, *text.output))
    seen = [observe(text, vocab_size, num_draft_tokens) for text in texts]
    halves = seen[::2], seen[1::2]
    fit_of_all = fit(seen)
    runners_up = [is_right for text in texts for _, is_right in observe_beside(text)]
    for title, fitted, used in (
        ("BY_LENGTH", fit_of_all.by_length, BY_LENGTH),
        ("BY_AGREEMENT", fit_of_all.by_agreement, BY_AGREEMENT),
    ):
        table = Table("", *map(str, range(len(used))), title=title)
        table.add_row("fitted", *(f"{value:.2f}" for value in fitted))
        table.add_row("in use", *(f"{value:.2f}" for value in used))
        console.print(table)
    fitted_losses = [log_loss(fit(halves[1 - i]).prior(), halves[i]) for i in (0, 1)]
    used_losses = [log_loss(prior(), half) for half in halves]
    sizes = [sum(map(len, half)) for half in halves]
    fitted_loss, used_loss = (float(np.average(losses, weights=sizes)) for losses in (fitted_losses, used_losses))
    console.print(f"{len(texts)} texts, {sum(sizes)} draft tokens")
    share = sum(runners_up) / max(1, len(runners_up))
    console.print(f"{len(runners_up)} runners-up after wrong first choices, of which {share:.1%} were right")
    console.print(f"log-loss per token on unfitted texts: fitted {fitted_loss:.4f}, in use {used_loss:.4f}")


if __name__ == "__main__":
    run(main)
