"""How much slower are reproducible forward shapes than shapes that fit their tokens, end to end and in parts?

    python benchmarks/reproducible_cost.py smollm2 PROMPTS.jsonl
    python benchmarks/reproducible_cost.py TARGET PROMPTS.jsonl --draft DRAFT --dtype float32

First it calibrates, whatever is saved, and prints how much longer a plain step takes at the agreeing widths than
at the fastest one. Then it decodes every prompt greedily, plain and speculative, with both kinds of shapes in turns. A
prompt's times are medians of its turns. A cost is the ratio of two times minus 1: end to end the geometric mean over
the prompts, for the parts the median, each with its range. The time of a round is that of its verification; the time of
reading the prompt is the target's. Texts of the free shapes are compared with those of the reproducible ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from time import perf_counter
from typing import Any

import torch
from rich.table import Table
from terminal import Count, JsonFile, console, run, save

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.certificate.parity import Difference, TieJudge, count_differences
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.reproducibility.calibration import Calibration, calibrate
from slipstream.text.prompt_sets import read_prompts, spread

WARM_UP = SamplingParams(max_tokens=8).explicit


@dataclass(frozen=True)
class Parts:
    """Seconds of a text per output token, of reading its prompt, and per round; or ratios of these, see `ratio`."""

    token: float
    reading: float
    round: float

    @classmethod
    def ratio(cls, agreeing: Sequence[Parts], free: Sequence[Parts]) -> Parts:
        """Medians over the turns, reproducible / free."""
        return cls(
            median(turn.token for turn in agreeing) / median(turn.token for turn in free),
            median(turn.reading for turn in agreeing) / median(turn.reading for turn in free),
            median(turn.round for turn in agreeing) / median(turn.round for turn in free),
        )


@dataclass(frozen=True)
class Costs:
    """The costs of one drafter, over all prompts."""

    drafter: str
    ratios: list[Parts]
    differences: list[Difference | None]

    @property
    def whole(self) -> list[float]:
        """The end-to-end ratios, one per prompt."""
        return [ratio.token for ratio in self.ratios]

    @property
    def mean(self) -> float:
        """The geometric mean of the end-to-end ratios."""
        return geometric_mean(self.whole)

    @property
    def line(self) -> str:
        """The costs as a line of text."""
        rounds, reading = [ratio.round for ratio in self.ratios], [ratio.reading for ratio in self.ratios]
        return (
            f"{self.drafter} {_signed(self.mean)} ({_range(self.whole)} by prompt); "
            f"a round {_signed(median(rounds))} ({_range(rounds)}), "
            f"reading the prompt {_signed(median(reading))} ({_range(reading)})"
        )


def main(
    target: str,
    prompts: Path,
    draft: str | None = None,
    dtype: str = "auto",
    num_prompts: Count = 8,
    max_tokens: Count = 64,
    repeats: Count = 5,
    calibrations: Count = 3,
    json_file: JsonFile = None,
) -> None:
    """Print the calibrations, a table of end-to-end costs and texts, and a line of costs per drafter."""
    quiet()
    base = SpeculativeDecoder(target, draft, dtype=dtype, reproducible=True)
    ids = [base.encode(p.prompt, chat=True) for p in spread(read_prompts(prompts), num_prompts)]
    ids = [tokens[-(base.target.backend.max_length - max_tokens) :] for tokens in ids]
    if any(len(tokens) < 2 for tokens in ids):
        raise UsageError("a prompt of one token has nothing to read; allowed: prompts of two tokens or more")
    calibrated = fresh_calibrations(base, calibrations)
    console.print(calibration_line(base, calibrated), soft_wrap=True)
    drafters = ["none", "ngram", *(["model"] if draft else [])]
    costs = [measure(base, name, ids, SamplingParams(max_tokens=max_tokens).explicit, repeats) for name in drafters]
    console.print(table_of(costs))
    lengths = [len(tokens) for tokens in ids]
    console.print(f"{max_tokens} new tokens after prompts of {min(lengths)} to {max(lengths)} tokens:")
    for cost in costs:
        console.print(cost.line, soft_wrap=True)
    report: dict[str, Any] = {"target": target, "draft": draft, "dtype": dtype, "torch": torch.__version__}
    report["calibrations"] = [asdict(c) | {"cost": c.cost} for c in calibrated]
    save(json_file, report | {"costs": [_as_json(cost) for cost in costs]})


def fresh_calibrations(base: SpeculativeDecoder, count: int) -> list[Calibration]:
    """Calibrate `count` times, without reading or writing saved calibrations. Clears the decoder's KV cache."""
    calibrations = [calibrate(base.target.backend, base.config.max_batch_size) for _ in range(count)]
    base.forget()
    if not all(calibration.agrees for calibration in calibrations):
        raise SlipstreamError("a fresh calibration found no shapes that agree, although the saved one did; try again")
    return calibrations


