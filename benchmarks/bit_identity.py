"""Counts, over many settings, how many speculative texts have exactly the token ids of plain decoding.

    python benchmarks/bit_identity.py smollm2 PROMPTS.jsonl --num-prompts 60 --max-tokens 128
    python benchmarks/bit_identity.py TARGET PROMPTS.jsonl --draft DRAFT --reproducible false
    python benchmarks/bit_identity.py T FILE.jsonl --draft D --drafters suffix,auto,model --lengths 4 --lengths 4x2
    python benchmarks/bit_identity.py smollm2 PROMPTS.jsonl --part 1/3   # every third prompt; the parts add up

Settings are all combinations of drafters, draft lengths and batch sizes, greedy and at temperature 0.8 with a seed per
prompt (acceptance "match", whose draws do not depend on the draft). A length is a number, or a tree, DEPTHxWIDTH, for
drafters that branch; "auto" chooses its own. The reference is plain decoding, one prompt at a time. A greedy text that
differs is a tie if the reference's two tokens are nearly as likely. Exit code 1 if a text differs: at all in
reproducible mode, by more than a tie otherwise.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table
from terminal import JsonFile, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.certificate.parity import Difference, TieJudge, count_differences
from slipstream.drafters import check_name, traits
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import read_prompts, spread

Line = dict[str, Any]
ALLOWED = "allowed: a number as a length, or a drafter that branches; drafter none with a batch above 1"
Setting = tuple[str, int | str, int]  # drafter, draft length, batch size
COLUMNS = (
    "temperature",
    "drafter",
    "length",
    "batch",
    "identical",
    "ties",
    "different",
    "acceptance_rate",
    "seconds",
)


def settings(drafters: list[str], lengths: list[int | str], batches: list[int]) -> Iterator[Setting]:
    """The combinations that exist: trees only for drafters that branch, one length for "none" and "auto"."""
    fixed_lengths: dict[str, list[int | str]] = {"none": [0], "auto": ["auto"]}
    for drafter in drafters:
        if drafter not in fixed_lengths:
            check_name(drafter)
        branches = drafter in fixed_lengths or traits(drafter).branches
        usable = [length for length in lengths if branches or isinstance(length, int)]
        for length in fixed_lengths.get(drafter, usable):
            # plain decoding with batch size 1 is the reference itself
            yield from ((drafter, length, batch) for batch in batches if (drafter, batch) != ("none", 1))


@dataclass
class Tally:
    """The outcome of one setting."""

    setting: Line
    differences: list[Difference | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def line(self) -> Line:
        """The setting and its counts, as a line of the table."""
        rate = self.accepted / self.drafted if self.drafted else None
        return {**self.setting, **count_differences(self.differences), "acceptance_rate": rate, "seconds": self.seconds}


@dataclass
class Bench:
    """The loaded models and the settings. A small group of prompts goes through all settings before the next group.

    So its prompts stay in the KV cache from setting to setting and are read only once.
    """

    base: SpeculativeDecoder
    judge: TieJudge
    chosen: list[Setting]
    params: list[SamplingParams]

    def __post_init__(self) -> None:
        names = ("drafter", "length", "batch")
        self.plain = self.base.using("none")
        self.decoders = [self.base.using(name, num_draft_tokens=length) for name, length, _ in self.chosen]
        self.tallies = [
            [Tally({"temperature": p.temperature} | dict(zip(names, setting, strict=True))) for setting in self.chosen]
            for p in self.params
        ]

    def run(self, group: list[list[int]], first_seed: int) -> None:
        """Decode a group of prompts with all settings."""
        for params, tallies in zip(self.params, self.tallies, strict=True):
            seeded = [replace(params, seed=first_seed + i) for i in range(len(group))]
            expected = [self.plain.generate(ids, row).token_ids for ids, row in zip(group, seeded, strict=True)]
            for (_, _, batch), decoder, tally in zip(self.chosen, self.decoders, tallies, strict=True):
                self._measure(decoder, batch, group, seeded, expected, tally)

    def _measure(
        self,
        decoder: SpeculativeDecoder,
        batch: int,
        group: list[list[int]],
        params: list[SamplingParams],
        expected: list[list[int]],
        tally: Tally,
    ) -> None:
        begun, results = perf_counter(), []
        for first in range(0, len(group), batch):
            results += decoder.generate(group[first : first + batch], params[first : first + batch])
        tally.seconds += perf_counter() - begun
        tally.differences += [
            self.judge.judge(ids, text, result.token_ids, row)
            for ids, row, text, result in zip(group, params, expected, results, strict=True)
        ]
        tally.drafted += sum(r.stats.num_draft_tokens for r in results)
        tally.accepted += sum(r.stats.num_accepted_tokens for r in results)


def main(
    target: str,
    prompts: Path,
    draft: str | None = None,
    dtype: str = "auto",
    num_prompts: int = 60,
    max_tokens: int = 128,
    drafters: Annotated[
        str, typer.Option(help="separated by commas; by default none, ngram and, with --draft, model")
    ] = "",
    lengths: Annotated[list[str], typer.Option(help="draft length, or tree DEPTHxWIDTH; repeatable")] = ["1", "4", "7"],  # noqa: B006
    batches: Annotated[list[int], typer.Option(help="prompts decoded together; repeatable")] = [1, 4],  # noqa: B006
    temperatures: Annotated[list[float], typer.Option(help="0 is greedy; repeatable")] = [0.0, 0.8],  # noqa: B006
    reproducible: str = "true",
    part: Annotated[str, typer.Option(help="NUMBER/PARTS: of the prompts, every PARTS-th from NUMBER on")] = "1/1",
    json_file: JsonFile = None,
) -> None:
    """Run all settings and print one line for each."""
    quiet()
    started = perf_counter()
    reproducible_shapes = {"true": True, "false": False}.get(reproducible, reproducible)
    base = SpeculativeDecoder(
        target, draft, dtype=dtype, acceptance="match", reproducible=reproducible_shapes, max_batch_size=max(batches)
    )
    ids = [base.encode(p.prompt, chat=True) for p in spread(read_prompts(prompts), num_prompts)]
    number, _, parts = part.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise typer.BadParameter(f"--part {part!r}; allowed: NUMBER/PARTS, for example 1/3")
    ids = [tokens[-(base.target.backend.max_length - max_tokens) :] for tokens in ids]
    names = [name for name in drafters.split(",") if name] or ["none", "ngram", *(["model"] if draft else [])]
    chosen = list(settings(names, [int(text) if text.isdigit() else text for text in lengths], batches))
    if not chosen:
        asked = f"--drafters {','.join(names)} with --lengths {','.join(lengths)}"
        raise UsageError(f"{asked} is nothing to compare; {ALLOWED}")
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens) for temperature in temperatures]
    ids = ids[int(number) - 1 :: int(parts)]
    bench, size = Bench(base, TieJudge(base), chosen, params), max(batches)
    num_finished = 0
    try:
        for first in range(0, len(ids), size):
            bench.run(ids[first : first + size], first)
            num_finished = min(first + size, len(ids))
            lines = [tally.line() for tallies in bench.tallies for tally in tallies]
            totals = {name: sum(line[name] for line in lines) for name in ("identical", "ties", "different")}
            seconds = round(perf_counter() - started)
            print(json.dumps({"prompts": num_finished, **totals, "seconds": seconds}), file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        console.print(f"interrupted after {num_finished} of {len(ids)} prompts; the figures below count those")
    lines = [tally.line() for tallies in bench.tallies for tally in tallies]
    table = Table(*COLUMNS)
    for line in lines:
        table.add_row(*(_cell(line[name]) for name in COLUMNS))
    console.print(table)
    num_wrong = sum(line["different"] + (line["ties"] if base.reproducible else 0) for line in lines)
    num_identical, total = (
        sum(line["identical"] for line in lines),
        sum(len(t.differences) for ts in bench.tallies for t in ts),
    )
    console.print(
        f"{target}, {dtype}, {'reproducible' if base.reproducible else 'not reproducible'}: "
        f"{num_identical} of {total} texts of up to {max_tokens} tokens identical to plain decoding, "
        f"{perf_counter() - started:.0f} s"
    )
    if json_file is not None:
        report = {
            "part": part,
            "target": target,
            "draft": draft,
            "dtype": dtype,
            "identical": num_identical,
            "texts": total,
            "lines": lines,
        }
        json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    sys.exit(1 if num_wrong else 0)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run(main)
