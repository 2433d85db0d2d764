"""The benchmark of quantized texts: int15 gives the text of the file's own numbers, and another text is detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quantized_texts
import torch

from tests.support.gguf_files import write_model
from tests.support.markers import needs_avx2

pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.exhaustive,
    needs_avx2,
]


def test_int15_texts_are_identical_or_tied(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path / "tiny.gguf", kinds={"": "Q8_0"})
    out = tmp_path / "out.json"
    quantized_texts.main(str(tmp_path / "tiny.gguf"), num_prompts=3, max_tokens=12, json_file=out)
    assert "int15: 3 texts" in capsys.readouterr().out
    assert all(gap <= 0.01 for gap in json.loads(out.read_text())["gaps"])


def test_other_weights_give_a_different_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_model(tmp_path / "tiny.gguf", kinds={"": "Q8_0"})
    load = quantized_texts.load_unpacked

    def another(*arguments: object) -> torch.nn.Module:
        model: torch.nn.Module = load(*arguments)  # type: ignore[arg-type]
        for weights in model.parameters():
            weights.data = weights.data.flip(0)
        return model

    monkeypatch.setattr(quantized_texts, "load_unpacked", another)
    with pytest.raises(SystemExit) as end:
        quantized_texts.main(str(tmp_path / "tiny.gguf"), num_prompts=3, max_tokens=12)
    assert end.value.code == 1


def test_the_first_gap_is_at_the_first_token_that_is_not_the_likeliest() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 3.0, 1.5], [0.0, 1.0, 5.0]])
    assert quantized_texts.first_gap(logits, [0, 1, 2]) is None
    assert quantized_texts.first_gap(logits, [0, 2, 0]) == (1, 1.5)
