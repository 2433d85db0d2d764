"""Texts do not depend on PyTorch's default type and device, which stay as the caller set them; NaN is an error."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.rng import WarpOptions
from slipstream.integrations.transformers.custom_generate import custom_generate
from slipstream.sampling.warpers import Warp
from tests.support.markers import mostly_slow
from tests.support.tiny_models import fresh, perturbed, prompts, shared

PROMPTS = prompts([9, 14])
PARAMS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "sampled": {"temperature": 0.7, "top_p": 0.999, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 3},
    "biases": {"temperature": 1.3, "top_k": 20, "logit_bias": {7: 2.5}, "bad_words": [[5, 6], [9]], "seed": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "match": {},
    "block": {"draft": perturbed("llama"), "drafter": "model", "num_draft_tokens": 3, "acceptance": "block"},
}
DEFAULTS = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64, "meta": "meta"}


@pytest.fixture(params=mostly_slow(DEFAULTS, "bfloat16", "meta"))
def default(request: pytest.FixtureRequest) -> Iterator[Any]:
    yield DEFAULTS[request.param]
    use(torch.float32)
    torch.set_default_device(None)


def use(default: Any) -> None:
    """Set PyTorch's default type or default device."""
    (torch.set_default_dtype if isinstance(default, torch.dtype) else torch.set_default_device)(default)


def texts(models: dict[str, Any], params: dict[str, Any]) -> list[list[int]]:
    decoder = SpeculativeDecoder(shared("llama"), **models)
    return [result.token_ids for result in decoder.generate(PROMPTS, SamplingParams(max_tokens=24, **params))]


@cache
def expected_texts(models: str, params: str) -> list[list[int]]:
    return texts(MODELS[models], PARAMS[params])


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("params", PARAMS)
def test_texts_do_not_depend_on_torchs_defaults(models: str, params: str, default: Any) -> None:
    expected = expected_texts(models, params)
    use(default)
    assert texts(MODELS[models], PARAMS[params]) == expected


def test_generate_with_a_penalty_does_not_depend_on_torchs_defaults(default: Any) -> None:
    ids = torch.tensor([PROMPTS[0]])
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    expected = shared("llama").generate(ids, **options, repetition_penalty=1.3)
    use(default)
    ours = shared("llama").generate(ids, **options, repetition_penalty=1.3, custom_generate=custom_generate)
    assert torch.equal(ours, expected)


def test_the_callers_default_device_is_restored_between_chunks() -> None:
    decoder = SpeculativeDecoder(shared("llama"))
    torch.set_default_device("meta")
    try:
        for _ in decoder.stream(PROMPTS[0], SamplingParams(max_tokens=4)):
            assert torch.get_default_device().type == "meta"
    finally:
        torch.set_default_device(None)


@pytest.mark.parametrize("default", ["bfloat16", "float16", "float64"], indirect=True)
def test_temperature_and_top_p_are_exact_under_other_default_dtypes(default: Any) -> None:
    scores = torch.linspace(-4, 4, 5000, dtype=torch.float32)[None]
    expected = Warp(WarpOptions(0.7, top_p=0.999), scores.device)(scores)
    use(default)
    assert torch.equal(Warp(WarpOptions(0.7, top_p=0.999), scores.device)(scores), expected)
    assert int((expected == 0).sum()) > 0


RULES: dict[str, dict[str, Any]] = {
    "match": {"drafter": "ngram"},
    "rejection": {"drafter": "ngram", "acceptance": "rejection"},
    "block": MODELS["block"],
    "none": {"drafter": "none"},
}


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are loaded whose logits are not finite, as if only later ones were not."""
    monkeypatch.setattr("slipstream.models.hf.trials.check_logits", lambda logits: None)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 5}, {"logit_bias": {3: 1.0}}, {"top_p": 0.9, "repetition_penalty": 1.2}]
)
@pytest.mark.parametrize("rule", RULES)
def test_nan_logits_of_the_target_raise_an_error(rule: str, options: dict[str, Any], unchecked: None) -> None:
    model = fresh("llama")
    with torch.no_grad():
        model.lm_head.weight[3] = float("nan")
    decoder = SpeculativeDecoder(model, **RULES[rule])
    with pytest.raises(SlipstreamError, match=r"no token to choose from .* the model's own are NaN"):
        decoder.generate(PROMPTS[0], SamplingParams(temperature=1.0, max_tokens=4, **options))


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["rejection", "block", "match"])
def test_nan_logits_of_a_draft_model_change_no_text(acceptance: str, unchecked: None) -> None:
    broken = fresh("llama")
    with torch.no_grad():
        broken.lm_head.weight[3] = float("nan")
    settings: dict[str, Any] = {"drafter": "model", "num_draft_tokens": 3, "acceptance": acceptance}
    decoder = SpeculativeDecoder(shared("llama"), broken, **settings)
    plain = SpeculativeDecoder(shared("llama"), drafter="none")
    for seed in range(3):
        params = SamplingParams(temperature=1.0, max_tokens=12, seed=seed)
        result = decoder.generate(PROMPTS[0], params)
        assert result.stats.num_accepted_tokens == 0 or acceptance == "match"
        assert result.token_ids == plain.generate(PROMPTS[0], params).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("begins_inside", [False, True])
def test_a_decoder_follows_autocast_and_leaves_nothing_of_it_behind(begins_inside: bool) -> None:
    def logits(decoder: SpeculativeDecoder, is_inside: bool) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=is_inside):
            return decoder.next_logits([*PROMPTS[0], 5, 6, 7])

    expected = {
        is_inside: logits(SpeculativeDecoder(fresh("llama"), reproducible=False), is_inside)
        for is_inside in (False, True)
    }
    assert not torch.equal(expected[False], expected[True])
    decoder = SpeculativeDecoder(fresh("llama"), reproducible=False)
    for is_inside in (begins_inside, not begins_inside, begins_inside):
        assert torch.equal(logits(decoder, is_inside), expected[is_inside])


@pytest.mark.parametrize("setting", ["onednn", "float32 precision"])
def test_a_model_is_tried_again_where_pytorch_multiplies_in_another_way(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(fresh("llama"), drafter="ngram", reproducible=False)
    decoder.generate(PROMPTS[0], max_tokens=4)
    before = decoder.target
    if setting == "onednn":
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    else:
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "medium")
    decoder.renew()
    assert decoder.target is not before
    assert decoder.tokens_in_memory() == (0, 0)


def test_shapes_are_chosen_again_for_another_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = SpeculativeDecoder(fresh("llama"), drafter="ngram")
    decoder.generate(PROMPTS[0], max_tokens=4)
    before = decoder.calibration
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    decoder.renew()
    assert decoder.calibration is not before
    assert decoder.tokens_in_memory() == (0, 0)
