"""Runs the plan: each measurement timed, judged, and on the disk before the next begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.bench.lineup import Lineup, Output
from slipstream.bench.plan import Measurement
from slipstream.bench.records import Run, append, compact, finished
from slipstream.bench.timed_runs import TimedRuns
from slipstream.bench.verdicts import Judge


@dataclass
class Runner:
    """Makes the measurements of a plan that are not made yet, in the plan's order."""

    lineup: Lineup
    plan: Sequence[Measurement]
    folder: Path

    def __post_init__(self) -> None:
        self._timed = TimedRuns(self.lineup)

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
            params = [self.lineup.params_of(one.arm, prompt) for prompt in one.group.prompts]
            output, seconds = self._timed.run(one.arm, prompts, params, one.batch)
        except Exception as error:  # whatever a model or a drafter may raise: this run failed, the others go on
            return replace(empty, error=one_line(error))
        return _finished(empty, output, seconds, judge, one)


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
        parts=output.parts,
    )
