"""Runs a job on one machine: reads its lines, orders and decodes them, and writes every answer as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import Any, Self

from slipstream.checks import check_known
from slipstream.errors import UsageError
from slipstream.jobs.job_lines import JobFiles, Line
from slipstream.jobs.job_output import ErrorFile, JobOutput
from slipstream.jobs.line_formats import (
    Decoder,
    JobOptions,
    JobRequest,
    LineReader,
    RequestDigest,
    reason_of,
    refusal_of,
)
from slipstream.jobs.request_pool import RequestPool, Work
from slipstream.sampling.params import SamplingParams, params_from
from slipstream.wiring.run_order import first_row, ordered

MAX_REPORTED_ERRORS = 20  # the error file has them all
WINDOW = 1024  # requests read, tokenized and ordered at a time


@dataclass
class JobReport:
    """Progress of a job."""

    total: int = 0  # lines of the input
    answered_before: int = 0  # by earlier runs
    answered: int = 0
    failed: int = 0
    seconds: float = 0.0  # of this run
    work: Work = field(default_factory=Work)
    # the first MAX_REPORTED_ERRORS messages, each with its file and line number
    errors: list[str] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Lines that are neither answered nor refused."""
        return self.total - self.answered_before - self.answered - self.failed

    @property
    def tokens_per_second(self) -> float | None:
        """Output tokens of this run per second."""
        return self.work.output_tokens / self.seconds if self.seconds > 0 else None

    @property
    def seconds_left(self) -> float | None:
        """Estimate at the speed of this run; None until a request has been answered."""
        return self.seconds / self.answered * self.remaining if self.answered else None

    def to_dict(self) -> dict[str, Any]:
        """The fields and the figures derived from them, as JSON values."""
        ratios = {"tokens_per_second": self.tokens_per_second, "acceptance_rate": self.work.acceptance_rate}
        return asdict(self) | {"remaining": self.remaining} | ratios


Progress = Callable[[JobReport], None]


class JobState:
    """The lines of a job and the answers written so far; opening it compares the two.

    fingerprint: of the model that answers; "" until it is known. UsageError if the output belongs to another job.
    """

    def __init__(self, files: JobFiles, digests: RequestDigest, report: JobReport, fingerprint: str = "") -> None:
        self._files, self._digests, self.report, self._fingerprint = files, digests, report, ""
        self._begun = monotonic()
        self._output = JobOutput(files.output)
        try:
            refusals = self._survey()
            self.expect(fingerprint)
            self._errors = ErrorFile(files.errors)  # deletes the last run's; by now the job is known to be the same
            for line, refusal in refusals:
                self.refuse(line, refusal)
            self._refused = {line.number for line, _ in refusals}
        except BaseException:
            self._output.close()
            raise

    def pending(self) -> Iterator[Line]:
        """The lines that are neither answered nor refused."""
        for line in self._files.lines:
            if line.number not in self._refused and _key(line) not in self._output.answered:
                yield line

    def answer(self, answers: Sequence[Mapping[str, Any]], fingerprint: str) -> None:
        """Write answers; UsageError if earlier answers came from another model."""
        if answers and fingerprint != self._fingerprint:
            raise self._of_another_model(None, self._fingerprint, fingerprint)
        self._output.append(answers)
        self.report.answered += len(answers)

    def expect(self, fingerprint: str) -> None:
        """Note the model's fingerprint, once it is known; UsageError if earlier answers came from another model."""
        if fingerprint and not self._fingerprint:
            self._fingerprint = fingerprint
            for answer in self._output.answered.values():
                if answer.fingerprint != fingerprint:
                    raise self._of_another_model(answer.number, answer.fingerprint, fingerprint)

    def refuse(self, line: Line, refusal: Mapping[str, Any]) -> None:
        """Write a line and the reason for its refusal to the error file."""
        self._errors.add(refusal)
        self.report.failed += 1
        if len(self.report.errors) < MAX_REPORTED_ERRORS:
            self.report.errors.append(f"{self._files.lines.name}, line {line.number}: {reason_of(refusal)}")

    def tick(self) -> JobReport:
        """The report, up to date."""
        self.report.seconds = monotonic() - self._begun
        return self.report

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the output, so that another process may continue the job."""
        self._output.close()

    def _survey(self) -> list[tuple[Line, Mapping[str, Any]]]:
        """Read all lines once; returns the bad ones with reasons. UsageError if the output is not this job's."""
        lines_by_id: dict[str, int] = {}
        refusals: list[tuple[Line, Mapping[str, Any]]] = []
        answered = self._output.answered
        for line in self._files.lines:
            self.report.total += 1
            try:
                key = _key(line)
                if key in lines_by_id:
                    raise UsageError(f"id {key!r:.80} is that of line {lines_by_id[key]}; allowed: an id for each line")
            except UsageError as error:
                refusals.append((line, refusal_of(line, self._digests.digest(line), error)))
                continue
            self._digests.check(line)
            lines_by_id[key] = line.number
            if key in answered:
                if answered[key].digest != self._digests.digest(line):
                    what = f"id {key!r:.80} has been answered to another request, or under other options"
                    raise self._of_another_job(answered[key].number, what)
                self.report.answered_before += 1
        for key, answer in answered.items():
            if key not in lines_by_id:
                raise self._of_another_job(answer.number, f"id {key!r:.80} is not in {self._files.lines.name!r}")
        return refusals

    def _of_another_job(self, number: int | None, why: str) -> UsageError:
        place = "" if number is None else f", line {number}"
        return UsageError(f"{str(self._files.output)!r}{place}: {why}; allowed: a new file, or the output of this job")

    def _of_another_model(self, number: int | None, there: str, loaded: str) -> UsageError:
        why = f"the answer came from the model with fingerprint {there}, but {loaded} is loaded"
        return self._of_another_job(number, why)


