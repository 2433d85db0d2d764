"""Models with recurrent layers on slots: drafts change no text, to the bit where Slipstream's kernels compute them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from slipstream import SpeculativeDecoder, custom_generate
from slipstream.errors import UsageError
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.decoder.recurrence import RecurrentStates, Segment
from slipstream.models.hf.backend import HFBackend
from tests.support.architecture_checks import PROMPTS, PartlyWrongDrafter
from tests.support.architectures import tiny_model
from tests.support.markers import mostly_exhaustive
from tests.support.queued_texts import GREEDY, QueuedTexts

HALF = "in bfloat16, with kernels"
NAMES = [
    *("qwen3_5_text", "mamba2", HALF),
    *mostly_exhaustive(["falcon_h1", "qwen3_next", "lfm2", "bamba", "granitemoehybrid", "nemotron_h", "zamba2"]),
]


def half_precision_model() -> Any:
    """Three layers of the gated delta rule and one of attention, with weights large enough that greedy texts vary."""
    config = AutoConfig.for_model(
        "qwen3_5_text",
        vocab_size=320,
        hidden_size=256,
        intermediate_size=896,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        eos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    return model


def lasting_model(name: str) -> Any:
    """A model whose states remember many tokens; as initialized, they forget each token at the next."""
    model = half_precision_model() if name == HALF else tiny_model(name)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("A_log"):
                parameter.sub_(5)
    return model


def decoder_of(name: str, **options: Any) -> SpeculativeDecoder:
    if name == HALF:
        if kernels() is None:
            pytest.skip("Slipstream's own kernels cannot be used on this machine")
        return SpeculativeDecoder(lasting_model(name), drafter="none", max_batch_size=3, fast=True, **options)
    return SpeculativeDecoder(lasting_model(name), drafter="none", max_batch_size=3, **options)


TEXTS = QueuedTexts(decoder_of)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("right", [None, 0, 2, 4])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_no_text(name: str, right: int | None) -> None:
    decoder = decoder_of(name)
    backend = decoder.target.backend
    assert isinstance(backend, HFBackend) and backend.cache.states is not None
    assert TEXTS.drafted(name, right, decoder) == TEXTS.expected(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_text_is_the_models_own(name: str) -> None:
    """Up to ties, since in half precision the model's own code rounds elsewhere."""
    decoder = decoder_of(name)
    for prompt, text in TEXTS.plain(name).items():
        ids = torch.tensor([[*prompt, *text]])
        logits = decoder.target.model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, torch.tensor(text)[:, None])[:, 0]
        assert ((logits.max(1).values - chosen) <= (0.05 if name == HALF else 1e-4) * logits.std(1)).all()


Run = Callable[[RecurrentStates, int, torch.Tensor], torch.Tensor]


def with_segments(original: Run, change: Callable[[Segment], Segment]) -> Run:
    def run(states: RecurrentStates, layer: int, x: torch.Tensor) -> torch.Tensor:
        segments = states._segments
        states._segments = [change(segment) for segment in segments]
        output = original(states, layer, x)
        states._segments = segments
        return output

    return run


def not_restored(original: Run) -> Run:
    return with_segments(original, lambda s: replace(s, known=s.start, keep=s.start + s.count))


def restored_a_token_late(original: Run) -> Run:
    return with_segments(original, lambda s: replace(s, keep=min(s.keep + 1, s.start + s.count)))


def of_another_row(original: Run) -> Run:
    def run(states: RecurrentStates, layer: int, x: torch.Tensor) -> torch.Tensor:
        first, count = states._segments[0].slot, len(states._segments)
        memory = states._memory[layer]
        memory.states[first : first + count] = memory.states[first].clone()
        return original(states, layer, x)

    return run


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [not_restored, restored_a_token_late, of_another_row])
def test_a_wrong_state_is_noticed(wrong: Callable[[Run], Run], monkeypatch: pytest.MonkeyPatch) -> None:
    texts = QueuedTexts(lambda name: decoder_of(name, reproducible=False))
    expected = texts.expected("qwen3_5_text")
    monkeypatch.setattr(RecurrentStates, "run", wrong(RecurrentStates.run))
    assert texts.drafted("qwen3_5_text", None) != expected


