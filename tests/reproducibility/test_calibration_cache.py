"""Calibrations are remembered, and decoders keep to what was found as far as it was asked for and is affordable."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from rounding import BATCH, ReadsLess, RoundingBackend, without

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.cache_state import EXACT_FIT
from slipstream.core.interfaces import Backend
from slipstream.models.loaded import Loaded
from slipstream.reproducibility.calibration import Calibration
from slipstream.reproducibility.calibration_cache import remembered
from slipstream.reproducibility.shape_trials import ATTENDED_UNITS, WIDTHS


def _loaded(backend: Backend, fingerprint: str = "one") -> Loaded:
    return Loaded(backend, "rounding", (), fingerprint=fingerprint)


def test_a_calibration_is_remembered_by_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    first, again, other = (RoundingBackend(lambda r, w, c, n, odd=odd: w == odd) for odd in (5, 6, 6))
    known = remembered(_loaded(first), BATCH)
    assert first.shapes and known.widths == without(5)
    assert remembered(_loaded(again), BATCH) == known and again.shapes == []
    assert remembered(_loaded(other, "two"), BATCH).widths == without(6) and other.shapes
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    short = remembered(_loaded(ReadsLess((128,)), "three"), BATCH)
    assert short.attended_lengths and remembered(_loaded(again, "three"), BATCH) == short


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[]", b'{"widths": 5}', b'{"identity": "another"}'])
def test_a_damaged_calibration_is_measured_again_and_mended(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    remembered(_loaded(RoundingBackend()), BATCH)
    (file,) = (tmp_path / "calibration").iterdir()
    whole = json.loads(file.read_bytes())
    for damage in (content, json.dumps(whole | {"milliseconds": 3}).encode()):
        file.write_bytes(damage)
        caplog.clear()
        assert remembered(_loaded(again := RoundingBackend()), BATCH).widths == WIDTHS and again.shapes
        assert f"{file} is damaged and measured again" in caplog.text
        assert json.loads(file.read_bytes()).keys() == whole.keys()


@pytest.mark.parametrize("place", ["/proc/x", "file"])
def test_without_a_cache_folder_calibrations_are_measured_and_one_warning_says_so(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / place))
    assert remembered(_loaded(RoundingBackend()), BATCH).widths == WIDTHS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not saved" in caplog.text and str(tmp_path / place) in caplog.text


@pytest.fixture
def shaky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RoundingBackend:
    """The model of every decoder of the test: it depends on the batch."""
    backend = RoundingBackend(lambda rows, width, columns, length: rows > 1)
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    monkeypatch.setattr("slipstream.wiring.model_pair.load", lambda *given: _loaded(backend))
    return backend


def test_reproducible_is_refused_where_no_shapes_agree(shaky: RoundingBackend) -> None:
    with pytest.raises(UsageError, match=r"reproducible=True, but no set of .* allowed: 'auto' or False"):
        SpeculativeDecoder("rounding", reproducible=True)


def test_auto_says_so_where_no_shapes_agree(shaky: RoundingBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="slipstream"):
        made = SpeculativeDecoder("rounding")
    assert "no forward shapes agree to the bit here" in caplog.text
    assert not made.reproducible and made._target_session.shapes == EXACT_FIT
    assert len(made.generate([1, 2, 3], SamplingParams(max_tokens=3)).token_ids) == 3


@pytest.mark.parametrize(("slower", "kept"), [(1.2, True), (1.3, False)])
def test_auto_keeps_to_agreeing_shapes_if_they_cost_little(
    slower: float, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = Calibration(widths=(8, 16), attended_unit=256, milliseconds={1: 1.0, 8: slower})
    monkeypatch.setattr("slipstream.reproducibility.calibration_cache.remembered", lambda loaded, rows: cost)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        assert SpeculativeDecoder("toy").reproducible is kept
    assert ("would cost 30%" in caplog.text) is not kept
    assert SpeculativeDecoder("toy", reproducible=True).reproducible
    assert not SpeculativeDecoder("toy", reproducible=False).reproducible


def test_a_reproducible_decoder_keeps_to_the_shapes_that_agree(
    shaky: RoundingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaky.deviates = lambda rows, width, columns, length: width < 6
    made = SpeculativeDecoder("rounding", drafter="ngram", num_draft_tokens=3, reproducible=True)
    shaky.shapes.clear()
    made.generate([[1, 2, 3] * 9, [4, 5]], SamplingParams(max_tokens=12))
    assert {width for _, width in shaky.shapes} <= {6, 7, 8, 16, 32} and shaky.attended_unit == ATTENDED_UNITS[0]