def calibration_line(base: SpeculativeDecoder, calibrations: Sequence[Calibration]) -> str:
    """The calibrations as a line of text."""
    model, costs = base.target.model, [100 * calibration.cost for calibration in calibrations]
    name = base.target.name if model is None else f"{base.target.name} {str(model.dtype).removeprefix('torch.')}"
    widths = " or ".join(sorted({", ".join(map(str, calibration.widths)) for calibration in calibrations}))
    units = " or ".join(map(str, sorted({calibration.attended_unit for calibration in calibrations})))
    return (
        f"Calibration, {name}{' packed' if base.target.packed else ''}: a plain step takes {min(costs):.1f} to "
        f"{max(costs):.1f} % longer than at the fastest width ({len(calibrations)} fresh); widths {widths} agree, "
        f"attended lengths are multiples of {units}"
    )


def measure(
    base: SpeculativeDecoder, drafter: str, ids: Sequence[list[int]], params: SamplingParams, repeats: int
) -> Costs:
    """Decode every prompt with both kinds of shapes in turns, whose order alternates."""
    arms, judge = [base.using(drafter), base.using(drafter, reproducible=False)], TieJudge(base)
    ratios, differences = list[Parts](), list[Difference | None]()
    for arm in arms:
        _turn(arm, ids[0], WARM_UP)
    for tokens in ids:
        turns: list[list[Parts]] = [[], []]
        texts: list[list[int]] = [[], []]
        for repeat in range(repeats):
            for which in (0, 1) if repeat % 2 == 0 else (1, 0):
                turn, texts[which] = _turn(arms[which], tokens, params)
                turns[which].append(turn)
        ratios.append(Parts.ratio(*turns))
        differences.append(judge.judge(tokens, texts[0], texts[1], params))
    return Costs(drafter, ratios, differences)


def _turn(decoder: SpeculativeDecoder, tokens: list[int], params: SamplingParams) -> tuple[Parts, list[int]]:
    decoder.forget()
    started = perf_counter()
    result = decoder.generate(tokens, params)
    seconds, stats = perf_counter() - started, result.stats
    per_token, per_round = seconds / len(result.token_ids), stats.verify_seconds / stats.num_rounds
    return Parts(per_token, stats.prefill_seconds, per_round), result.token_ids


def table_of(costs: Sequence[Costs]) -> Table:
    """A line per drafter: the end-to-end cost, and how many texts are identical."""
    names = ("identical", "ties", "different")
    table = Table("drafter", "cost (geometric mean)", "least", "most", *names)
    for cost in costs:
        counts = count_differences(cost.differences)
        cells = [_signed(ratio, 1) for ratio in (cost.mean, min(cost.whole), max(cost.whole))]
        table.add_row(cost.drafter, *cells, *(str(counts[name]) for name in names))
    return table


def _as_json(costs: Costs) -> dict[str, Any]:
    return {
        "drafter": costs.drafter,
        "cost": costs.mean - 1,
        "ratios": [asdict(ratio) for ratio in costs.ratios],
        **count_differences(costs.differences),
    }


def _signed(ratio: float, digits: int = 0) -> str:
    return f"{100 * (ratio - 1):+.{digits}f} %"


def _range(ratios: Sequence[float]) -> str:
    return f"{_signed(min(ratios)).removesuffix(' %')} to {_signed(max(ratios))}"


if __name__ == "__main__":
    run(main)
