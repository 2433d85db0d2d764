"""Each kind of draft is loaded or refused with its settings; one that costs as much as its target is warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream import SpeculativeDecoder, UsageError
from slipstream.config import DecoderConfig
from slipstream.wiring import model_pair
from slipstream.wiring.model_pair import ModelPair, brought_draft, load_draft
from tests.support.tiny_models import fresh, shared


def warnings_of(draft: Any, caplog: pytest.LogCaptureFixture, **settings: Any) -> list[str]:
    caplog.clear()
    SpeculativeDecoder(shared("llama"), draft, reproducible=False, **settings)
    return [record.getMessage() for record in caplog.records if "hardly saves time" in record.getMessage()]


def test_a_draft_model_as_large_as_its_target_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    (warning,) = warnings_of(shared("llama"), caplog)
    assert warning.startswith("draft model 'LlamaForCausalLM' hardly saves time: it is as large as its target, with ")
    (warning,) = warnings_of(fresh("llama", num_hidden_layers=3), caplog)
    assert "it is larger than its target, with about " in warning


def test_a_smaller_draft_model_and_one_in_fewer_bits_are_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert warnings_of(fresh("llama", num_hidden_layers=1), caplog) == []
    assert warnings_of(fresh("llama"), caplog, draft_dtype="int4") == []


def test_a_later_draft_model_is_warned_of_as_well(caplog: pytest.LogCaptureFixture) -> None:
    decoder = SpeculativeDecoder(shared("llama"), reproducible=False)
    decoder.with_draft(shared("llama"))
    assert "hardly saves time" in caplog.text


LOADED = "a loaded model"


def loaded_draft(draft: Any, **settings: Any) -> Any:
    config = DecoderConfig(**settings)
    target = ModelPair.load(shared("llama"), "none", DecoderConfig(reproducible=False), None).target
    return load_draft(fresh("llama", num_hidden_layers=1) if draft == LOADED else draft, config, target, None)


@pytest.mark.parametrize(
    ("draft", "settings", "name"),
    [
        (None, {}, None),
        (None, {"draft_vocabulary": "full"}, None),
        ("toy", {}, "toy"),
        (LOADED, {}, "LlamaForCausalLM"),
        (LOADED, {"draft_dtype": "int4"}, "LlamaForCausalLM"),
    ],
)
def test_each_kind_of_draft_is_loaded(draft: Any, settings: Any, name: str | None) -> None:
    loaded = loaded_draft(draft, **settings)
    assert (loaded and loaded.name) == name


@pytest.mark.parametrize(
    ("draft", "settings", "message"),
    [
        (None, {"draft_dtype": "int4"}, r"^draft_dtype='int4', but there is no draft model; allowed: auto$"),
        (
            None,
            {"draft_vocabulary": 32},
            "^draft_vocabulary=32, but there is no draft model; allowed: 'auto' or 'full'$",
        ),
        ("toy", {"draft_dtype": "int4"}, "^draft_dtype='int4', but the toy model has no weights; allowed: auto$"),
        ("toy", {"draft_vocabulary": 32}, "^draft_vocabulary=32, but the toy model has no weights; allowed: "),
        ("mtp", {}, "MTP"),
        ("mtp", {"draft_vocabulary": 32}, "^draft_vocabulary=32 with the target's MTP layers; allowed: 'auto', or "),
        ("mtp", {"draft_context": 128}, "^draft_context=128 with the target's MTP layers; allowed: 'auto', or "),
        (
            "smollm2_head",
            {"draft_vocabulary": 32},
            "^draft_vocabulary=32 with the draft head 'smollm2_head'; allowed: ",
        ),
        (
            LOADED,
            {"draft_vocabulary": 32},
            "^draft_vocabulary=32, but the draft model is loaded already and stays as it",
        ),
        (LOADED, {"draft_dtype": "bfloat16"}, "but the draft model is loaded already; allowed: auto, int4, int8$"),
    ],
)
def test_settings_that_a_draft_does_not_have_are_refused(draft: Any, settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        loaded_draft(draft, **settings)


@pytest.mark.parametrize(
    ("target", "settings", "draft"),
    [
        ("qwen3:4b", {}, "qwen3:0.6b"),
        ("Qwen3:4B", {"drafter": "model"}, "qwen3:0.6b"),
        ("smollm2:1.7b", {}, "smollm2"),
        ("qwen3:4b", {"drafter": "ngram"}, None),
        ("qwen3:30b", {}, None),
        ("Qwen/Qwen3-4B-GGUF", {}, None),
        (Path("qwen3:4b"), {}, None),
    ],
)
def test_a_short_name_brings_its_draft_model_where_one_is_used(
    target: Any, settings: dict[str, Any], draft: str | None
) -> None:
    assert brought_draft(target, DecoderConfig(**settings)) == draft


def test_a_draft_model_that_cannot_be_fetched_is_left_out_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    assert model_pair._at_hand("qwen3:0.6b", DecoderConfig()) is None  # tests have no network
    assert "model 'qwen3:0.6b' was not found locally" in caplog.text and "drafting without it" in caplog.text


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ("./absent.gguf", "'absent.gguf' does not exist"),
        ("smolm2", "did you mean smollm2"),
        ("no/such/folder", "not a fo"),
    ],
)
def test_a_missing_draft_model_is_named_before_the_target_is_loaded(
    draft: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_pair, "load", lambda *_: pytest.fail("the target was loaded"))
    with pytest.raises(UsageError, match=message):
        model_pair.ModelPair.load("toy", draft, DecoderConfig(), None)
