"""The script that counts forwards with other bits finds none, and finds those of its negative controls."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import mixture_forwards
import pytest

from slipstream.errors import UsageError
from slipstream.models.cpu.processor import ISA, NEEDED, processor
from tests.models.weights.check_types import wide
from tests.support.gguf_architectures import write_case
from tests.support.markers import needs_kernels

pytest.importorskip("gguf")


@pytest.mark.exhaustive
@needs_kernels
def test_no_forward_differs_but_those_of_the_control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA, "")  # restored afterwards
    best, out = next(name for name, flags in NEEDED.items() if set(flags) <= processor().flags), tmp_path / "out.json"
    mixture_forwards.main(tmp_path / "tiny.gguf", "tiny", 2, 20, best, 5, out)
    result = json.loads(out.read_text())
    assert result["differ"] == {best: 0} and result["control"][0] > 0
    case = wide("lfm2")
    case = replace(case, settings=case.settings | {"max_position_embeddings": 512})
    write_case(tmp_path / "lfm2.gguf", "lfm2", case, "Q4_0")
    mixture_forwards.main(tmp_path / "lfm2.gguf", None, 2, 20, best, 5, out)
    result = json.loads(out.read_text())
    assert result["differ"] == {best: 0} and result["control_of_states"] == [5, 5]


def test_an_unknown_shape_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--random 'huge'; allowed: tiny, 30b-a3b"):
        mixture_forwards.main(tmp_path / "tiny.gguf", "huge")
