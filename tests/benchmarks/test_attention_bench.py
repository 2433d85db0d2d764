"""The benchmarks of attention, of reproducible shapes and of the table's memory run, add up, and refuse nonsense."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from slipstream import SlipstreamError, UsageError
from tests.support.tiny_models import shared

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def run(module: Any, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(module.main)
    done = CliRunner().invoke(app, arguments)
    if done.exception is not None:
        raise done.exception
    return done.output


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "The heron looked at the water"}\n{"prompt": "A sparrow, a sparrow, a sparrow"}\n')
    return str(file)


# attention


def test_every_shape_width_and_length_is_timed(benchmark: Any, tmp_path: Path) -> None:
    file, saved = tmp_path / "out.json", tmp_path / "model"
    shared("qwen2").config.save_pretrained(saved)
    grid = ("--widths", "1,5", "--lengths", "256,512", "--layers", "1", "--turns", "2", "--rows", "2")
    out = run(benchmark("attention"), "--shape", "6/2/16", "--model", str(saved), *grid, "--json", str(file))
    lines = json.loads(file.read_text())["lines"]
    assert [(line["heads"], line["key_heads"], line["size"]) for line in lines[::8]] == [(4, 2, 8), (6, 2, 16)]
    cells = [(line["dtype"], line["length"], line["width"]) for line in lines[:8]]
    assert cells == [(d, v, w) for d in ("bfloat16", "float32") for v in (256, 512) for w in (1, 5)]
    for line in lines:
        assert 0 < line["grouped_fastest"] <= line["grouped_median"] and 0 < line["sdpa_fastest"] <= line["sdpa_median"]
        assert line["ratio_fastest"] == line["sdpa_fastest"] / line["grouped_fastest"]
    assert out.count("geometric mean") == 4 and f"{lines[0]['ratio_fastest']:.2f} (" in out


def test_without_a_shape_the_two_models_of_the_readme_are_taken(benchmark: Any) -> None:
    out = run(benchmark("attention"), "--widths", "1", "--lengths", "256", "--layers", "1", "--turns", "1")
    assert "SmolLM2-135M, 9/3/64, bfloat16" in out and "Qwen2.5-1.5B, 12/2/128, float32" in out


def test_attentions_that_part_are_not_timed(benchmark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module = benchmark("attention")
    right = module.grouped_attention
    monkeypatch.setattr(module, "grouped_attention", lambda *a, **k: (1.2 * right(*a, **k)[0], None))
    case = module.Case(module.DEFAULTS[0], torch.float32, 1, 4, 256)
    with pytest.raises(SlipstreamError, match="the answers differ by"):
        module.measure(case, 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--shape", "9/2/64"), "shape 9/2/64; allowed"),
        (("--shape", "9x3"), "shape '9x3'; allowed"),
        (("--model", "./nowhere"), "'./nowhere' is not a folder"),
        (("--widths", "1,x"), "--widths '1,x'; allowed"),
        (("--lengths", "0"), "--lengths '0'; allowed"),
        (("--widths", "32", "--lengths", "16"), "widths up to 32, lengths from 16"),
        (("--dtypes", "float16"), "dtypes='float16'; allowed: float32, bfloat16"),
    ],
)
def test_nonsense_is_refused_in_one_line(benchmark: Any, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        run(benchmark("attention"), *arguments)
    assert "\n" not in str(refusal.value)


# reproducible shapes


def test_costs_are_printed_whole_and_in_parts(benchmark: Any, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    small = ("--max-tokens", "6", "--repeats", "2", "--calibrations", "2", "--json", str(file))
    out = run(benchmark("reproducible_cost"), "toy", prompts, "--draft", "toy:2", *small)
    report = json.loads(file.read_text())
    assert len(report["calibrations"]) == 2 and "(2 fresh); widths 1, 2, 3, 4, 5, 6, 7, 8, 16, 32 agree" in out
    assert [one["drafter"] for one in report["costs"]] == ["none", "ngram", "model"]
    assert [one["identical"] for one in report["costs"]] == [2, 2, 2]
    for one in report["costs"]:
        assert f"\n{one['drafter']} {100 * one['cost']:+.0f} % (" in out
        assert all(min(ratio.values()) > 0 and len(ratio) == 3 for ratio in one["ratios"])
    assert out.count(" by prompt); a round ") == out.count(", reading the prompt ") == 3


def test_ratios_are_of_medians_and_costs_their_geometric_mean(benchmark: Any) -> None:
    module = benchmark("reproducible_cost")
    kept = [module.Parts(2.0, 3.0, 9.0), module.Parts(2.0, 3.0, 1.1), module.Parts(8.0, 3.0, 1.1)]
    ratio = module.Parts.ratio(kept, [module.Parts(1.0, 2.0, 1.0)] * 3)
    assert (ratio.token, ratio.reading, ratio.round) == pytest.approx((2.0, 1.5, 1.1))
    costs = module.Costs("none", [ratio, module.Parts(0.5, 1.1, 1.04)], [None, None])
    assert costs.mean == pytest.approx(1.0)
    assert costs.line == (
        "none +0 % (-50 to +100 % by prompt); a round +7 % (+4 to +10 %), reading the prompt +30 % (+10 to +50 %)"
    )


# memory of the table


def test_memory_is_counted_per_row_and_filling_adds_to_it(benchmark: Any, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    small = ("--max-tokens", "20", "--worst-tokens", "500", "--json", str(file))
    out = run(benchmark("ngram_table_memory"), "toy", prompts, *small)
    report = json.loads(file.read_text())
    assert [row["output"] for row in report["rows"]] == [20, 20]
    assert all(row["tokens"] > 40 and row["filled"] > row["table"] > 0 for row in report["rows"])
    most = max(row["table"] / row["tokens"] for row in report["rows"])
    assert most < report["worst_bytes"] / 500 <= 5 * 150  # what the drafter's documentation promises
    assert f"to {most:.0f} (median" in out and "worst: 0 MB for 500 tokens" in out
