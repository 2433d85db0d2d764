"""How every arm is run and timed: warmed up, from an empty KV cache, with nothing left over on the device."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from time import perf_counter

import torch

from slipstream.bench.lineup import Lineup, Output
from slipstream.bench.records import Arm
from slipstream.sampling.params import SamplingParams

WARM_UP_TOKENS = 8


@dataclass
class TimedRuns:
    """Runs the arms of a lineup and times them."""

    lineup: Lineup
    _warm: set[tuple[str, int]] = field(default_factory=set)

    def run(
        self, arm: Arm, prompts: list[list[int]], params: list[SamplingParams], batch: int = 1
    ) -> tuple[Output, float]:
        """What the arm makes of these prompts, and in how many seconds, prompt processing included.

        batch: how many prompts are decoded together; before the first run of an arm at a batch size it makes a few
        untimed tokens.
        """
        if (arm.name, batch) not in self._warm:
            self.lineup.generate(arm, prompts[:batch], [_shortened(given) for given in params[:batch]])
            self._warm.add((arm.name, batch))
        self.lineup.forget(arm)
        wait_for_device()
        started = perf_counter()
        output = self.lineup.generate(arm, prompts, params)
        return output, perf_counter() - started


def wait_for_device() -> None:
    """Work that is still queued on a GPU belongs to whatever ran before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _shortened(params: SamplingParams) -> SamplingParams:
    few = min(WARM_UP_TOKENS, params.max_tokens)
    return replace(params, max_tokens=few, min_tokens=min(few, params.min_tokens))
