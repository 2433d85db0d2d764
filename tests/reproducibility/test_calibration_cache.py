"""Calibrations are remembered, and decoders keep to the shapes that agree if asked to or if that costs little."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.interfaces import Backend
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.models.cache_folder import save_measured
from slipstream.models.loaded import Loaded
from slipstream.reproducibility import calibration_cache, timing
from slipstream.reproducibility.calibration import Calibration
from slipstream.reproducibility.calibration_cache import remembered, remembered_draft_times
from slipstream.reproducibility.expert_reads import ExpertReads
from slipstream.reproducibility.shape_trials import ATTENDED_UNITS, WIDTHS
from slipstream.reproducibility.timing import DraftTimes
from tests.support.rounding_backends import BATCH, ReadsLess, RoundingBackend, widths_without
from tests.support.tiny_models import fresh


def _loaded(backend: Backend, fingerprint: str = "one") -> Loaded:
    return Loaded(backend, "rounding", (), fingerprint=fingerprint)


def test_a_calibration_is_remembered_by_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    first, same_model, other_model = (RoundingBackend(lambda r, w, c, n, odd=odd: w == odd) for odd in (5, 6, 6))
    first_calibration = remembered(_loaded(first), BATCH)
    assert first.shapes and first_calibration.widths == widths_without(5)
    assert remembered(_loaded(same_model), BATCH) == first_calibration and same_model.shapes == []
    assert remembered(_loaded(other_model, "two"), BATCH).widths == widths_without(6) and other_model.shapes
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    (file, _) = sorted((tmp_path / "calibration").iterdir())
    saved = json.loads(file.read_bytes())
    save_measured(
        "calibration", saved["identity"], saved["values"] | {"timed": {**saved["values"]["timed"], "experts": MIXTURE}}
    )  # as of a mixture
    models = (remembered(_loaded(same_model, name), BATCH).experts for name in ("one", "two"))
    assert sum(experts == ExpertReads(64, 8, 0.5) for experts in models) == 1
    short = remembered(_loaded(ReadsLess((128,)), "three"), BATCH)
    assert short.attended_lengths and remembered(_loaded(same_model, "three"), BATCH) == short


@pytest.mark.parametrize(
    ("shares", "free", "kept"),
    [
        ((0.9, 0.9), True, 0),  # undisturbed
        ((0.5, 0.9), True, 1),
        ((0.5, 0.9), False, 0),  # other programs are still running
        ((0.5, 0.4), True, 1),  # the second time is the last
    ],
)
def test_what_other_programs_disturbed_is_measured_again_once_they_have_ended(
    shares: tuple[float, float], free: bool, kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    monkeypatch.setattr(calibration_cache, "UNDISTURBED", 0.85)
    monkeypatch.setattr(calibration_cache, "processors_are_free", lambda: free)
    measured = [Calibration(WIDTHS, ATTENDED_UNITS[0], {8: ms}) for ms in (3.0, 1.0, 0.5)]
    made, clocks = iter(measured), iter(SimpleNamespace(share=share) for share in (*shares, 1.0))
    monkeypatch.setattr(calibration_cache, "calibrate", lambda *_: next(made))
    monkeypatch.setattr(calibration_cache, "ProcessorShare", lambda: next(clocks))
    loaded = _loaded(RoundingBackend())
    assert remembered(loaded, BATCH) == measured[0]
    assert remembered(loaded, BATCH) == measured[kept]
    assert remembered(loaded, BATCH) == measured[kept]


def test_a_gpu_is_not_measured_again_because_its_processor_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    monkeypatch.setattr(calibration_cache, "UNDISTURBED", 0.85)
    monkeypatch.setattr(calibration_cache, "ProcessorShare", lambda: SimpleNamespace(share=0.1))
    times = iter([DraftTimes({1: 1.0}), DraftTimes({1: 2.0})])
    draft = Loaded(SimpleNamespace(device=torch.device("cuda"), vocab_size=8), "draft", ())  # type: ignore[arg-type]
    monkeypatch.setattr(calibration_cache, "_identity", lambda loaded: "one")
    assert remembered_draft_times(draft, lambda: next(times), BATCH) == DraftTimes({1: 1.0})
    assert remembered_draft_times(draft, lambda: next(times), BATCH) == DraftTimes({1: 1.0})


def test_free_processors_are_told_from_wanted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(seconds=0.0, used=0.0)

    def passes(share: float) -> float:
        clock.seconds += 0.01
        clock.used += 0.01 * share * torch.get_num_threads()
        return clock.seconds

    monkeypatch.setattr(timing, "process_time", lambda: clock.used)
    for share, free in ((0.95, True), (0.6, False)):
        monkeypatch.setattr(timing, "perf_counter", lambda share=share: passes(share))
        assert timing.processors_are_free() == free


def _flags(monkeypatch: pytest.MonkeyPatch) -> None:
    here = calibration_cache.processor()
    monkeypatch.setattr(calibration_cache, "processor", lambda: replace(here, flags=here.flags | {"of_another"}))


OTHER_MACHINES: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "processor of the same name": _flags,
    "capability": lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "OTHER"),
    "threads": lambda patch: patch.setattr(torch, "get_num_threads", lambda: 33),
    "float32 products": lambda patch: patch.setattr(torch, "get_float32_matmul_precision", lambda: "other"),
    "oneDNN off": lambda patch: patch.setattr(torch.backends.mkldnn, "is_available", lambda: False),
    "oneDNN's instructions": lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2"),
    "its old name": lambda patch: patch.setenv("DNNL_DEFAULT_FPMATH_MODE", "BF16"),
    "MKL's mode": lambda patch: patch.setenv("MKL_CBWR", "COMPATIBLE"),
    "version of the forwards": lambda patch: patch.setattr(calibration_cache, "_installed", lambda package: "0.0"),
}
OTHER_MODELS = {"num_key_value_heads": 4, "head_dim": 16, "sliding_window": 5, "layer_types": ["sliding_attention"] * 2}


@pytest.mark.parametrize("change", OTHER_MACHINES)
def test_a_calibration_is_not_used_on_another_machine(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded(RoundingBackend())
    before = calibration_cache._identity(loaded)
    OTHER_MACHINES[change](monkeypatch)
    assert calibration_cache._identity(loaded) != before


def test_the_identity_of_a_gpu_includes_whether_tf32_is_allowed() -> None:
    before, matmul = calibration_cache._cuda_libraries(), torch.backends.cuda.matmul
    allowed = matmul.allow_tf32
    try:
        matmul.allow_tf32 = not allowed
        assert calibration_cache._cuda_libraries() != before
    finally:
        matmul.allow_tf32 = allowed


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_only_settings_that_change_the_forward_change_the_identity_of_a_model(name: str) -> None:
    """Some of these sizes show in no tensor's shape."""

    def identity(**changes: object) -> str:
        config = transformers.LlamaConfig(num_hidden_layers=2, **changes)
        return calibration_cache._identity(Loaded(RoundingBackend(), "it", (), model=SimpleNamespace(config=config)))

    assert identity(**{name: OTHER_MODELS[name]}) != identity()
    same = identity(eos_token_id=7, name_or_path="elsewhere", architectures=["Other"], use_cache=False)
    assert same == identity()


