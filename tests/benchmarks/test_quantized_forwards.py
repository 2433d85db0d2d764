"""The benchmark of quantized models, end to end on tiny ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import quantized_forwards
import torch

from slipstream.errors import UsageError
from tests.support.gguf_files import write_model
from tests.support.markers import needs_avx2
from tests.support.quantized_files import SHAPE
from tests.support.tiny_models import fresh, tokenizer

pytest.importorskip("gguf")
pytestmark = [
    pytest.mark.exhaustive,
    needs_avx2,
]


def test_a_gguf_file_is_measured_as_int15_and_int8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_forwards, "_warm_up", lambda: None)
    write_model(tmp_path / "tiny.gguf", kinds={"": "Q8_0", "ffn_down": "Q6_K"})
    out = tmp_path / "out.json"
    quantized_forwards.main(str(tmp_path / "tiny.gguf"), "1,3", turns=1, context=20, beside=None, kl=24, json_file=out)
    report = json.loads(out.read_text())
    assert report["int15"]["kl"] < report["int8"]["kl"] and report["int8"]["same_bits"] is True
    assert set(report["int8"]["milliseconds"]) == {"1", "3"} and report["file"] > 0


def test_weights_quantized_at_load_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_forwards, "_warm_up", lambda: None)
    fresh("llama", **SHAPE).bfloat16().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    quantized_forwards.main(str(tmp_path), "1,3", 1, 20, "int15", "int4,int8", str(tmp_path), 24, out)
    report = json.loads(out.read_text())
    assert report["int8, int15"]["kl"] < report["int4, int15"]["kl"] / 10 and report["int4, int15"]["same_bits"] is True


def test_a_quantized_draft_model_is_measured_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_forwards, "_warm_up", lambda: None)
    fresh("llama", **SHAPE).bfloat16().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    quantized_forwards.main(str(tmp_path), "1,3", 1, 20, "int8", "int4", kl=24, json_file=out, draft_dtype="int4")
    report = json.loads(out.read_text())
    assert report.keys() - {"target", "file"} == {"int4, int8", "draft model, int4"}
    assert set(report["draft model, int4"]["milliseconds"]) == {"1", "3"} and report["draft model, int4"]["kl"] > 1e-6
    with pytest.raises(UsageError, match="draft_dtype='int3'; allowed: none, int4, int8"):
        quantized_forwards.main(str(tmp_path), draft_dtype="int3")
    with pytest.raises(UsageError, match=r"draft_dtype='int4' with 'a\.gguf', which keeps its bits"):
        quantized_forwards.main("a.gguf", draft_dtype="int4")


def test_models_that_are_not_files_are_refused() -> None:
    with pytest.raises(UsageError, match=r"target 'smollm2'; allowed: a \.gguf file, or a folder"):
        quantized_forwards.main("smollm2")


def test_llama_cpp_is_compared_only_by_its_kl_divergence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="llama_cpp without kl; allowed: both"):
        quantized_forwards.main(str(tmp_path / "tiny.gguf"), llama_cpp=True)
    write_model(tmp_path / "tiny.gguf", kinds={"": "Q8_0"})
    with pytest.raises(UsageError, match=r"llama_cpp needs a \.gguf file; target '.*' is not one"):
        quantized_forwards.main(str(tmp_path), kl=24, llama_cpp=True)
    equal = torch.randn(3, 8, dtype=torch.float64).log_softmax(-1)
    wide = torch.nn.functional.pad(equal, (0, 2))  # a vocabulary that was padded
    kl, same = quantized_forwards._distance(equal, wide)
    assert kl == pytest.approx(0, abs=1e-12) and same == 1
