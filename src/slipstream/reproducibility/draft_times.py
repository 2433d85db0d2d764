"""How long a draft model takes to read and to draft, so that whether it pays is known before its first draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from slipstream.core.interfaces import DraftScorer
from slipstream.core.types import Row

TEXT, SHORT = 64, 8  # tokens of the text that is read, and of those that are only drafted after
STEPS, TURNS = 6, 2  # of a draft; how often a single row's is timed, the first time being of much else too


@dataclass(frozen=True)
class GreedyOptions:
    """Of the rows that are timed; see `RequestOptions`."""

    temperature: float = 0.0
    min_tokens: int = 0
    max_tokens: int = 1 << 20
    num_draft_tokens: int | None = None
    logprobs: int | None = None


@dataclass(frozen=True)
class DraftTimes:
    """Milliseconds. steps: of a step of the draft model, by the rows that draft; token: of a token that it reads."""

    steps: dict[int, float] = field(default_factory=dict)
    token: float | None = None


def time_drafts(scorer: DraftScorer, most: int) -> DraftTimes:
    """Draft for 1, 2, 4, ... and `most` rows whose texts nobody wrote; the fastest step counts.

    scorer: with room for them; what it has cached is overwritten.
    """
    reading, steps = list[float](), dict[int, float]()
    for turn in range(TURNS):
        first, *others = _seconds(scorer, 1, TEXT, turn)
        steps[1] = min(steps.get(1, others[0]), *others)
        reading.append(max(0.0, first - steps[1]) / (TEXT - 1))
    for count in _counts(most):
        steps[count] = min(_seconds(scorer, count, SHORT, count)[1:])
    return DraftTimes({count: 1e3 * seconds for count, seconds in steps.items()}, 1e3 * min(reading))


def _counts(most: int) -> Sequence[int]:
    """Powers of two from 2 on that are less than `most`, and `most` itself."""
    return sorted({*(1 << n for n in range(1, most.bit_length()) if 1 << n < most), most} - {1})


@torch.inference_mode()
def _seconds(scorer: DraftScorer, count: int, length: int, seed: int) -> list[float]:
    """Of each step of a draft for so many rows of so many tokens; the first one reads the texts, all of them new."""
    backend, generator = scorer.backend, torch.Generator().manual_seed(20240229 + seed)
    texts = torch.randint(0, backend.vocab_size, (count, length), generator=generator).tolist()
    rows = [Row(i, text, GreedyOptions(), seed=0) for i, text in enumerate(texts)]
    drafted, taken = torch.zeros(count, STEPS, dtype=torch.int64, device=backend.device), []
    for done in range(STEPS):
        begun = perf_counter()
        logits = scorer.score(rows, drafted[:, :done], [done] * count, keep=1)
        drafted[:, done] = logits[:, 0].argmax(-1)
        taken.append(perf_counter() - begun)
    return taken
