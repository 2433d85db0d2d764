"""The benchmark of rounds against context and batch, on the toy and on a tiny transformer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import scaling
import typer
from typer.testing import CliRunner

from slipstream import SpeculativeDecoder, UsageError
from tests.support.tiny_models import fresh, perturbed, shared

pytestmark = pytest.mark.exhaustive


def run(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(scaling.main)
    return CliRunner().invoke(app, arguments)


def test_every_batch_and_context_has_a_line_in_the_table_and_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "scaling.json"
    sampled = ["--temperature", "0.8", "--top-k", "50", "--top-p", "0.9"]
    sizes = ["--contexts", "16,64", "--batches", "1,3", "--rounds", "3", "--turns", "1"]
    result = run("toy", *sizes, *sampled, "--json", str(file))
    assert result.exit_code == 0, result.output
    report = json.loads(file.read_text())
    assert [(line["batch"], line["context"]) for line in report["lines"]] == [(1, 16), (1, 64), (3, 16), (3, 64)]
    for line in report["lines"]:
        parts = [line[name] for name in ("draft", "verify", "accept", "overhead")]
        assert line["total"] == pytest.approx(sum(parts)) and min(parts) >= 0 and line["verify"] > 0
        assert f"{line['total']:.2f}" in result.output
        assert line["attention"] is None  # the toy has none
    assert report["options"]["top_k"] == 50


def test_attention_of_a_transformer_is_measured_and_grows_with_the_keys() -> None:
    decoder = SpeculativeDecoder(fresh("llama", max_position_embeddings=4096), perturbed("llama"), reproducible=False)
    lines = scaling.Scaling(decoder, rounds=4).measure([128, 3840], [1, 2], turns=1)
    assert [line.width for line in lines] == [5] * 4
    for short, long in (lines[:2], lines[2:]):
        assert long.attention > short.attention > 0  # thirty times the keys
    drafted = scaling.Scaling(decoder, "model", num_draft_tokens=2, rounds=2).measure([64], [1], turns=1)
    assert drafted[0].draft > 0 and drafted[0].width == 3


def test_the_prompt_is_read_once_and_copied_to_every_row() -> None:
    made = scaling.Scaling(SpeculativeDecoder(shared("llama"), reproducible=False), rounds=2)
    made.measure([100, 300], [1, 4], turns=2)
    assert made._target.prefill_tokens == 299


def test_a_context_beyond_the_models_positions_is_refused_in_one_line() -> None:
    made = scaling.Scaling(SpeculativeDecoder(shared("llama"), reproducible=False), rounds=7)
    with pytest.raises(UsageError, match=r"contexts=1024; allowed: at most 974 \(the model's context is 1024"):
        made.measure([128, 1024], [1])
    assert made.measure([974], [1], turns=1)[0].context == 974


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contexts", "0,8"], "contexts=[0, 8]"),
        (["--batches", "x"], "'x'"),
        (["--rounds", "0"], "rounds=[0]"),
        (["--drafter", "nobody"], "drafter='nobody'"),
        (["--num-draft-tokens", "65"], "num_draft_tokens=65"),
    ],
)
def test_wrong_use_exits_with_2(arguments: list[str], message: str) -> None:
    result = run("toy", "--contexts", "16", "--batches", "1", *arguments)
    assert result.exit_code == 2 and message in " ".join(result.output.replace("│", " ").split())
