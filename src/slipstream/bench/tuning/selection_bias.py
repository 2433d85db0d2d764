"""How much the best of several measured arms flatters itself, and the estimate without that.

The arm that comes out first is first in part by luck. What luck gives is estimated as Efron's optimism ("Estimating the
Error Rate of a Prediction Rule", JASA 1983): choose again on bootstrap resamples, and see how much better each choice
looks on its resample than on all the data.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import exp

import numpy as np
from numpy.typing import NDArray

from slipstream.bench.bootstrap import RESAMPLES, SEED, Estimate
from slipstream.bench.records import Run

Floats = NDArray[np.float64]


def optimism(logs: Floats) -> float:
    """What the best mean gains from being chosen; >= 0. logs: [A, U], log speed-ups of A arms on U prompts."""
    if logs.shape[0] < 2 or logs.shape[1] < 2:
        return 0.0
    sampled = np.random.default_rng(SEED).integers(0, logs.shape[1], (RESAMPLES, logs.shape[1]))
    means = logs[:, sampled].mean(axis=2)
    chosen = means.argmax(axis=0)
    gained = means[chosen, np.arange(RESAMPLES)] - logs.mean(axis=1)[chosen]
    return max(0.0, float(gained.mean()))


def log_speed_ups(runs: Sequence[Run], arms: Sequence[str], reference: str) -> Floats:
    """[A, U]: of medians over repeats by group of prompts; of single repeats where there is one group only.

    Groups that not all arms have run are left out.
    """
    names = [reference, *arms]
    found: dict[tuple[str, ...], dict[int, dict[str, float]]] = {}
    for run in runs:
        if run.error is None and run.arm in names:
            repeats = found.setdefault(tuple(run.prompts), {})
            repeats.setdefault(run.repeat, {})[run.arm] = run.seconds / run.num_output_tokens
    whole = [[one for one in repeats.values() if len(one) == len(names)] for repeats in found.values()]
    shared = [repeats for repeats in whole if repeats]
    units = [[one] for one in shared[0]] if len(shared) == 1 else shared
    costs = np.array([[np.median([one[name] for one in unit]) for unit in units] for name in names], dtype=np.float64)
    logs: Floats = np.log(costs[0]) - np.log(costs[1:])
    return logs


def without(estimate: Estimate, flattery: float) -> Estimate:
    """The estimate and its interval, lowered by `flattery` (of the log)."""
    share = exp(-flattery)
    low, high = (None if end is None else end * share for end in (estimate.low, estimate.high))
    return replace(estimate, value=estimate.value * share, low=low, high=high)
