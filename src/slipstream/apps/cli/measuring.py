"""Runs a benchmark for `bench` and `sweep`: shows its progress, and continues an interrupted one."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn

from slipstream.apps.cli.application import interruptible, load_decoder, warn_lossy
from slipstream.apps.cli.consoles import err
from slipstream.apps.cli.flags import Models
from slipstream.apps.cli.report import target_tokenizer
from slipstream.bench.arms import Arm
from slipstream.bench.lineup import Lineup, Runner
from slipstream.bench.plan import BenchPrompt, Measurement, plan
from slipstream.bench.records import FILE, Header, Run, finished, make_header, open_folder
from slipstream.bench.report import write_report
from slipstream.bench.result_tables import progress_line
from slipstream.bench.summary import ArmSummary, wrong_texts
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError
from slipstream.models.heads.head_files import EMBEDDED_NAME
from slipstream.models.notices import OneLineProgress, TimeLeft
from slipstream.models.weights.model_files import NO_DRAFT
from slipstream.sampling.params import SamplingParams
from slipstream.wiring.model_pair import has_embedded_head


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: every arm on every prompt, at every batch size."""

    models: Models
    config: DecoderConfig
    params: SamplingParams
    prompts: Sequence[BenchPrompt]
    arms: Sequence[Arm]
    reference: str  # the arm that speed-ups refer to
    batches: Sequence[int]
    repeats: int
    at_once: int | None = None
    chat: bool = True  # prompts get the model's chat template

    def run(self, folder: Path) -> tuple[Header, list[Run]]:
        """Make the measurements that the folder lacks; if it lacks none, no model is loaded."""
        planned = plan(self.arms, self.prompts, self.batches, self.repeats, self.at_once)
        header = self._header()
        earlier = open_folder(folder, header)
        if finished(earlier) >= {measurement.key for measurement in planned}:
            err.print(f"all {len(earlier)} measurements are there already")
            return header, earlier
        where = shlex.quote(str(folder))
        with interruptible(lambda: f"finished runs are saved: the same command with --out {where} continues"):
            lineup = Lineup(load_decoder(self.models, self.config), self.arms, self.params, chat=self.chat)
            for arm in self.arms:
                if arm.acceptance is not None and not lineup.decoders[arm.name].lossless:
                    warn_lossy(arm.acceptance)
            runs = Runner(lineup, planned, folder).run(earlier)
            return header, [*earlier, *watched(runs, planned, earlier)]

    def _header(self) -> Header:
        settings: dict[str, Any] = {
            "reference": self.reference,
            "batch_sizes": list(self.batches),
            "repeats": self.repeats,
            "chat": self.chat,
        }
        if self.at_once is not None:
            settings["at_once"] = self.at_once
        models = {"target": self.models.target, "draft": draft_before_loading(self.models, self.config)}
        return make_header(models, self.arms, self.prompts, self.config, self.params, command_line(), **settings)


def draft_before_loading(models: Models, config: DecoderConfig) -> str | None:
    """The draft model as the user named it, or the embedded model's head; MTP layers are found only by loading."""
    if models.draft is None and has_embedded_head(models.target, config):
        return EMBEDDED_NAME
    return None if models.draft == NO_DRAFT else models.draft


def command_line() -> str:
    """The command as it was typed, without --out, so that repeating it measures again in another folder."""
    arguments = iter(sys.argv[1:])
    kept = []
    for argument in arguments:
        if argument == "--out":
            next(arguments, None)
        elif not argument.startswith("--out="):
            kept.append(argument)
    return shlex.join(["slipstream", *kept])


def report_folder(folder: Path, header: Header, *, page: bool) -> None:
    """Write the report if it was requested, and print where the files are."""
    if page:
        err.print(f"report: {write_report(folder, target_tokenizer(header))}", soft_wrap=True)
    err.print(f"raw runs: {folder / FILE}", soft_wrap=True)


def fail_on_wrong_texts(summaries: Sequence[ArmSummary]) -> None:
    """SlipstreamError if an output of a lossless arm differs from plain decoding's by more than a tie."""
    for arm in wrong_texts(summaries):
        raise SlipstreamError(
            f"arm {arm.arm}, batch {arm.batch}: {arm.verdicts['different']} of {sum(arm.verdicts.values())} texts "
            "differ from plain decoding and are not ties"
        )


def watched(runs: Iterator[Run], planned: Sequence[Measurement], earlier: Sequence[Run]) -> Iterator[Run]:
    """Pass the runs on, with a progress bar on a terminal; elsewhere, with a line per finished group of prompts."""
    if earlier:
        err.print(f"{len(earlier)} of {len(planned)} measurements are in the folder already")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeLeft())
    with OneLineProgress(*columns, console=err, disable=not err.is_terminal) as progress:
        task = progress.add_task("warming up", total=len(planned), completed=len(earlier))
        groups = _Groups(planned, earlier)
        for run in runs:
            progress.update(task, advance=1, description=escape(f"{run.prompts[0]} {run.arm}"))
            line = groups.add(run)
            if line is not None and not err.is_terminal:
                err.sentence(line)
            yield run


class _Groups:
    """Collects the runs of each group of prompts until all arms and repeats are complete."""

    def __init__(self, planned: Sequence[Measurement], earlier: Sequence[Run]) -> None:
        self._runs: dict[tuple[int, tuple[str, ...]], list[Run]] = {}
        self._sizes = Counter((measurement.batch, tuple(measurement.group.ids)) for measurement in planned)
        for run in earlier:
            self.add(run)

    def add(self, run: Run) -> str | None:
        """Add a run; returns the line about its group if the run completes it."""
        key = run.batch, tuple(run.prompts)
        runs = self._runs.setdefault(key, [])
        runs.append(run)
        if len(runs) < self._sizes[key]:
            return None
        finished_groups = sum(len(self._runs[group]) == self._sizes[group] for group in self._runs)
        return progress_line(finished_groups, len(self._sizes), runs)
