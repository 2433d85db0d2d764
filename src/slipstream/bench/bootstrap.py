"""Intervals of measured speeds: a seeded two-level percentile bootstrap over prompts and, within them, repeats.

A resample picks prompts with replacement, then each picked prompt's repeats with replacement (Davison and Hinkley 1997,
section 3.8). Arms that are compared share every draw, so what slowed both of them at one moment cancels out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES, LEVEL, SEED = 2000, 0.95, 0

Floats = NDArray[np.float64]
Repeats = Sequence[Sequence[float]]  # seconds: one list of repeats per group of prompts


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; low and high are None where a single measurement gives none."""

    value: float
    low: float | None = None
    high: float | None = None


def speed(tokens: Sequence[int], seconds: Repeats) -> Estimate:
    """Tokens per second over all groups: total tokens over the sum of each group's median seconds."""
    counts = np.array(tokens, dtype=np.float64)
    table, draws = _table(seconds), _Draws.of(seconds)
    value = counts.sum() / np.nanmedian(table, axis=1).sum()
    if draws is None:
        return Estimate(float(value))
    medians = draws.medians(table)
    return _estimate(value, counts[draws.groups].sum(axis=1) / medians.sum(axis=1))


def speed_up(tokens: Sequence[int], seconds: Repeats, base_tokens: Sequence[int], base_seconds: Repeats) -> Estimate:
    """Geometric mean over groups of the tokens per second relative to the base arm's on the same group.

    Groups and repeats of the two arms correspond one to one.
    """
    counts = np.array(tokens, dtype=np.float64) / np.array(base_tokens, dtype=np.float64)
    own, base, draws = _table(seconds), _table(base_seconds), _Draws.of(seconds)
    logs = np.log(counts * np.nanmedian(base, axis=1) / np.nanmedian(own, axis=1))
    value = np.exp(logs.mean())
    if draws is None:
        return Estimate(float(value))
    resampled = np.log(counts[draws.groups] * draws.medians(base) / draws.medians(own))
    return _estimate(value, np.exp(resampled.mean(axis=1)))


@dataclass(frozen=True)
class _Draws:
    """groups: [N, G] indices of sampled groups; repeats: [N, G, R] indices of each one's sampled repeats."""

    groups: NDArray[np.int64]
    repeats: NDArray[np.int64]
    absent: NDArray[np.bool_] | None  # [N, G, R] draws that a group with fewer repeats does not make

    @staticmethod
    def of(seconds: Repeats) -> _Draws | None:
        """The draws for a table of this shape; None where there is nothing to draw from."""
        lengths = np.array([len(row) for row in seconds])
        groups, repeats = len(lengths), int(lengths.max())
        if groups == 1 and repeats == 1:
            return None
        rng = np.random.default_rng(SEED)
        sampled = rng.integers(0, groups, (RESAMPLES, groups))
        own = lengths[sampled][:, :, None]
        picked = (rng.random((RESAMPLES, groups, repeats)) * own).astype(np.int64)
        absent = np.arange(repeats) >= own
        return _Draws(sampled, picked, absent if absent.any() else None)

    def medians(self, table: Floats) -> Floats:
        """[N, G] median seconds of each sampled group over its sampled repeats."""
        values = table[self.groups[:, :, None], self.repeats]
        if self.absent is None:
            return np.asarray(np.median(values, axis=2))
        return np.asarray(np.nanmedian(np.where(self.absent, np.nan, values), axis=2))


def _table(seconds: Repeats) -> Floats:
    """[G, R] with NaN where a group has fewer repeats than others."""
    width = max(map(len, seconds))
    return np.array([[*row, *[np.nan] * (width - len(row))] for row in seconds], dtype=np.float64)


def _estimate(value: float, resampled: Floats) -> Estimate:
    tail = 50 * (1 - LEVEL)
    low, high = np.percentile(resampled, [tail, 100 - tail])
    return Estimate(float(value), float(low), float(high))
