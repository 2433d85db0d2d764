"""Ratios of totals with bootstrap intervals over prompts: acceptance, and speed without prompt processing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from slipstream.bench.bootstrap import LEVEL, RESAMPLES, SEED, Estimate
from slipstream.bench.records import Run

Prompts = tuple[str, ...]
Count = Callable[[Run], float]


def total_ratio(above: Sequence[Sequence[float]], below: Sequence[Sequence[float]]) -> Estimate | None:
    """Product of the sums of `above` over the product of the sums of `below`, and its 95 % interval.

    Each inner sequence has one number per prompt (or group of prompts); a resample draws prompts with replacement and
    the same ones everywhere. None where a sum below is 0; no interval for a single prompt.
    """
    upper, lower = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    if lower.size == 0 or not lower.sum(axis=1).all():
        return None
    value = float(upper.sum(axis=1).prod() / lower.sum(axis=1).prod())
    prompts = lower.shape[1]
    if prompts == 1:
        return Estimate(value)
    sampled = np.random.default_rng(SEED).integers(0, prompts, (RESAMPLES, prompts))
    over, under = (table[:, sampled].sum(axis=2).prod(axis=0) for table in (upper, lower))
    known = under > 0  # a resample of prompts for which nothing was drafted says nothing
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(over[known] / under[known], [tail, 100 - tail])
    return Estimate(value, float(low), float(high))


def acceptance(runs: Sequence[Run]) -> Estimate | None:
    """Accepted over drafted tokens; None if nothing was drafted."""
    return _ratio(runs, lambda run: _stat(run, "num_accepted_tokens"), lambda run: _stat(run, "num_draft_tokens"))


def acceptance_at(runs: Sequence[Run], place: int) -> Estimate | None:
    """Accepted over drafted tokens at one place of the draft, counted from 0; None if nothing was drafted there."""
    return _ratio(runs, _at("accepted_per_position", place), _at("drafted_per_position", place))


def decoding_speed_up(runs: Sequence[Run], base: Sequence[Run]) -> Estimate | None:
    """Tokens per second relative to those of `base` on the same prompts, prompt processing not counted."""
    tables = [
        _by_prompt(arm, count)
        for arm in (runs, base)
        for count in (lambda run: run.num_output_tokens, _decoding_seconds)
    ]
    prompts = [prompt for prompt in tables[0] if prompt in tables[2]]
    tokens, seconds, base_tokens, base_seconds = ([table[prompt] for prompt in prompts] for table in tables)
    return total_ratio([tokens, base_seconds], [seconds, base_tokens]) if prompts else None


def _ratio(runs: Sequence[Run], above: Count, below: Count) -> Estimate | None:
    return total_ratio([list(_by_prompt(runs, above).values())], [list(_by_prompt(runs, below).values())])


def _by_prompt(runs: Sequence[Run], count: Count) -> dict[Prompts, float]:
    """Sums over the repeats of each prompt or group of prompts; runs without statistics are left out."""
    found: dict[Prompts, float] = {}
    for run in runs:
        if run.stats is not None:
            found[tuple(run.prompts)] = found.get(tuple(run.prompts), 0.0) + count(run)
    return found


def _stat(run: Run, name: str) -> float:
    assert run.stats is not None
    return float(run.stats[name])


def _at(name: str, place: int) -> Count:
    def count(run: Run) -> float:
        assert run.stats is not None
        values = run.stats[name]
        return float(values[place]) if place < len(values) else 0.0

    return count


def _decoding_seconds(run: Run) -> float:
    return _stat(run, "total_seconds") - _stat(run, "prefill_seconds")
