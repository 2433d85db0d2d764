"""DFlash heads: every step of a block is that of a plain transcription, and no text changes."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.session import Session
from slipstream.models.heads.dflash import DFlashBackend
from slipstream.models.heads.head_backend import HeadSession
from tests.support.dflash_cases import BLOCK, DFlash, transcribed, write_dflash
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.tiny_models import VOCAB, fresh, prompts, tokenizer

STEPS = BLOCK - 1
FAVORED = {7: 60.0, 9: 60.0}


@cache
def target() -> Any:
    return fresh("llama", num_hidden_layers=5)


def decoder_of(head: DFlash, **settings: Any) -> SpeculativeDecoder:
    options: dict[str, Any] = {"drafter": "model", "num_draft_tokens": 4, "max_batch_size": 3} | settings
    return SpeculativeDecoder(target(), str(head.folder), tokenizer=tokenizer(), **options)


@pytest.mark.parametrize("layout", ["official", "speculators"])
def test_every_step_is_that_of_the_transcription(tmp_path: Path, layout: str) -> None:
    head = write_dflash(tmp_path, target(), layout=layout)
    pair = pair_of(target(), head.folder)
    for text in prompts([2, 17, 40]):
        steps, expected = step_logits(pair, text, STEPS), transcribed(head, target(), text, STEPS)
        is_scored = expected[0].isfinite()
        assert all(same_logits([x[is_scored] for x in steps], [x[is_scored] for x in expected]))
        assert all(torch.equal(x.isfinite(), is_scored) for x in steps)


@pytest.mark.exhaustive
@pytest.mark.parametrize("wrong", [{"shift": 1}, {"causal": True}, {"slot": 0}], ids=str)
def test_a_wrong_transcription_is_noticed(tmp_path: Path, wrong: dict[str, Any]) -> None:
    head = write_dflash(tmp_path, target())
    text = prompts([17])[0]
    steps = step_logits(pair_of(target(), head.folder), text, STEPS - 1)
    assert not any(same_logits(steps, transcribed(head, target(), text, STEPS - 1, **wrong)))


def drafts_agree(decoder: SpeculativeDecoder, head: DFlash) -> bool:
    """Whether the drafts of a batch are those of the transcription. Two tokens are favored, to accept some."""
    texts, bias = prompts([3, 17, 9]), torch.zeros(VOCAB)
    bias[list(FAVORED)] = torch.tensor(list(FAVORED.values()))
    results = decoder.generate(texts, SamplingParams(max_tokens=16, ignore_eos=True, logit_bias=FAVORED))
    drafts = []
    for prompt, result in zip(texts, results, strict=True):
        text = [*prompt, *result.token_ids]
        for round in (round for round in result.rounds if round.draft):
            expected = transcribed(head, target(), text[: round.start], len(round.draft))
            drafts.append(list(round.draft) == [int((logits + bias).argmax()) for logits in expected])
    assert len(drafts) > 8 and sum(result.stats.num_accepted_tokens for result in results) > 3
    return all(drafts)


@pytest.mark.slow
def test_drafts_of_a_batch_are_those_of_the_transcription_in_one_forward_per_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = write_dflash(tmp_path, target())
    decoder, forwards, original = decoder_of(head), [], DFlashBackend.forward

    def forward(backend: DFlashBackend, tokens: Any, *args: Any, logits: bool, **options: Any) -> Any:
        forwards.append(logits)
        return original(backend, tokens, *args, logits=logits, **options)

    monkeypatch.setattr(DFlashBackend, "forward", forward)
    assert drafts_agree(decoder, head)
    assert sum(forwards) <= 16
    monkeypatch.setattr(HeadSession, "keep_drafts", Session.keep_drafts)
    monkeypatch.setattr(HeadSession, "_drop_wrong", lambda self: None)
    assert not drafts_agree(decoder_of(head), head)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize(("drafter", "length"), [("model", 4), ("model", 9), ("auto", "auto")])
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(
    tmp_path: Path, drafter: str, length: int | str, options: dict[str, Any]
) -> None:
    decoder = decoder_of(write_dflash(tmp_path, target()), drafter=drafter, num_draft_tokens=length)
    plain = decoder.using("none")
    texts, params = prompts([3, 17, 40, 5]), SamplingParams(max_tokens=12, **options)
    expected = [result.token_ids for result in plain.generate(texts, params)]
    assert [decoder.generate(prompt, params).token_ids for prompt in texts] == expected
    results = decoder.generate(texts, params)
    assert [result.token_ids for result in results] == expected
    drafts = [round.draft for result in results for round in result.rounds if round.draft]
    if drafter == "model":  # auto also retrieves drafts
        assert drafts and max(map(len, drafts)) <= STEPS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "its vocab_size is 99, that of"),
        ({"hidden_size": 48}, "its hidden_size is 48, that of"),
        ({"block_size": 1}, "block_size=1; allowed: 2 to 255"),
        ({"mask_token_id": None}, "mask_token_id=None; allowed: 0 to 60"),
        ({"mask_token_id": 61}, "mask_token_id=61; allowed: 0 to 60"),
        ({"mask_token_id": True}, "mask_token_id=True; allowed: 0 to 60"),
        *(
            ({"target_layer_ids": layers}, f"reads layers {layers!r} of its target; ")
            for layers in ([1, 9], [], 3, "x", [True], ["x"], [1.5])
        ),
        ({"layer_types": ["sliding_attention"]}, "layer_types=['sliding_attention']; allowed: 'sliding_attention' or"),
        ({"is_causal": True}, "is_causal=True; allowed: False"),
        ({"causal": True}, "causal=True; allowed: False"),
        ({"norm_before_fc": True}, "norm_before_fc=True; allowed: False"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5; allowed: 1"),
        ({"embedding_multiplier": 12.0}, "embedding_multiplier=12.0, which is not known here and may change"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0; allowed: None"),
        ({"num_hidden_layers": 3}, "'full_attention' for each of its 3 layers"),
        ({"intermediate_size": 41}, "tensor 'layers.0.mlp.gate_proj.weight' is [40, 32]; allowed: [41, 32]"),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    head = write_dflash(tmp_path, target())
    file = head.folder / "config.json"
    settings = json.loads(file.read_text())
    for name, value in change.items():
        (settings["dflash_config"] if name in settings["dflash_config"] else settings)[name] = value
    file.write_text(json.dumps(settings))
    with pytest.raises(SlipstreamError) as raised:
        decoder_of(head)
    assert message in str(raised.value) and "\n" not in str(raised.value)


def test_a_draft_vocabulary_without_an_output_layer_takes_rows_of_the_targets(tmp_path: Path) -> None:
    head = write_dflash(tmp_path, target(), layout="speculators")
    file, text = head.folder / "model.safetensors", prompts([17])[0]
    tensors = {name: tensor for name, tensor in load_file(file).items() if name != "lm_head.weight"}
    save_file(tensors, file)
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    whole = replace(head, tensors=tensors | {"lm_head.weight": target().lm_head.weight[ids]})
    steps, expected = step_logits(pair_of(target(), tmp_path), text, 2), transcribed(whole, target(), text, 2)
    assert all(same_logits([a[ids] for a in steps], [b[ids] for b in expected]))


def test_layers_that_no_setting_names_are_those_of_the_authors_code(tmp_path: Path) -> None:
    head = write_dflash(tmp_path, target(), layers=(2, 3))  # outputs of layers 1 and 5 - 3
    settings = json.loads((tmp_path / "config.json").read_text())
    del settings["dflash_config"]["target_layer_ids"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    text = prompts([17])[0]
    assert all(same_logits(step_logits(pair_of(target(), tmp_path), text, 2), transcribed(head, target(), text, 2)))