def test_other_environment_variables_do_not_change_the_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = _loaded(RoundingBackend())
    before = calibration_cache._identity(loaded)
    monkeypatch.setenv("MKL_NUM_THREADS", "1")
    monkeypatch.setenv("SOMETHING_ELSE", "1")
    assert calibration_cache._identity(loaded) == before


MIXTURE = {"count": 64, "used": 8, "milliseconds": 0.5, "exponent": 0.85}
# valid JSON, but not the values that were saved; some would be possible
CHANGED = [{"widths": [0]}, {"attended_unit": 64}, {"milliseconds": {"8": 1.5}}, {"totals": 8}, {"experts": MIXTURE}]


def _changed(saved: dict[str, Any], values: dict[str, Any]) -> bytes:
    timed = saved["values"]["timed"] | values
    return json.dumps(saved | {"values": saved["values"] | {"timed": timed}}).encode()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"\xff", b"[]", b"[" * 100_000, b'{"values": 5}', b'{"identity": "another"}', *CHANGED]
)
def test_a_damaged_calibration_is_measured_again_and_mended(
    content: bytes | dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    measured = Calibration(WIDTHS, ATTENDED_UNITS[0], {8: 1.0})
    calls: list[Backend] = []
    monkeypatch.setattr(calibration_cache, "calibrate", lambda backend, *_: calls.append(backend) or measured)
    loaded = _loaded(RoundingBackend())
    assert remembered(loaded, BATCH) == remembered(loaded, BATCH) and len(calls) == 1
    (file,) = (tmp_path / "calibration").iterdir()
    calibration = json.loads(file.read_bytes())
    file.write_bytes(content if isinstance(content, bytes) else _changed(calibration, content))
    caplog.clear()
    assert remembered(loaded, BATCH) == measured and len(calls) == 2
    assert f"{file} is damaged and measured again" in caplog.text
    assert json.loads(file.read_bytes())["values"]["timed"] == calibration["values"]["timed"]


@pytest.mark.parametrize("place", ["/proc/x", "file"])
def test_without_a_cache_folder_calibrations_are_measured_with_one_warning(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / place))
    assert remembered(_loaded(RoundingBackend()), BATCH).widths == WIDTHS
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "is not saved" in caplog.text and str(tmp_path / place) in caplog.text


