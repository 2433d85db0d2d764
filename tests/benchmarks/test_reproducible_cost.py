"""The benchmark of what reproducible shapes cost."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

pytestmark = pytest.mark.exhaustive

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module


def run(module: Any, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(module.main)
    result = CliRunner().invoke(app, arguments)
    if result.exception is not None:
        raise result.exception
    return result.output


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "The heron looked at the water"}\n{"prompt": "A sparrow, a sparrow, a sparrow"}\n')
    return str(file)


def test_costs_are_printed_in_total_and_by_part(benchmark: Any, prompts: str, tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    small = ("--max-tokens", "6", "--repeats", "2", "--calibrations", "2", "--json", str(file))
    out = run(benchmark("reproducible_cost"), "toy", prompts, "--draft", "toy:2", *small)
    report = json.loads(file.read_text())
    assert len(report["calibrations"]) == 2 and "(2 fresh); widths 1, 2, 3, 4, 5, 6, 7, 8, 16, 32 agree" in out
    assert [cost["drafter"] for cost in report["costs"]] == ["none", "ngram", "model"]
    assert [cost["identical"] for cost in report["costs"]] == [2, 2, 2]
    for cost in report["costs"]:
        assert f"\n{cost['drafter']} {100 * cost['cost']:+.0f} % (" in out
        assert all(min(ratio.values()) > 0 and len(ratio) == 3 for ratio in cost["ratios"])
    assert out.count(" by prompt); a round ") == out.count(", reading the prompt ") == 3


def test_ratios_compare_medians_and_costs_are_their_geometric_mean(benchmark: Any) -> None:
    module = benchmark("reproducible_cost")
    kept = [module.Parts(2.0, 3.0, 9.0), module.Parts(2.0, 3.0, 1.1), module.Parts(8.0, 3.0, 1.1)]
    ratio = module.Parts.ratio(kept, [module.Parts(1.0, 2.0, 1.0)] * 3)
    assert (ratio.token, ratio.reading, ratio.round) == pytest.approx((2.0, 1.5, 1.1))
    costs = module.Costs("none", [ratio, module.Parts(0.5, 1.1, 1.04)], [None, None])
    assert costs.mean == pytest.approx(1.0)
    assert costs.line == (
        "none +0 % (-50 to +100 % by prompt); a round +7 % (+4 to +10 %), reading the prompt +30 % (+10 to +50 %)"
    )
