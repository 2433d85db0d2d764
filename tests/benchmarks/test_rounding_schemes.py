"""The benchmark of rounding schemes, end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import rounding_schemes

from tests.support.quantised_files import SHAPE
from tests.support.tiny_models import fresh, tokenizer


def test_every_scheme_is_measured(tmp_path: Path) -> None:
    fresh("llama", **SHAPE).bfloat16().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    out = tmp_path / "out.json"
    rounding_schemes.main(str(tmp_path), 24, out)
    found = json.loads(out.read_text())
    assert set(found) == set(rounding_schemes.SCHEMES)
    assert found["int8"]["kl"] < found["zero points, best share"]["kl"] / 10 < found["symmetric"]["kl"]
