"""Is speculative text identical, to the bit of every token id, to plain text? Counted over many settings.

    python benchmarks/bit_identity.py smollm2 PROMPTS.jsonl --num-prompts 60 --max-tokens 128
    python benchmarks/bit_identity.py TARGET PROMPTS.jsonl --draft DRAFT --reproducible false
    python benchmarks/bit_identity.py T FILE.jsonl --draft D --drafters suffix,auto,model --lengths 4 --lengths 4x2
    python benchmarks/bit_identity.py smollm2 PROMPTS.jsonl --part 1/3   # every third prompt; the parts add up

Settings: drafters x draft lengths x batch sizes, greedy and at temperature 0.8 with a seed per prompt (acceptance
"match", which couples draws). A length is a number or a tree, DEPTHxWIDTH, which only drafters that branch take; "auto"
has lengths of its own. The reference is plain decoding, one prompt at a time. Differing greedy texts are put to
the judge of ties. Exit code 1 if a text differs in reproducible mode, or differs by more than a tie otherwise.
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
NEEDED = "allowed: a number as a length, or a drafter that branches; none in batches"
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
    """Of all combinations those that there are."""
    own: dict[str, list[int | str]] = {"none": [0], "auto": ["auto"]}
    for drafter in drafters:
        if drafter not in own:
            check_name(drafter)
        branches = drafter in own or traits(drafter).branches
        for length in own.get(drafter, [one for one in lengths if branches or isinstance(one, int)]):
            # plain decoding one by one is the reference itself
            yield from ((drafter, length, batch) for batch in batches if (drafter, batch) != ("none", 1))


@dataclass
class Tally:
    """What came of one setting."""

    setting: Line
    differences: list[Difference | None] = field(default_factory=list)
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def line(self) -> Line:
        """The counts."""
        rate = self.accepted / self.drafted if self.drafted else None
        return {**self.setting, **count_differences(self.differences), "acceptance_rate": rate, "seconds": self.seconds}


@dataclass
class Bench:
    """The loaded models and the settings. Prompts come in small groups, each through all settings.

    A group's prompts stay in the KV cache from setting to setting, so they are processed once in whole chunks.
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
        """All settings over a group of prompts."""
        for params, tallies in zip(self.params, self.tallies, strict=True):
            each = [replace(params, seed=first_seed + i) for i in range(len(group))]
            expected = [self.plain.generate(tokens, one).token_ids for tokens, one in zip(group, each, strict=True)]
            for (_, _, batch), decoder, tally in zip(self.chosen, self.decoders, tallies, strict=True):
                self._measure(decoder, batch, group, each, expected, tally)

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
        for at in range(0, len(group), batch):
            results += decoder.generate(group[at : at + batch], params[at : at + batch])
        tally.seconds += perf_counter() - begun
        tally.differences += [
            self.judge.judge(tokens, want, got.token_ids, one)
            for tokens, one, want, got in zip(group, params, expected, results, strict=True)
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
    drafters: Annotated[str, typer.Option(help="by default none, ngram and, with a draft model, model")] = "",
    lengths: Annotated[list[str], typer.Option()] = ["1", "4", "7"],  # noqa: B006
    batches: Annotated[list[int], typer.Option()] = [1, 4],  # noqa: B006
    temperatures: Annotated[list[float], typer.Option()] = [0.0, 0.8],  # noqa: B006
    reproducible: str = "true",
    part: str = "1/1",
    json_file: JsonFile = None,
) -> None:
    """Run all settings and print one line for each."""
    quiet()
    started = perf_counter()
    keep = {"true": True, "false": False}.get(reproducible, reproducible)
    base = SpeculativeDecoder(
        target, draft, dtype=dtype, acceptance="match", reproducible=keep, max_batch_size=max(batches)
    )
    ids = [base.encode(p.prompt, chat=True) for p in spread(read_prompts(prompts), num_prompts)]
    number, _, parts = part.partition("/")
    if not (number.isdigit() and parts.isdigit() and 1 <= int(number) <= int(parts)):
        raise typer.BadParameter(f"--part {part!r}; allowed: NUMBER/PARTS, for example 1/3")
    ids = [tokens[-(base.target.backend.max_length - max_tokens) :] for tokens in ids]
    names = [name for name in drafters.split(",") if name] or ["none", "ngram", *(["model"] if draft else [])]
    chosen = list(settings(names, [int(one) if one.isdigit() else one for one in lengths], batches))
    if not chosen:
        said = f"--drafters {','.join(names)} with --lengths {','.join(lengths)}"
        raise UsageError(f"{said} is nothing to compare; {NEEDED}")
    params = [SamplingParams(temperature=temperature, max_tokens=max_tokens) for temperature in temperatures]
    ids = ids[int(number) - 1 :: int(parts)]
    bench, size = Bench(base, TieJudge(base), chosen, params), max(batches)
    done_prompts = 0
    try:
        for at in range(0, len(ids), size):
            bench.run(ids[at : at + size], at)
            counts = [tally.line() for tallies in bench.tallies for tally in tallies]
            done = {name: sum(line[name] for line in counts) for name in ("identical", "ties", "different")}
            seconds = round(perf_counter() - started)
            print(json.dumps({"prompts": at + size, **done, "seconds": seconds}), file=sys.stderr, flush=True)
            done_prompts = min(at + size, len(ids))
    except KeyboardInterrupt:
        console.print(f"interrupted after {done_prompts} of {len(ids)} prompts; what follows counts those")
    lines = [tally.line() for tallies in bench.tallies for tally in tallies]
    table = Table(*COLUMNS)
    for line in lines:
        table.add_row(*(_cell(line[name]) for name in COLUMNS))
    console.print(table)
    wrong = sum(line["different"] + (line["ties"] if base.reproducible else 0) for line in lines)
    same, total = sum(line["identical"] for line in lines), sum(len(t.differences) for ts in bench.tallies for t in ts)
    console.print(
        f"{target}, {dtype}, {'reproducible' if base.reproducible else 'not reproducible'}: {same} of {total} texts of "
        f"up to {max_tokens} tokens identical to plain decoding, {perf_counter() - started:.0f} s"
    )
    if json_file is not None:
        report = {
            "part": part,
            "target": target,
            "draft": draft,
            "dtype": dtype,
            "identical": same,
            "texts": total,
            "lines": lines,
        }
        json_file.write_text(json.dumps(report, indent=1), encoding="utf-8")
    sys.exit(1 if wrong else 0)


def _cell(value: Any) -> str:
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    run(main)
