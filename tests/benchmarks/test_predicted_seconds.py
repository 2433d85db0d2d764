"""The comparison of predicted with measured seconds covers all kinds of tokens, and counts a mixture's experts."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import mixture_forwards
import predicted_seconds
import pytest

from tests.support.markers import needs_kernels

pytest.importorskip("gguf")


@pytest.mark.exhaustive
@pytest.mark.usefixtures("own_cache")
@needs_kernels
def test_all_kinds_of_tokens_are_predicted_and_measured(tmp_path: Path) -> None:
    file, out, shape = tmp_path / "tiny.gguf", tmp_path / "out.json", mixture_forwards.SHAPES["tiny"]
    mixture_forwards.write(file, shape, 2)
    predicted_seconds.main([str(file)], "1,4", 3, out)
    (rows,) = json.loads(out.read_text()).values()
    assert {(row["tokens"], row["width"]) for row in rows} == {
        (kind, width) for kind in ("prose", "code", "random tokens") for width in (1, 4)
    }
    for row in rows:
        fewest, most = shape.used, min(row["width"] * shape.used, shape.experts)
        assert fewest <= row["experts"] <= most and (row["width"] == 1 or row["experts"] > fewest)
        assert row["ratio"] == pytest.approx(row["measured_ms"] / row["predicted_ms"])
    assert median(row["ratio_at_this_speed"] for row in rows) == pytest.approx(1)