@pytest.mark.exhaustive
def test_padding_that_enters_a_state_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of unequal length share a rectangle; padding of the shorter ones must not enter their states."""
    decoder = decoder_of("qwen3_5_text", reproducible=False)
    expected = [result.token_ids for result in decoder.generate([list(prompt) for prompt in PROMPTS], GREEDY)]
    assert expected == [TEXTS.plain("qwen3_5_text")[tuple(prompt)] for prompt in PROMPTS]
    decoder.forget()

    def begin(states: RecurrentStates, first_slot: int, starts: list[int], width: int) -> None:
        states._final_positions = dict.fromkeys(range(first_slot, first_slot + len(starts)), 1 << 20)
        original_begin(states, first_slot, starts, width)

    original_begin = RecurrentStates.begin
    monkeypatch.setattr(RecurrentStates, "begin", begin)
    drafter = PartlyWrongDrafter(TEXTS.plain("qwen3_5_text"), decoder.target.backend.vocab_size)
    drafting = decoder.using(drafter, num_draft_tokens=4)
    before = decoder.num_prefilled_tokens
    drafting.generate([list(prompt) for prompt in PROMPTS], GREEDY)
    assert decoder.num_prefilled_tokens - before > 2 * sum(
        map(len, PROMPTS)
    )  # after rejected drafts texts are read again


def test_seeded_texts_are_those_of_plain_decoding() -> None:
    TEXTS.check_seeded_rows("qwen3_5_text")


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_a_model_with_recurrent_layers_can_be_the_draft_model(name: str) -> None:
    TEXTS.check_own_drafts(name, lasting_model(name))


def test_a_conversation_continues_from_its_last_state() -> None:
    TEXTS.check_conversation("qwen3_5_text", decoder_of("qwen3_5_text", reproducible=False))


def test_texts_that_begin_alike_are_read_once() -> None:
    decoder, shared = decoder_of("qwen3_5_text", reproducible=False), [5 + i % 40 for i in range(48)]
    decoder.generate(shared, GREEDY)
    before = decoder.num_prefilled_tokens
    result = decoder.generate([*shared[:47], 7, 8], GREEDY)
    assert decoder.num_prefilled_tokens - before <= 2
    assert result.token_ids == decoder_of("qwen3_5_text").generate([*shared[:47], 7, 8], GREEDY).token_ids


def test_layer_skip_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="a model of type 'qwen3_5_text' has recurrent layers, whose states"):
        decoder_of("qwen3_5_text").using("layer_skip")


def test_other_callers_run_the_models_own_code() -> None:
    model = lasting_model("qwen3_5_text")
    ids = torch.tensor([PROMPTS[0]])
    before = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    decoder = SpeculativeDecoder(model, drafter="none", max_batch_size=3)
    decoder.generate(PROMPTS[0], GREEDY)
    after = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(before, after)


@pytest.mark.parametrize("name", ["qwen3_5_text", "mamba2"])
def test_custom_generate_takes_padded_rows(name: str) -> None:
    model = lasting_model(name)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    alone = [model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :] for prompt in PROMPTS[:2]]
    padded = torch.tensor([PROMPTS[0], [*[0] * 7, *PROMPTS[1]]])
    texts = model.generate(padded, attention_mask=(padded > 0).long(), custom_generate=custom_generate, **options)
    assert texts[:, -8:].tolist() == [text.tolist() for text in alone]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nemotron_h", "zamba2"])
def test_half_precision_is_told_by_the_weights_not_by_the_logits(name: str) -> None:
    """Nemotron-H gives float32 logits of bfloat16 weights."""
    decoder = SpeculativeDecoder(tiny_model(name, wide=True))
    assert isinstance(decoder.target.backend, HFBackend)
