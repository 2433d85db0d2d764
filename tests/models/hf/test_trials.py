"""Trials that a model passed are not repeated by the next process; failed and new ones are."""

import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.compiled_layers import CompiledOps
from slipstream.models.hf import trials
from slipstream.models.hf.trials import passed_trials
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.paused_collection import MANY, paused_collection
from slipstream.models.plain_models import load_model
from tests.support.markers import needs_kernels
from tests.support.tiny_models import fresh


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    fresh("llama", dtype=torch.bfloat16, head_dim=64).save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Counts the forwards that trials make: one element each."""
    forwards, a_few_logits = list[Any](), trials.a_few_logits

    def counted(backend: Any) -> Any:
        forwards.append(len(forwards))
        return a_few_logits(backend)

    monkeypatch.setattr(trials, "a_few_logits", counted)
    return forwards


def state(loaded: Loaded) -> list[Any]:
    """Everything that trials decide about a backend."""
    backend: Any = loaded.backend
    forwards = [module.__dict__.get("forward") for module in loaded.model.modules()]
    ops = [type(forward.ops) for forward in forwards if forward is not None]
    attention = loaded.model.config._attn_implementation
    return [ops, attention, backend.masks.repeats, backend.ragged, backend.shape_independent, backend.stack is not None]


def logits(loaded: Loaded) -> torch.Tensor:
    loaded.backend.reserve(1, 64)
    return loaded.backend.forward(torch.tensor([[1, 7, 9, 4]]), [0], first_slot=0, logits=True)


@needs_kernels
def test_a_model_that_passed_is_loaded_the_same_without_trials(folder: str, tried: list[Any]) -> None:
    first = load(folder, LoadOptions())
    assert len(tried) == 6 and CompiledOps in state(first)[0] and first.backend.stack is not None
    again = load(folder, LoadOptions())
    assert len(tried) == 6 and state(again) == state(first)
    assert again.fingerprint == first.fingerprint and torch.equal(logits(again), logits(first))


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize(
    "change", ["file", "weights", "configuration", "dtype", "switch", "code", "damage", "depth", "names"]
)
def test_a_trial_is_repeated_when_anything_it_depends_on_changes(
    folder: str, tried: list[Any], change: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    load(folder, LoadOptions())
    before, options = len(tried), LoadOptions()
    times = {file.name: file.stat().st_mtime_ns for file in Path(folder).iterdir()}
    if change == "file":
        os.utime(Path(folder) / "model.safetensors", ns=(1, 1))
    elif change == "weights":  # other weights with the size and time of the old ones
        weights = Path(folder) / "model.safetensors"
        size = weights.stat().st_size
        fresh("llama", seed=1, dtype=torch.bfloat16, head_dim=64).save_pretrained(folder)
        assert weights.stat().st_size == size
        for name, time in times.items():
            os.utime(Path(folder) / name, ns=(time, time))
    elif change == "configuration":
        config = Path(folder) / "config.json"
        config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    elif change == "dtype":
        options = LoadOptions("float32")
    elif change == "switch":
        monkeypatch.setenv("SLIPSTREAM_KERNELS", "off")
    elif change == "code":
        monkeypatch.setattr("slipstream.models.hf.trials.code_digest", lambda: "another")
    else:
        for file in (tmp_path / "cache" / "trials").iterdir():
            damaged = {"damage": file.read_text()[:9], "depth": "[" * 100_000}
            file.write_text(damaged.get(change) or file.read_text().replace('"passed": [', '"passed": ["a", '))
    load(folder, options)
    assert len(tried) > before


@needs_kernels
def test_a_failed_trial_is_repeated_at_every_load(
    folder: str, tried: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that computes something else is found again, and is used once it is fixed."""
    with monkeypatch.context() as broken:
        broken.setattr(CompiledOps, "residual_mlp", lambda self, hidden, attended: torch.zeros_like(hidden))
        broken.setattr(CompiledOps, "whole_layer", lambda self, *_: None)
        for _ in range(2):
            assert CompiledOps not in state(load(folder, LoadOptions()))[0]
    assert len(tried) == 4 + 1  # the second load tries only the compiled layers
    assert CompiledOps in state(load(folder, LoadOptions()))[0]


def test_models_with_the_callers_own_code_or_arguments_are_always_tried(folder: str) -> None:
    model = load_model(folder, LoadOptions())[1]

    def remembers(model: Any, options: LoadOptions, source: str = folder) -> bool:
        passed_trials(source, source, model, options, "").add("a trial")
        return "a trial" in passed_trials(source, source, model, options, "")

    assert remembers(model, LoadOptions())
    assert not remembers(model, LoadOptions(extra={"attn_implementation": "eager"}))
    assert not remembers(model, LoadOptions(), "someone/model")
    own_class = type("Own", (type(model),), {"__module__": "own_models"})
    model.__class__ = own_class
    assert not remembers(model, LoadOptions())


def test_a_model_loads_without_a_writable_cache_folder(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(Path(folder) / "config.json"))  # not a folder
    assert logits(load(folder, LoadOptions())).isfinite().all()


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions("float32"), LoadOptions(fast=False)])
def test_a_model_whose_logits_are_not_finite_is_refused(folder: str, options: LoadOptions) -> None:
    model = fresh("llama", dtype=torch.bfloat16, head_dim=64)
    model.model.norm.weight.data.fill_(1e38)
    model.lm_head.weight.data *= 100
    model.save_pretrained(folder)
    with pytest.raises(SlipstreamError, match="the model gives logits that are not finite"):
        load(folder, options)


@pytest.mark.parametrize("length", [-512, 2.5, "512"])
def test_a_length_that_is_no_number_of_tokens_is_refused(folder: str, length: object) -> None:
    config = json.loads((Path(folder) / "config.json").read_text())
    (Path(folder) / "config.json").write_text(json.dumps(config | {"max_position_embeddings": length}))
    with pytest.raises(SlipstreamError, match="max_position_embeddings"):
        load(folder, LoadOptions())


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_made_while_collection_is_paused_are_not_young_afterwards(frozen: bool) -> None:
    """Collections of young objects then skip them; objects frozen before stay frozen."""
    was_frozen = gc.get_freeze_count()
    gc.freeze() if frozen else gc.unfreeze()
    try:
        with paused_collection():
            assert not gc.isenabled()
            objects = [[i] for i in range(2 * MANY)]
        assert gc.isenabled() and bool(gc.get_freeze_count()) is frozen
        young = {id(each) for generation in (0, 1) for each in gc.get_objects(generation)}
        assert frozen or not young & {id(each) for each in objects}
    finally:
        gc.freeze() if was_frozen else gc.unfreeze()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with paused_collection():
            pass
        assert not gc.isenabled()  # as before
    finally:
        gc.enable()
