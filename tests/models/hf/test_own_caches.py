"""Models on caches of their own: drafts change no text, and every wrong state is noticed."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from copy import deepcopy as copy_whole
from typing import Any

import pytest
import torch
import transformers
from transformers.cache_utils import DynamicLayer

import slipstream
from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.decoder.cache import KEYS_AND_VALUES
from slipstream.models.hf.own_caches import MAX_STATES, NEWEST, OwnCacheBackend, OwnCaches, State
from slipstream.models.hf.prepared_inputs import cache_name
from slipstream.models.hf.state_trials import _agree, _close, own_cache_backend
from slipstream.models.loaded import LoadOptions
from slipstream.models.pretrained import wrap_model
from tests.support.architecture_checks import PROMPTS, QUEUE, Checks, PartlyWrongDrafter, greedy
from tests.support.architectures import tiny_model
from tests.support.markers import mostly_exhaustive
from tests.support.queued_texts import GREEDY, QueuedTexts
from tests.support.tiny_models import fresh, reference

HYBRIDS = ("olmo_hybrid", "rwkv", "xlstm", "kimi_linear", "jamba")
StateAt = Callable[[OwnCaches, int, int], State | None]


def decoder_of(model_type: str) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model(model_type), drafter="none", max_batch_size=3)


TEXTS = QueuedTexts(decoder_of)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("right", [None, 0, 2, 4])
@pytest.mark.parametrize("model_type", [*HYBRIDS[:4], *mostly_exhaustive(HYBRIDS[4:])])
def test_drafts_change_no_text(model_type: str, right: int | None) -> None:
    decoder = decoder_of(model_type)
    assert isinstance(decoder.target.backend, OwnCacheBackend)
    assert TEXTS.drafted(model_type, right, decoder) == TEXTS.expected(model_type)


def not_restored(original: StateAt) -> StateAt:
    def at(caches: OwnCaches, slot: int, position: int) -> State | None:
        newest = max(caches._states[slot], default=0)
        state = caches._states[slot].get(newest)
        original(caches, slot, position)
        return state if position else None

    return at


def lacks_a_token(original: StateAt) -> StateAt:
    def at(caches: OwnCaches, slot: int, position: int) -> State | None:
        earlier = max((p for p in caches._states[slot] if p < position), default=position)
        state = caches._states[slot].get(earlier)
        original(caches, slot, position)
        return None if state is None else state.duplicate()

    return at


def of_another_row(original: StateAt) -> StateAt:
    def at(caches: OwnCaches, slot: int, position: int) -> State | None:
        state = original(caches, slot, position)
        others = [s for i, s in enumerate(caches._states) if i != slot and s]
        return list(others[0].values())[-1].duplicate() if state is not None and others else state

    return at


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [not_restored, lacks_a_token, of_another_row])
def test_a_wrong_state_is_noticed(wrong: Callable[[StateAt], StateAt], monkeypatch: pytest.MonkeyPatch) -> None:
    expected = TEXTS.expected("olmo_hybrid")
    decoder_of("olmo_hybrid")  # builds the model first, since trials would refuse it with wrong states
    monkeypatch.setattr("slipstream.models.pretrained.own_cache_backend", OwnCacheBackend)
    monkeypatch.setattr(OwnCaches, "at", wrong(OwnCaches.at))
    assert TEXTS.drafted("olmo_hybrid", None) != expected


def test_a_kept_state_that_forwards_change_is_noticed_at_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(State, "duplicate", copy)  # shares tensors that the next forward changes in place
    with pytest.raises(UsageError, match="cannot be saved and restored"):
        decoder_of("olmo_hybrid")


def test_padding_changes_a_recurrent_state() -> None:
    """Padding enters a recurrent state, so rows of unequal length must not share a rectangle."""
    backend = decoder_of("olmo_hybrid").target.backend
    backend.reserve(1, 64)
    tokens = torch.tensor([PROMPTS[1]])
    backend.forward(tokens, [0], first_slot=0, logits=False)
    right = backend.forward(torch.tensor([[9]]), [3], first_slot=0, logits=True)
    padded = torch.cat([tokens, torch.zeros(1, 2, dtype=torch.int64)], 1)
    backend.forward(padded, [0], first_slot=0, logits=False)
    assert not torch.allclose(backend.forward(torch.tensor([[9]]), [5], first_slot=0, logits=True), right, atol=1e-3)


def test_seeded_texts_are_those_of_plain_decoding() -> None:
    TEXTS.check_seeded_rows("olmo_hybrid")


@pytest.mark.parametrize("model_type", ["olmo_hybrid", "rwkv"])
def test_a_stateful_model_can_be_the_draft_model(model_type: str) -> None:
    TEXTS.check_own_drafts(model_type, tiny_model(model_type))


def test_a_conversation_continues_from_a_kept_state() -> None:
    TEXTS.check_conversation("olmo_hybrid", decoder_of("olmo_hybrid"))


def test_a_model_that_takes_one_token_after_a_state_reads_drafts_one_by_one() -> None:
    backend = decoder_of("mamba").target.backend
    assert isinstance(backend, OwnCacheBackend) and not backend.takes_several_tokens
    assert TEXTS.drafted("mamba", None) == TEXTS.expected("mamba")


def half_precision_model(model_type: str) -> Any:
    return tiny_model(model_type).to(torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("reproducible", ["auto", False])
def test_in_half_precision_drafts_are_read_token_by_token_unless_reproducible_is_off(
    reproducible: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(
        half_precision_model("olmo_hybrid"), drafter="none", max_batch_size=3, reproducible=reproducible
    )
    texts = {tuple(prompt): decoder.generate(list(prompt), GREEDY).token_ids for prompt in QUEUE}
    decoder.forget()
    widths, original = [], OwnCacheBackend._run
    monkeypatch.setattr(
        OwnCacheBackend,
        "_run",
        lambda self, ids, count, *rest: widths.append(count) or original(self, ids, count, *rest),
    )
    drafting = decoder.using(PartlyWrongDrafter(texts, decoder.target.backend.vocab_size), num_draft_tokens=4)
    results = drafting.generate([list(prompt) for prompt in QUEUE], GREEDY)
    prompts_read = sum(len(prompt) > 1 for prompt in QUEUE)
    num_wide = sum(width > 1 for width in widths)
    if reproducible is False:
        assert num_wide > prompts_read
    else:
        assert num_wide <= prompts_read
        assert [result.token_ids for result in results] == list(texts.values())


def test_auto_drafts_nothing_where_drafts_are_read_token_by_token() -> None:
    model = half_precision_model("olmo_hybrid")
    assert SpeculativeDecoder(model).drafter_name == "none"
    assert SpeculativeDecoder(model, num_draft_tokens=3).drafter_name == "suffix"
    assert SpeculativeDecoder(model, reproducible=False).drafter_name == "suffix"


def test_a_long_prompt_of_a_model_that_loses_its_state_is_read_at_once() -> None:
    decoder = decoder_of("mamba")
    prompt = [3 + i % 50 for i in range(600)]
    assert decoder._models.shapes.chunk > 600
    expected = decoder.target.model.generate(
        torch.tensor([prompt]), max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None
    )[0, 600:].tolist()
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    assert decoder.generate(prompt, params).token_ids == expected


def test_a_model_that_ignores_given_masks_runs_on_its_own_caches() -> None:
    decoder = decoder_of("gpt_neo")
    assert isinstance(decoder.target.backend, OwnCacheBackend)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("xlnet", "returns the logits of 1"),
        ("xlm", "returns the logits of 12"),
        ("prophetnet", "differ with and without its cache"),
        ("cpmant", "attends to later tokens"),
    ],
)
def test_models_that_cannot_continue_a_text_are_refused_by_name(model_type: str, reason: str) -> None:
    model = tiny_model(model_type)
    with pytest.raises(UsageError, match=f"{type(model).__name__} is not supported.*{reason}"):
        wrap_model(model, None, LoadOptions())


def test_texts_are_limited_to_the_window_of_a_models_cache() -> None:
    checks = Checks(tiny_model("moshi"))
    window = checks.model.config.sliding_window
    expected = checks._generate([3, 4, 5])[: window - 3]
    for drafter in ("none", "ngram", "model"):
        decoder = checks.decoder.using(drafter)
        assert decoder.generate([3, 4, 5], greedy(window - 3)).token_ids == expected
        with pytest.raises(UsageError, match=f"at most {window - 3} after a prompt of 3 tokens"):
            decoder.generate([3, 4, 5], greedy(window - 2))


def test_an_encoder_is_refused_with_the_field_to_set() -> None:
    model = tiny_model("megatron-bert")
    model.config.is_decoder = False
    with pytest.raises(UsageError, match="is_decoder=False in its config; allowed: True"):
        wrap_model(model, None, LoadOptions())


def test_reproducible_is_refused_for_models_on_their_own_caches() -> None:
    with pytest.raises(UsageError, match="runs on its own cache"):
        SpeculativeDecoder(tiny_model("olmo_hybrid"), reproducible=True)


def test_states_share_keys_and_values() -> None:
    backend = decoder_of("olmo_hybrid").target.backend
    assert isinstance(backend, OwnCacheBackend)
    backend.reserve(1, 64)
    for start, token in enumerate(range(5, 17)):
        backend.forward(torch.tensor([[token]]), [start], first_slot=0, logits=False)
    keys = [
        layer.keys
        for state in backend.caches._states[0].values()
        for layer in state.cache.layers
        if type(layer) is DynamicLayer
    ]
    assert len(keys) >= 12 and len({key.untyped_storage().data_ptr() for key in keys}) == len(keys) // 12
    first = backend.forward(torch.tensor([[9, 8]]), [4], first_slot=0, logits=True)
    backend.forward(torch.tensor([[5, 6, 7, 8]]), [0], first_slot=0, logits=False)
    second = backend.forward(torch.tensor([[9, 8]]), [4], first_slot=0, logits=True)
    assert torch.allclose(first, second, atol=1e-5)


def kept_positions(positions: list[int]) -> list[int]:
    caches = OwnCaches()
    caches.reserve(1)
    for position in positions:
        caches.put(0, position, State(None, []))
    return sorted(caches._states[0])


def test_few_states_are_kept_and_the_newest_are_among_them() -> None:
    positions = kept_positions(list(range(1, 100)))
    assert len(positions) == MAX_STATES and positions[-NEWEST:] == list(range(100 - NEWEST, 100))


def test_older_states_are_kept_far_apart() -> None:
    older = kept_positions([512, 1024, 1536, *range(1537, 1537 + MAX_STATES)])
    assert older[:3] == [512, 1024, 1536] and len(older) == MAX_STATES


def test_only_caches_of_a_known_kind_are_used() -> None:
    assert cache_name(tiny_model("xlm")) is None  # its `cache` argument is a dictionary of tensors
    assert cache_name(tiny_model("llama")) in KEYS_AND_VALUES


class ShiftsInputs(transformers.LlamaForCausalLM):
    """Reads every token id plus one, if the text is long enough."""

    shortest = 0

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(input_ids, **kwargs)
        if input_ids.shape[1] > self.shortest:
            inputs["input_ids"] = (inputs["input_ids"] + 1) % 60
        return inputs


class ShiftsLongInputs(ShiftsInputs):
    shortest = 12  # longer than the texts of the trials


class AddsAnInput(transformers.LlamaForCausalLM):
    """Its forward behaves differently when `generate` calls it."""

    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids, **kwargs) | {"temper": torch.tensor(-1.0)}

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        logits_to_keep: Any = 0,
        temper: Any = None,
        **kwargs: Any,
    ) -> Any:
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
        outputs = super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **inputs, **kwargs)
        if temper is not None:
            outputs.logits = temper * outputs.logits
        return outputs


class ForwardsUnchanged(transformers.LlamaForCausalLM):
    def prepare_inputs_for_generation(self, input_ids: Any, **kwargs: Any) -> Any:
        return super().prepare_inputs_for_generation(input_ids, **kwargs)


class WantsOtherInputs(transformers.LlamaForCausalLM):
    """Fails if its mask or cache is of another kind than that of `generate`."""

    def forward(
        self,
        input_ids: Any = None,
        attention_mask: Any = None,
        position_ids: Any = None,
        cache: Any = None,
        logits_to_keep: Any = 0,
        **kwargs: Any,
    ) -> Any:
        self.check(attention_mask, cache)
        inputs = {"attention_mask": attention_mask, "position_ids": position_ids, "cache": cache}
        return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, **inputs, **kwargs)

    def check(self, mask: Any, cache: Any) -> None:
        if mask is not None:
            _, _ = mask.shape  # ValueError


class Asserts(WantsOtherInputs):
    def check(self, mask: Any, cache: Any) -> None:
        assert mask is None or mask.dim() == 2


class WantsDynamicCache(WantsOtherInputs):
    def check(self, mask: Any, cache: Any) -> None:
        if not isinstance(cache, transformers.DynamicCache | None):
            raise TypeError("no DynamicCache")


class Divides(WantsOtherInputs):
    def check(self, mask: Any, cache: Any) -> None:
        1 / (mask is None or mask.dim() == 2)


def of_class(kind: Any) -> Any:
    base = fresh("llama")
    model = kind(copy_whole(base.config))
    model.load_state_dict(base.state_dict())
    return model.eval()


@pytest.mark.each_value
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    "kind",
    [ShiftsInputs, ShiftsLongInputs, AddsAnInput, ForwardsUnchanged],
)
def test_inputs_that_a_model_prepares_itself_are_used(kind: Any, fast: bool) -> None:
    model, prompt, params = of_class(kind), [5, 9, 11, 5, 9, 11, 5], SamplingParams(max_tokens=12)
    expected, of_plain_llama = reference(model, prompt, 12), reference(fresh("llama"), prompt, 12)
    assert (expected == of_plain_llama) == (kind is ForwardsUnchanged)
    decoder = SpeculativeDecoder(model, drafter="ngram", fast=fast, reproducible=False)
    assert decoder.generate(prompt, params).token_ids == expected
    assert isinstance(decoder.target.backend, OwnCacheBackend) == (kind is not ForwardsUnchanged)
    options = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    outputs = model.generate(torch.tensor([prompt]), custom_generate=slipstream.custom_generate, **options)
    assert outputs[0, len(prompt) :].tolist() == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", [WantsOtherInputs, Asserts, WantsDynamicCache, Divides])
def test_a_forward_that_fails_on_slots_runs_on_caches_of_its_own(kind: Any) -> None:
    model, prompt = of_class(kind), [5, 9, 11, 5, 9, 11, 5]
    for fast in (False, True):
        decoder = SpeculativeDecoder(model, fast=fast, reproducible=False)
        assert isinstance(decoder.target.backend, OwnCacheBackend)
        assert decoder.generate(prompt, SamplingParams(max_tokens=12)).token_ids == reference(model, prompt, 12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_that_a_model_rules_out_do_not_count_as_a_difference(dtype: torch.dtype) -> None:
    """Models for images and text rule tokens out like this."""
    model, lowest = fresh("llama", dtype=dtype), torch.finfo(dtype).min
    model.lm_head.register_forward_hook(lambda *call: call[2].index_fill(-1, torch.arange(3, 9), lowest))
    backend = OwnCacheBackend(model)
    assert isinstance(own_cache_backend(model), OwnCacheBackend)
    backend.reserve(1, 8)
    logits = backend.forward(torch.tensor([[5, 6, 7]]), [0], first_slot=0, logits=True)
    close = _close(model)
    assert _agree(logits, logits.clone(), close) and not _agree(logits, logits.roll(1, -1), close)
    other = logits.masked_fill(logits > logits.float().mean(-1, keepdim=True).clamp(min=-1), 5.0)
    assert not _agree(logits, other, close)
    assert not _agree(logits, logits.masked_fill(logits > 0, float("nan")), close)
