"""A job from its first line to its last: read, compared with what is there, decoded, written as it comes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from slipstream.errors import UsageError
from slipstream.jobs.error_file import ErrorFile
from slipstream.jobs.job_lines import Line, Lines, lines_of
from slipstream.jobs.job_output import JobOutput, output_lines
from slipstream.jobs.line_kinds import Asked, JobOptions, LineReader, reason_of
from slipstream.jobs.parquet_files import check_pyarrow, is_parquet, write_parquet
from slipstream.jobs.request_order import ordered
from slipstream.jobs.request_pool import RequestPool, Work
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder

WINDOW = 1024  # requests that are read, tokenised and ordered at a time


@dataclass
class JobReport:
    """How far a job is. total: lines; answered_before: by earlier runs; seconds: of this run.

    errors: the first lines of what went wrong, each with its file and line number.
    """

    total: int = 0
    answered_before: int = 0
    answered: int = 0
    failed: int = 0
    seconds: float = 0.0
    work: Work = field(default_factory=Work)
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
        """At the speed of this run; None until a request has been answered."""
        return self.seconds / self.answered * self.remaining if self.answered else None

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        ratios = {"tokens_per_second": self.tokens_per_second, "acceptance_rate": self.work.acceptance_rate}
        return asdict(self) | {"remaining": self.remaining} | ratios


Progress = Callable[[JobReport], None]


@dataclass(frozen=True)
class JobFiles:
    """Where a job reads and writes. output: JSON lines, beside a Parquet file its journal `NAME.parquet.jsonl`."""

    lines: Lines
    output: Path
    errors: Path
    parquet: Path | None = None

    @classmethod
    def of(
        cls, source: str | Path | Iterable[Mapping[str, Any]], output: str | Path, errors: str | Path | None = None
    ) -> JobFiles:
        """Check the names before anything is loaded; nothing is created."""
        path = Path(output)
        files = [one for one in (source, output) if isinstance(one, str | Path)]
        check_pyarrow(*files)
        parquet = path if is_parquet(path) else None
        journal = path if parquet is None else path.with_name(f"{path.name}.jsonl")
        refusals = path.with_name(f"{path.stem}.errors.jsonl") if errors is None else Path(errors)
        taken = {"the input": Path(source)} if isinstance(source, str | Path) else {}
        for name, one in (("the output", journal), ("the error file", refusals)):
            for other, known in taken.items():
                if one.absolute() == known.absolute() or (one.exists() and known.exists() and one.samefile(known)):
                    raise UsageError(f"{str(one)!r} is {name} and {other}; allowed: two files")
            if one.is_dir() or not one.absolute().parent.is_dir():
                why = "it is a folder" if one.is_dir() else f"the folder {str(one.parent)!r} does not exist"
                raise UsageError(f"{name} {str(one)!r} cannot be written: {why}")
            taken[name] = one
        if isinstance(source, str | Path) and not Path(source).is_file():
            raise UsageError(f"{str(source)!r} cannot be read; allowed: a file with one request per line")
        return cls(lines_of(source), journal, refusals, parquet)


class BatchJob:
    """Answers every line of a job once. Lines are written in the order in which they end. report: how far it is."""

    def __init__(self, decoder: SpeculativeDecoder, files: JobFiles, options: JobOptions) -> None:
        self._decoder, self._files = decoder, files
        self._reader = LineReader(decoder, options)
        self.report = JobReport()
        self._begun = 0.0

    def run(self, on_progress: Progress = lambda report: None) -> JobReport:
        """Answer what no earlier run has answered. on_progress: called after every step.

        SlipstreamError if the files are another job's or cannot be written; what is finished stays in them.
        """
        self._begun = monotonic()
        with JobOutput(self._files.output) as output:
            self._output, self._errors = output, ErrorFile(self._files.errors)
            refused = self._survey()
            self._decode(self._pending(refused), on_progress)
        if self._files.parquet is not None:
            write_parquet(self._files.parquet, OutputRows(self._files.output))
        return self.report

    def _survey(self) -> set[int]:
        """Read all lines once: refuse the bad ones, and an output that is not this job's; returns their numbers."""
        known: dict[str, int] = {}
        refused: set[int] = set()
        answered = self._output.answered
        for line in self._files.lines:
            self.report.total += 1
            try:
                key = _key(line)
                if key in known:
                    raise UsageError(f"id {key!r:.80} is that of line {known[key]}; allowed: an id for each line")
            except UsageError as error:
                refused.add(line.number)
                self._refuse(line, error)
                continue
            self._reader.check(line)
            known[key] = line.number
            if key in answered:
                self._check_answer(line, key)
                self.report.answered_before += 1
        for key, found in answered.items():
            if key not in known:
                raise self._of_another_job(found.number, f"id {key!r:.80} is not in {self._files.lines.name!r}")
        return refused

    def _check_answer(self, line: Line, key: str) -> None:
        found = self._output.answered[key]
        if found.fingerprint != self._reader.fingerprint:
            what = f"the answer is a model's with fingerprint {found.fingerprint}, loaded is {self._reader.fingerprint}"
            raise self._of_another_job(found.number, what)
        if found.digest != self._reader.digest(line):
            what = f"id {key!r:.80} has been answered to another request, or under other options"
            raise self._of_another_job(found.number, what)

    def _of_another_job(self, number: int, why: str) -> UsageError:
        return UsageError(
            f"{str(self._files.output)!r}, line {number}: {why}; allowed: a new file, or the output of this job"
        )

    def _pending(self, refused: set[int]) -> Iterator[Line]:
        for line in self._files.lines:
            if line.number not in refused and _key(line) not in self._output.answered:
                yield line

    def _decode(self, pending: Iterator[Line], on_progress: Progress) -> None:
        pool = RequestPool(self._decoder)
        self.report.work = pool.work
        more = True
        while more or pool.unfinished:
            while more and pool.hungry:
                window = list(islice(pending, WINDOW))
                more = len(window) == WINDOW
                requests = [one for one in map(self._read, window) if one is not None]
                pool.add(ordered(requests, self._decoder.shapes.reuse))
            if not more:
                pool.await_together()
            self._write(pool.step())
            self.report.seconds = monotonic() - self._begun
            on_progress(self.report)

    def _read(self, line: Line) -> Asked | None:
        try:
            return self._reader.asked(line)
        except Exception as error:  # of this line; the others go on
            self._refuse(line, error)
            return None

    def _write(self, ended: Iterable[Asked]) -> None:
        answers = []
        for request in ended:
            try:
                answers.append(request.answer())
            except Exception as error:  # the row's own
                self._refuse(request.line, error)
        self._output.append(answers)
        self.report.answered += len(answers)

    def _refuse(self, line: Line, error: Exception) -> None:
        told = UsageError(line.error) if line.error else error
        refusal = self._reader.refusal(line, told)
        self._errors.add(refusal)
        self.report.failed += 1
        if len(self.report.errors) < MOST_TOLD:
            self.report.errors.append(f"{self._files.lines.name}, line {line.number}: {reason_of(refusal)}")


MOST_TOLD = 20  # errors that a report repeats; the error file has them all


@dataclass(frozen=True)
class OutputRows:
    """The lines of an output, which can be read again."""

    path: Path

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return iter(output_lines(self.path))


def _key(line: Line) -> str:
    if line.error:
        raise UsageError(line.error)
    return str(line.id)


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
        raise UsageError(f"unknown option {unknown[0]!r}; allowed: {', '.join(known)}")
    own = {name: value for name, value in options.items() if name != "errors"}
    files = JobFiles.of(source, output, options.get("errors"))
    return BatchJob(decoder, files, JobOptions(params=params or SamplingParams(), **own)).run()
