"""EAGLE and EAGLE-2 heads: every draft step is that of a plain transcription, and no text changes."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.models.heads.head_files import head_files
from slipstream.models.loaded import LoadOptions
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.eagle1_cases import Eagle1, transcribed, write_eagle1
from tests.support.plain_texts import alone_and_together
from tests.support.tiny_models import fresh, prompts, tokenizer

STEPS = 4


@cache
def target() -> Any:
    return fresh("llama", num_hidden_layers=3)


@pytest.mark.parametrize(
    "options", [{}, {"bias": True}, {"bias": False}, {"qkv_bias": True}, {"binary": True}], ids=str
)
def test_every_step_is_that_of_the_transcription(tmp_path: Path, options: dict[str, Any]) -> None:
    head = write_eagle1(tmp_path, target(), **options)
    pair = pair_of(target(), head.folder)
    for text in prompts([2, 17, 40]):
        assert all(same_logits(step_logits(pair, text, STEPS), transcribed(head, target(), text, STEPS)))


@pytest.mark.parametrize("wrong", [{"shift": 1}, {"normed": False}], ids=str)
def test_a_wrong_transcription_is_noticed(tmp_path: Path, wrong: dict[str, Any]) -> None:
    head = write_eagle1(tmp_path, target())
    steps = step_logits(pair_of(target(), head.folder), prompts([17])[0], STEPS)
    expected = transcribed(head, target(), prompts([17])[0], STEPS, **wrong)
    assert not any(same_logits(steps, expected))


@pytest.mark.slow
def test_drafts_after_accepted_tokens_are_those_of_the_transcription(tmp_path: Path) -> None:
    """The head's cached rows are computed again from the target's hidden states."""
    head = write_eagle1(tmp_path, target())
    decoder = decoder_of(head)
    texts = prompts([3, 17, 9])
    results = decoder.generate(texts, SamplingParams(max_tokens=16, logit_bias=dict.fromkeys((7, 9), 60.0)))
    assert sum(result.stats.num_accepted_tokens for result in results) > 3
    for prompt, result in zip(texts, results, strict=True):
        text = [*prompt, *result.token_ids]
        for round in (round for round in result.rounds if round.draft):
            steps = transcribed(head, target(), text[: round.start], 1)
            biased = steps[0].index_add(0, torch.tensor([7, 9]), torch.tensor([60.0, 60.0]))
            assert int(biased.argmax()) == round.draft[0]


def decoder_of(head: Eagle1, **settings: Any) -> SpeculativeDecoder:
    options: dict[str, Any] = {"drafter": "model", "num_draft_tokens": STEPS, "max_batch_size": 3} | settings
    return SpeculativeDecoder(target(), str(head.folder), tokenizer=tokenizer(), **options)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", ["model", "auto"])
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(
    tmp_path: Path, drafter: str, options: dict[str, Any]
) -> None:
    decoder = decoder_of(write_eagle1(tmp_path, target()), drafter=drafter)
    texts, params = prompts([3, 17, 40, 5]), SamplingParams(max_tokens=12, **options)
    results = alone_and_together(decoder, texts, params)
    if drafter == "model":
        assert all(result.stats.num_draft_tokens for result in results)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "its vocab_size is 99, that of"),
        ({"hidden_size": 48}, "its hidden_size is 48, that of"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; allowed: 'silu'"),
        ({"norm_before_residual": True}, "norm_before_residual=True; allowed: False"),
        ({"residual_multiplier": 0.22}, "residual_multiplier=0.22, which is unknown and may change"),
        ({"sliding_window": 64}, "sliding_window=64 without layer_types; allowed: both"),
        ({"intermediate_size": 41}, "tensor 'layers.0.mlp.gate_proj.weight' is [40, 32]; allowed: [41, 32]"),
        ({"bias": True, "fc.bias": None}, "tensor 'fc.bias' is missing; allowed: [32]"),
        ({"qkv_bias": True}, "tensor 'layers.0.self_attn.q_proj.bias' is missing; allowed: [32]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    head = write_eagle1(tmp_path, target())
    removed = {name for name, value in change.items() if value is None}
    file, weights = head.folder / "config.json", head.folder / "model.safetensors"
    settings = json.loads(file.read_text()) | {name: value for name, value in change.items() if name not in removed}
    file.write_text(json.dumps(settings))
    save_file({name: tensor for name, tensor in load_file(weights).items() if name not in removed}, weights)
    with pytest.raises(SlipstreamError) as raised:
        decoder_of(head)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_of_one_layer_is_not_taken_for_a_head(tmp_path: Path) -> None:
    model = fresh("llama", num_hidden_layers=1)
    model.save_pretrained(tmp_path)
    assert head_files(str(tmp_path), LoadOptions()) is None
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    assert head_files(str(tmp_path), LoadOptions()) is None