def _key(line: Line) -> str:
    if line.error:
        raise UsageError(line.error)
    return str(line.id)


class BatchJob:
    """Answers every line of a job once, and writes answers in the order in which they end."""

    def __init__(self, decoder: Decoder, files: JobFiles, options: JobOptions) -> None:
        self._decoder, self._files = decoder, files
        self._reader = LineReader(decoder, options)
        self.report = JobReport()

    def run(self, on_progress: Progress = lambda report: None) -> JobReport:
        """Answer the lines that no earlier run has answered. on_progress: called after every step.

        SlipstreamError if the files belong to another job or cannot be written; finished answers stay in them.
        """
        with JobState(self._files, self._reader.digests, self.report, self._reader.fingerprint) as state:
            pool, pending, more = RequestPool(self._decoder), state.pending(), True
            self.report.work = pool.work
            while more or pool.unfinished:
                while more and pool.has_room:
                    window = list(islice(pending, WINDOW))
                    more = len(window) == WINDOW
                    requests = [request for line in window if (request := self._read(state, line)) is not None]
                    pool.add(ordered(requests, first_row, self._decoder.shapes.reuse))
                if not more:
                    pool.await_together()
                self._write(state, pool.step())
                on_progress(state.tick())
            state.tick()
        return self.report

    def _read(self, state: JobState, line: Line) -> JobRequest | None:
        try:
            return self._reader.request_of(line)
        except Exception as error:  # a bad line does not end the job
            state.refuse(line, self._reader.refusal(line, error))
            return None

    def _write(self, state: JobState, ended: Iterable[JobRequest]) -> None:
        answers = []
        for request in ended:
            try:
                answers.append(request.answer())
            except Exception as error:  # the row's own
                state.refuse(request.line, self._reader.refusal(request.line, error))
        state.answer(answers, self._reader.fingerprint)


def run_batch(
    decoder: Decoder,
    source: str | Path | Iterable[Mapping[str, Any]],
    output: str | Path,
    params: SamplingParams | None,
    options: Mapping[str, Any],
) -> JobReport:
    """Run a job with an open decoder; `SpeculativeDecoder.batch` calls it."""
    names = ["errors", *(f.name for f in fields(JobOptions) if f.name != "params")]
    check_known("unknown option", options, [*names, *(f.name for f in fields(SamplingParams))])
    sampling: Any = {name: value for name, value in options.items() if name not in names}
    job_options = {name: value for name, value in options.items() if name in names[1:]}
    params = params_from(params, sampling) or SamplingParams()
    files = JobFiles.checked(source, output, options.get("errors"))
    return BatchJob(decoder, files, JobOptions(params=params, **job_options)).run()
