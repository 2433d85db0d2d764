"""A job on one machine, from its first line to its last: read, ordered, decoded, written as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slipstream.errors import UsageError, did_you_mean
from slipstream.jobs.job_files import JobFiles
from slipstream.jobs.job_lines import Line
from slipstream.jobs.job_state import JobReport, JobState, Progress, run_through
from slipstream.jobs.line_kinds import Asked, JobOptions, LineReader
from slipstream.jobs.request_pool import RequestPool
from slipstream.sampling.params import SamplingParams
from slipstream.wiring.run_order import first_row, ordered

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder

WINDOW = 1024  # requests that are read, tokenised and ordered at a time


class BatchJob:
    """Answers every line of a job once. Lines are written in the order in which they end. report: how far it is."""

    def __init__(self, decoder: SpeculativeDecoder, files: JobFiles, options: JobOptions) -> None:
        self._decoder, self._files = decoder, files
        self._reader = LineReader(decoder, options)
        self.report = JobReport()

    def run(self, on_progress: Progress = lambda report: None) -> JobReport:
        """Answer what no earlier run has answered. on_progress: called after every step.

        SlipstreamError if the files are another job's or cannot be written; what is finished stays in them.
        """
        reader = self._reader

        def work(state: JobState) -> None:
            self._decode(state, state.pending(), on_progress)

        return run_through(self._files, reader.digests, self.report, reader.fingerprint, work)

    def _decode(self, state: JobState, pending: Iterator[Line], on_progress: Progress) -> None:
        pool = RequestPool(self._decoder)
        self.report.work = pool.work
        more = True
        while more or pool.unfinished:
            while more and pool.hungry:
                window = list(islice(pending, WINDOW))
                more = len(window) == WINDOW
                requests = [one for line in window if (one := self._read(state, line)) is not None]
                pool.add(ordered(requests, first_row, self._decoder.shapes.reuse))
            if not more:
                pool.await_together()
            self._write(state, pool.step())
            on_progress(state.tick())

    def _read(self, state: JobState, line: Line) -> Asked | None:
        try:
            return self._reader.asked(line)
        except Exception as error:  # of this line; the others go on
            state.refuse(line, self._reader.refusal(line, error))
            return None

    def _write(self, state: JobState, ended: Iterable[Asked]) -> None:
        answers = []
        for request in ended:
            try:
                answers.append(request.answer())
            except Exception as error:  # the row's own
                state.refuse(request.line, self._reader.refusal(request.line, error))
        state.answer(answers, self._reader.fingerprint)


def run_batch(
    decoder: SpeculativeDecoder,
    source: str | Path | Iterable[Mapping[str, Any]],
    output: str | Path,
    params: SamplingParams | None,
    options: Mapping[str, Any],
) -> JobReport:
    """`SpeculativeDecoder.batch`."""
    known = ["errors", *(f.name for f in fields(JobOptions) if f.name != "params")]
    if unknown := [name for name in options if name not in known]:
        raise UsageError(
            f"unknown option {unknown[0]!r}; allowed: {', '.join(known)}{did_you_mean(unknown[0], *known)}"
        )
    own = {name: value for name, value in options.items() if name != "errors"}
    files = JobFiles.of(source, output, options.get("errors"))
    return BatchJob(decoder, files, JobOptions(params=params or SamplingParams(), **own)).run()