@pytest.fixture
def shaky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RoundingBackend:
    """The model of every decoder of the test: its bits depend on the batch."""
    backend = RoundingBackend(lambda rows, width, columns, length: rows > 1)
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    monkeypatch.setattr("slipstream.wiring.model_pair.load", lambda *_: _loaded(backend))
    return backend


def test_reproducible_is_refused_where_no_shapes_agree(shaky: RoundingBackend) -> None:
    with pytest.raises(UsageError, match=r"reproducible=True, but no forward shapes .* allowed: 'auto' or False"):
        SpeculativeDecoder("rounding", reproducible=True)


def test_a_refusal_says_that_threads_may_be_the_reason(shaky: RoundingBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(
        UsageError, match=r"here with 3 threads; allowed: 'auto' or False, or torch.set_num_threads\(2\)"
    ):
        SpeculativeDecoder("rounding", reproducible=True)


def test_auto_logs_where_no_shapes_agree_and_is_not_reproducible(
    shaky: RoundingBackend, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="slipstream"):
        decoder = SpeculativeDecoder("rounding")
    assert "no forward shapes agree to the bit here" in caplog.text
    assert not decoder.reproducible and decoder._target_session.shapes == EXACT_FIT
    assert len(decoder.generate([1, 2, 3], SamplingParams(max_tokens=3)).token_ids) == 3


@pytest.mark.slow
def test_a_calibration_of_weights_with_nan_is_not_used_for_sound_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    monkeypatch.setattr("slipstream.models.hf.trials.check_logits", lambda logits: None)  # which refuses such models
    broken = fresh("llama")
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")  # NaN equals nothing
    assert not SpeculativeDecoder(broken).reproducible
    assert SpeculativeDecoder(fresh("llama"), reproducible=True).reproducible


@pytest.mark.parametrize(("slowdown", "is_reproducible"), [(1.2, True), (1.3, False)])
def test_auto_keeps_to_agreeing_shapes_if_they_cost_little(
    slowdown: float, is_reproducible: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = Calibration(widths=(8, 16), attended_unit=256, milliseconds={1: 1.0, 8: slowdown})
    monkeypatch.setattr("slipstream.reproducibility.calibration_cache.remembered", lambda loaded, rows: cost)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        assert SpeculativeDecoder("toy").reproducible is is_reproducible
    assert ("takes 1.3 times as long" in caplog.text) is not is_reproducible
    assert SpeculativeDecoder("toy", reproducible=True).reproducible
    assert not SpeculativeDecoder("toy", reproducible=False).reproducible


def test_a_reproducible_decoder_keeps_to_the_shapes_that_agree(
    shaky: RoundingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaky.deviates = lambda rows, width, columns, length: width < 6
    decoder = SpeculativeDecoder("rounding", drafter="ngram", num_draft_tokens=3, reproducible=True)
    shaky.shapes.clear()
    decoder.generate([[1, 2, 3] * 9, [4, 5]], SamplingParams(max_tokens=12))
    assert {width for _, width in shaky.shapes} <= {6, 7, 8, 16, 32} and shaky.attended_unit == ATTENDED_UNITS[0]
