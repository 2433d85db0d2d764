"""The data of a report: a folder of runs, their summaries, ratios, and outputs colored by origin.

Marks need no color: rejected tokens are struck through, the target's own are underlined, those from a branch doubly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from slipstream.bench.arms import HF, PLAIN, check_reference, label, parse_arm, uses_draft_model
from slipstream.bench.length_series import references, summarize_over
from slipstream.bench.records import Header, Run, read_records
from slipstream.bench.summary import FEWEST_GROUPS, RESAMPLES, SEED, ArmSummary, Estimate, estimated
from slipstream.checks import counted
from slipstream.core.rounds import Round, Seconds
from slipstream.errors import UsageError
from slipstream.text.round_view import views
from slipstream.tokenization.tokenizer import Tokenizer

MAX_SAMPLE_TOKENS = 400  # shown of a text
CSS_CLASSES = {
    "accepted": "acc",
    "branch": "acc tree",
    "forced": "acc",
    "rejected": "rej",
    "recovered": "own",
    "bonus": "own",
    "plain": "",
}


@dataclass(frozen=True)
class Records:
    """The runs of a benchmark, with a summary of each arm at each batch size."""

    header: Header
    runs: list[Run]
    summaries: list[ArmSummary]
    references: dict[str, str]  # the arm that each arm's speed-up refers to

    def label(self, name: str) -> str:
        """The name of an arm or a series of arms in words, with its temperature if the runs have several."""
        several = len({parse_arm(arm).temperature for arm in self.references}) > 1
        return label(name, temperature=several)

    @cached_property
    def by_batch(self) -> dict[int, list[ArmSummary]]:
        """The arms of each batch size, in the order in which they were measured."""
        sizes = dict.fromkeys(arm.batch for arm in self.summaries)
        return {size: [arm for arm in self.summaries if arm.batch == size] for size in sizes}

    def of_family(self, family: str) -> Records:
        """The runs of one family of prompts."""
        runs = [run for run in self.runs if run.family == family]
        return replace(self, runs=runs, summaries=summarize_over(runs, self.references))

    def runs_of(self, arm: str, batch: int) -> list[Run]:
        """The runs of an arm at a batch size that did not fail."""
        return [run for run in self.runs if run.arm == arm and run.batch == batch and run.error is None]


def load(folder: Path) -> Records:
    """Read a folder written by `slipstream bench`, `slipstream sweep` or `slipstream tune`."""
    header, runs = read_records(folder)
    names, default = header.settings.get("arms"), header.settings.get("reference")
    if not isinstance(names, list) or not isinstance(default, str):
        raise UsageError(
            f"the header in {str(folder)!r} names no arms or no reference; allowed: a folder written by a benchmark"
        )
    if not runs:
        raise UsageError(f"folder {str(folder)!r} holds no runs yet; allowed: at least one finished run")
    names = list(dict.fromkeys((*names, *(run.arm for run in runs))))  # `tune` chooses arms while it measures
    return records_of(replace(header, settings={**header.settings, "arms": names}), runs)


def records_of(header: Header, runs: list[Run]) -> Records:
    """Runs with their summaries, each arm against its own reference."""
    base = references(header.settings["arms"], header.settings["reference"])
    return Records(header, runs, summarize_over(runs, base), base)


def against(data: Records, reference: str) -> Records:
    """Summaries of the runs with every speed-up relative to one arm."""
    names = list(data.references)
    check_reference(reference, names)
    base = dict.fromkeys(names, reference)
    return replace(data, summaries=summarize_over(data.runs, base), references=base)


def models(data: Records) -> str:
    """The target, and the draft model with the arms that use it, if any do."""
    target, draft = data.header.settings.get("target"), data.header.settings.get("draft")
    speculative = [name for name in data.references if parse_arm(name).drafter != PLAIN and name != HF]
    users = [name for name in speculative if uses_draft_model(parse_arm(name))] if draft else []
    if not users:
        return str(target)
    whose = "" if users == speculative else f" of {', '.join(map(data.label, users))}"
    return f"{target} with {draft} as draft model{whose}"


def machine_words(header: Header) -> str:
    """The machine and the versions of a run in one line."""
    machine, versions = header.machine, header.versions
    gpu = f"{machine['gpu']}, " if machine.get("gpu") else ""
    memory = f", {machine['memory_gib']} GiB" if machine.get("memory_gib") is not None else ""
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{gpu}{machine.get('processor')}, {machine.get('cores')} cores{memory}; {libraries}."


def efficiency(arm: ArmSummary) -> str:
    """Output tokens per forward of the target; a dash if unknown."""
    return "-" if arm.block_efficiency is None else f"{arm.block_efficiency:.2f}"


def total_ratio(above: Sequence[float], below: Sequence[float]) -> Estimate | None:
    """sum(above) / sum(below), each with one number per prompt (or group of prompts), and its 95 % interval.

    A resample draws prompts with replacement. None if sum(below) is 0; no interval for fewer than `FEWEST_GROUPS`.
    """
    upper, lower = np.array(above, dtype=np.float64), np.array(below, dtype=np.float64)
    if not lower.sum():
        return None
    value = float(upper.sum() / lower.sum())
    prompts = len(lower)
    if prompts < FEWEST_GROUPS:
        return Estimate(value)
    sampled = np.random.default_rng(SEED).integers(0, prompts, (RESAMPLES, prompts))
    over, under = upper[sampled].sum(axis=1), lower[sampled].sum(axis=1)
    defined = under > 0  # a resample of prompts for which nothing was drafted says nothing
    return estimated(value, over[defined] / under[defined])


def acceptance(runs: Sequence[Run]) -> Estimate | None:
    """Accepted over drafted tokens; None if nothing was drafted."""
    return total_ratio(_counts(runs, "num_accepted_tokens"), _counts(runs, "num_draft_tokens"))


def acceptance_at(runs: Sequence[Run], place: int) -> Estimate | None:
    """Accepted over drafted tokens at one position of the draft, from 0; None if nothing was drafted there."""
    return total_ratio(_counts(runs, "accepted_per_position", place), drafted_at(runs, place))


def drafted_at(runs: Sequence[Run], place: int) -> list[float]:
    """Tokens drafted at one position in each prompt (or group of prompts), over all repeats."""
    return _counts(runs, "drafted_per_position", place)


def _counts(runs: Sequence[Run], name: str, place: int | None = None) -> list[float]:
    """Sums of a statistic over the repeats of each prompt or group of prompts, without runs that have no statistics.

    place: of a statistic by position in the draft.
    """
    sums: dict[tuple[str, ...], float] = {}
    for run in runs:
        if run.stats is not None:
            value = run.stats[name] if place is None else sum(run.stats[name][place : place + 1])
            sums[tuple(run.prompts)] = sums.get(tuple(run.prompts), 0.0) + value
    return list(sums.values())


def restored(rounds: Sequence[Mapping[str, Any]], row: int, num_rows: int) -> list[Round]:
    """The recorded rounds of one row, as the loop made them; the last one counts as finished."""
    of_row = [r for r in rounds if r["row"] == row]
    return [
        Round(
            row=row,
            step=r["step"],
            num_rows=num_rows,
            start=r["start"],
            draft=tuple(r["draft"]),
            tokens=tuple(r["tokens"]),
            num_accepted_tokens=r["accepted"],
            rejected=r["rejected"],
            finish_reason="length" if r is of_row[-1] else None,
            seconds=Seconds(*r["seconds"]),
            parents=tuple(r["parents"]) if "parents" in r else None,
            path=tuple(r["path"]) if "path" in r else None,
        )
        for r in of_row
    ]


def sampled_texts(runs: Sequence[Run], fastest: Sequence[str], per_family: int) -> dict[str, list[tuple[Run, int]]]:
    """Up to `per_family` samples of each family: a run that drafted, and the row in it; every prompt once.

    fastest: all arms, in the order of preference.
    """
    families: dict[str, list[tuple[Run, int]]] = {}
    seen: set[str] = set()
    for run in sorted(runs, key=lambda r: (r.batch, fastest.index(r.arm), r.repeat)):
        drafted = run.stats is not None and run.stats["num_draft_tokens"] > 0
        for row, prompt in enumerate(run.prompts if drafted and run.rounds else ()):
            texts = families.setdefault(run.family, [])
            if prompt not in seen and len(texts) < per_family:
                seen.add(prompt)
                texts.append((run, row))
    return families


@dataclass(frozen=True)
class Sample:
    """One output, and a caption with its arm, its acceptance and its verdict."""

    caption: str
    prompt: str  # "" if the folder does not hold it
    spans: list[tuple[str, str]]  # pairs of a CSS class, which marks the fate of tokens, and a piece of the output
    is_shortened: bool


def sample(
    run: Run, row: int, tokenizer: Tokenizer | None, label: str | None = None, prompts: Mapping[str, str] | None = None
) -> Sample:
    """The output of a run's row. label: the arm in words; prompts: by name."""
    rounds = list(views(restored(run.rounds or [], row, run.batch), tokenizer))
    pieces = [piece for view in rounds for piece in view.pieces]
    acceptance = rounds[-1].acceptance if rounds else "-"
    verdict = run.verdicts[row] if row < len(run.verdicts) else "not compared"
    caption = (
        f"{label or run.arm}, prompt {run.prompts[row]}: {counted(len(rounds), 'round')}, "
        f"{acceptance} of drafted tokens accepted; text: {verdict}"
    )
    spans = [(CSS_CLASSES[piece.kind], piece.text) for piece in pieces[:MAX_SAMPLE_TOKENS] if piece.text]
    return Sample(caption, (prompts or {}).get(run.prompts[row], ""), spans, len(pieces) > MAX_SAMPLE_TOKENS)


def local_time(text: str) -> str:
    """An ISO time in the reader's time zone, with the zone's name; any other string unchanged."""
    try:
        moment = datetime.fromisoformat(text).astimezone()
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname()}"
