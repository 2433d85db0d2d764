"""Models that rotate the keys of long texts differently: each text is that of `generate`, whatever the drafts."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.loop import Engine
from slipstream.core.session import Session
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.own_caches import OwnCacheBackend
from slipstream.models.hf.rotations_by_length import RotationsByLength
from tests.support.markers import mostly_exhaustive, needs_transformers
from tests.support.tiny_models import VOCAB, Oracle, fresh, prompts, reference

SWITCH = 64  # tokens of the longest text that counts as short
COUNT = 30
LENGTHS = [20, 90, 58, 64, 65, 1100, 63]  # short, long, growing long, at the switch, of several chunks
ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [2.0, 4.0, 6.0, 9.0],
    "original_max_position_embeddings": SWITCH,
}
PARAMS = SamplingParams(max_tokens=COUNT)


# older versions dropped the cache of a text that became long, and read only its last token
pytestmark = [pytest.mark.slow, needs_transformers("5.20", "`generate` reads a text again when it becomes long")]


def model_of(kind: str, dtype: torch.dtype = torch.float32, **rope: Any) -> Any:
    shape = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    token_ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0, tie_word_embeddings=False)
    sizes = dict(num_key_value_heads=2, initializer_range=0.4, max_position_embeddings=32 * SWITCH)
    if kind == "phi3":
        extra, config = {"original_max_position_embeddings": SWITCH}, transformers.Phi3Config
    elif kind == "phimoe":  # also scales cosines and sines
        extra, config = {"num_local_experts": 4}, transformers.PhimoeConfig
        rope = {"short_mscale": 1.2, "long_mscale": 1.4} | rope
    else:  # `generate` does not read its texts again
        extra, config = {}, transformers.LlamaConfig
        rope = {"factor": 32.0} | rope
    with torch.random.fork_rng():
        torch.manual_seed(0)
        settings = shape | token_ids | sizes | extra
        return transformers.AutoModelForCausalLM.from_config(
            config(**settings, rope_parameters=ROPE | rope), dtype=dtype
        )


@pytest.fixture(scope="module", params=[*["phi3", "llama"], *mostly_exhaustive(["phimoe"])])
def case(request: pytest.FixtureRequest) -> tuple[Any, list[list[int]], list[list[int]]]:
    """A model, prompts, and the text of `generate` after each, by an untouched copy of the model."""
    model, texts = model_of(request.param).eval(), prompts(LENGTHS)
    untouched = copy.deepcopy(model)
    return model, texts, [reference(untouched, prompt, COUNT) for prompt in texts]


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "right", "wrong"])
def test_texts_are_those_of_generate_together_and_alone(drafter: str, case: Any) -> None:
    model, texts, expected = case
    chosen_drafter: Any = drafter
    if drafter in ("right", "wrong"):
        full_texts = [[*prompt, *text] for prompt, text in zip(texts, expected, strict=True)]
        chosen_drafter = Oracle(full_texts, frozenset(range(0, COUNT, 4)) if drafter == "wrong" else frozenset())
    drafts = {} if drafter == "none" else {"num_draft_tokens": 7}
    decoder = SpeculativeDecoder(model, model, drafter=chosen_drafter, reproducible=False, max_batch_size=4, **drafts)
    assert [result.token_ids for result in decoder.generate(texts, PARAMS)] == expected
    if not isinstance(chosen_drafter, Oracle):
        assert [decoder.generate(prompt, PARAMS).token_ids for prompt in texts[:4]] == expected[:4]


def test_a_round_that_crosses_the_switch_changes_the_text(case: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, texts, expected = case
    full_texts = [[*prompt, *text] for prompt, text in zip(texts, expected, strict=True)]
    decoder = SpeculativeDecoder(model, drafter=Oracle(full_texts), num_draft_tokens=7, reproducible=False)
    make_batch = Engine.batch
    monkeypatch.setattr(Engine, "batch", lambda *given: replace(make_batch(*given), longest_short=None))
    assert [result.token_ids for result in decoder.generate(texts, PARAMS)] != expected


def test_sampled_texts_are_the_same_with_drafts_and_in_a_batch(case: Any) -> None:
    model, texts, _ = case
    params = [SamplingParams(temperature=0.8, max_tokens=COUNT, seed=seed) for seed in range(len(texts))]
    plain, ngram = (
        SpeculativeDecoder(model, drafter=drafter, acceptance="match", reproducible=False)
        for drafter in ("none", "ngram")
    )
    alone = [plain.generate(prompt, options).token_ids for prompt, options in zip(texts, params, strict=True)]
    assert [result.token_ids for result in ngram.generate(texts, params)] == alone


def test_a_conversation_continues_as_generate_would(case: Any) -> None:
    """Cached tokens of an earlier text are reused only if they were rotated for the same length."""
    model, texts, expected = case
    decoder = SpeculativeDecoder(model, drafter="none", reproducible=False)
    decoder.generate(texts[2], PARAMS)
    longer = [*texts[2], *expected[2], 5]
    for prompt in (longer, texts[2][:50], [*texts[2][:50], 9], longer):
        assert decoder.generate(prompt, PARAMS).token_ids == reference(model, prompt, COUNT)


def test_other_callers_run_the_models_own_code(case: Any) -> None:
    model, texts, expected = case
    assert HFBackend(model).longest_short == SWITCH
    assert [reference(model, prompt, COUNT) for prompt in texts[:3]] == expected[:3]
    assert [reference(copy.deepcopy(model), prompt, COUNT) for prompt in texts[:3]] == expected[:3]


def test_rotating_by_the_longest_text_of_a_batch_changes_short_texts(
    case: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: rotated by the largest position of a call, a short text beside a long one changes."""
    model, texts, expected = case
    decoder = SpeculativeDecoder(model, drafter="none", reproducible=False)
    monkeypatch.setattr("slipstream.models.hf.backend.HFBackend._slots", lambda *_: None)
    assert [result.token_ids for result in decoder.generate(texts[:3], PARAMS)] != expected[:3]


