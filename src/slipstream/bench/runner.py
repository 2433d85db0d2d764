"""Runs the plan: each measurement warmed up, begun with an empty memory, judged, and on the disk before the next."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter

import torch

from slipstream.bench.lineup import Lineup, Output
from slipstream.bench.plan import Measurement
from slipstream.bench.records import Run, append, compact, finished
from slipstream.bench.verdicts import Judge
from slipstream.sampling.params import SamplingParams

WARM_UP_TOKENS = 8


@dataclass
class Runner:
    """Makes the measurements of a plan that are not made yet, in the plan's order."""

    lineup: Lineup
    plan: Sequence[Measurement]
    folder: Path
    _warm: set[tuple[str, int]] = field(default_factory=set)

    def run(self, before: Sequence[Run]) -> Iterator[Run]:
        """Yield each run once it is on the disk. before: the runs the folder holds; failed ones are not tried again."""
        judge, done = Judge(self.lineup), finished(before)
        judge.recall(before)
        for one in self.plan:
            if one.key not in done:
                run = self._measure(one, judge)
                append(self.folder, run)
                yield run

    def _measure(self, one: Measurement, judge: Judge) -> Run:
        empty = Run(one.arm.name, one.group.ids, one.group.family, one.batch, one.repeat)
        try:
            prompts = [self.lineup.encode(prompt) for prompt in one.group.prompts]
            params = [self.lineup.params_of(one.arm, prompt.index) for prompt in one.group.prompts]
            self._warm_up(one, prompts, params)
            self.lineup.forget(one.arm)
            _wait_for_device()
            started = perf_counter()
            output = self.lineup.generate(one.arm, prompts, params)
            seconds = perf_counter() - started
        except Exception as error:  # whatever a model or a drafter may raise: this run failed, the others go on
            return replace(empty, error=one_line(error))
        return _finished(empty, output, seconds, judge, one)

    def _warm_up(self, one: Measurement, prompts: list[list[int]], params: list[SamplingParams]) -> None:
        """A few untimed tokens before the first run of an arm at a batch size."""
        if (one.arm.name, one.batch) not in self._warm:
            few = [_shortened(given) for given in params[: one.batch]]
            self.lineup.generate(one.arm, prompts[: one.batch], few)
            self._warm.add((one.arm.name, one.batch))


def one_line(error: Exception) -> str:
    """An exception as one line: its kind and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _finished(empty: Run, output: Output, seconds: float, judge: Judge, one: Measurement) -> Run:
    return replace(
        empty,
        seconds=seconds,
        num_output_tokens=sum(map(len, output.texts)),
        texts=output.texts,
        verdicts=judge.judge(one.arm, one.group, output.texts),
        stats=None if output.stats is None else output.stats.to_dict(),
        rounds=None if output.rounds is None else [compact(done) for done in output.rounds],
        num_forwards=output.num_forwards,
    )


def _shortened(params: SamplingParams) -> SamplingParams:
    few = min(WARM_UP_TOKENS, params.max_tokens)
    return replace(params, max_tokens=few, min_tokens=min(few, params.min_tokens))


def _wait_for_device() -> None:
    """Work that is still queued on a GPU belongs to whatever ran before."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
