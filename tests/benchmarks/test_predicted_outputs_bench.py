"""The output of `benchmarks/predicted_outputs.py` on the toy model."""

from __future__ import annotations

from typing import Any

import predicted_outputs as bench
import pytest

pytestmark = pytest.mark.slow

OPTIONS = {"arms": "none,suffix,suffix.predicted", "max_tokens": 12, "temperature": 0.0, "repeats": 2}


def test_results_are_printed_by_category_and_in_total(capsys: pytest.CaptureFixture[str]) -> None:
    bench.main("toy", ["right prediction", "changed request"], **OPTIONS)
    out = capsys.readouterr().out
    heads = [line for line in out.splitlines() if "identical" in line]
    assert heads == [
        "right prediction: 10/10 texts identical",
        "changed request: 6/6 texts identical",
        "all: 16/16 texts identical",
    ]
    arms = [line.split() for line in out.splitlines() if line.strip().startswith(("none", "suffix"))]
    assert [len(cells) for cells in arms] == [6, 6, 8] * 3  # only the last gets predictions
    accepted, rejected = ([int(cells[at]) for cells in arms[2::3]] for at in (6, 7))
    assert accepted[2] == accepted[0] + accepted[1] > 0 and rejected[2] == rejected[0] + rejected[1]


def test_a_different_text_is_counted_and_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = bench._answer

    def wrong(decoder: Any, prompt: Any, params: Any) -> Any:
        runs = answer(decoder, prompt, params)
        return bench.Runs(runs.rounds[1:], runs.seconds) if params.prediction else runs

    monkeypatch.setattr(bench, "_answer", wrong)
    with pytest.raises(SystemExit) as stopped:
        bench.main("toy", ["right prediction"], **OPTIONS)
    assert stopped.value.code == 1 and "right prediction: 0/10 texts identical" in capsys.readouterr().out


def test_an_unknown_category_and_a_duplicate_arm_are_refused() -> None:
    with pytest.raises(bench.UsageError, match="category 'left'; allowed: 'right prediction', "):
        bench.main("toy", ["left"], **OPTIONS)
    with pytest.raises(bench.UsageError, match="--arms names 'none' twice; allowed: each arm once"):
        bench.main("toy", ["whole file"], **OPTIONS | {"arms": "none,suffix,none"})