def test_these_models_are_not_captured() -> None:
    backend = GraphedBackend(model_of("phi3").eval())
    assert backend.longest_short == SWITCH and backend.reads_anew
    assert backend.graph_memory().count == 0 and "how long each text is" in str(backend._graphs.reason)
    assert Session(backend).table.longest_short == SWITCH


@pytest.mark.parametrize("rope", [{"rope_type": "linear"}, {"rope_type": "dynamic"}, {"rope_type": "yarn"}, None])
def test_other_rotations_keep_their_forward(rope: dict[str, Any] | None) -> None:
    settings = {} if rope is None else {"rope_parameters": rope | {"rope_theta": 1e4, "factor": 4.0}}
    settings = settings | ({"original_max_position_embeddings": SWITCH} if rope else {})
    model = fresh("llama", **settings)
    backend = HFBackend(model)
    assert backend.longest_short is None
    assert not any(isinstance(module.__dict__.get("forward"), RotationsByLength) for module in model.modules())


def test_equal_short_and_long_factors_need_no_second_reading() -> None:
    assert HFBackend(model_of("llama", long_factor=ROPE["short_factor"])).longest_short is None


def test_dynamic_scaling_never_begins_within_the_context() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    model = fresh("llama", rope_parameters=rope, max_position_embeddings=SWITCH)
    texts = prompts([20, 40, SWITCH - COUNT])
    decoder = SpeculativeDecoder(model, drafter="ngram", num_draft_tokens=7, reproducible=False)
    expected = [reference(fresh("llama", rope_parameters=rope, max_position_embeddings=SWITCH), p, 24) for p in texts]
    results = decoder.generate(texts, SamplingParams(max_tokens=24))
    assert [result.token_ids for result in results] == expected


def test_a_model_on_its_own_caches_ends_where_long_texts_begin() -> None:
    assert OwnCacheBackend(model_of("phi3").eval()).max_length == SWITCH
    assert OwnCacheBackend(fresh("llama")).max_length == 1024
