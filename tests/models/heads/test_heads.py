"""EAGLE-3 heads: their drafts are those of a plain transcription, and no text changes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder, UsageError, compare
from slipstream.apps.cli.application import announce_loading, draft_name
from slipstream.apps.cli.flags import Models
from slipstream.apps.cli.measuring import draft_before_loading
from slipstream.config import DecoderConfig
from slipstream.constraints.constraint import Constraint
from slipstream.core.interfaces import Sampler
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row
from slipstream.models.heads.head_backend import HeadSession
from slipstream.models.heads.head_files import embedded_head, head_files, trained_kind
from slipstream.models.loaded import LoadOptions
from tests.support.embedded_model import loaded
from tests.support.gguf_files import write_model
from tests.support.head_cases import Written, transcribed, without, write_head
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.plain_texts import alone_and_together
from tests.support.tiny_models import fresh, prompts, tokenizer

COUNT, STEPS = 12, 4
GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 0.8, "seed": 5}
FLAGS: list[dict[str, Any]] = [
    {},
    {"norm_before_residual": True},
    {"fc_norm": True},
    {"norm_before_fc": True},
    {"norm_output": True},
    {"fc_norm": True, "norm_before_residual": True, "norm_output": True},
]


@cache
def target() -> Any:
    return fresh("llama", num_hidden_layers=5)


def decoder_of(head: Written, **settings: Any) -> SpeculativeDecoder:
    options = {"drafter": "model", "num_draft_tokens": STEPS, "max_batch_size": 3} | settings
    return SpeculativeDecoder(target(), str(head.folder), tokenizer=tokenizer(), **options)


def drafts(head: Written, prompt: list[int], count: int = COUNT, **options: Any) -> list[tuple[list[int], list[int]]]:
    """(text so far, draft) of each round that drafted."""
    params = SamplingParams(max_tokens=count, ignore_eos=True, **options)
    result = decoder_of(head).generate(prompt, params)
    text, pairs = [*prompt, *result.token_ids], []
    for round in result.rounds:
        if round.draft:
            pairs.append((text[: round.start], list(round.draft)))
    assert len(pairs) > 3
    return pairs


@pytest.mark.each_value
@pytest.mark.parametrize("layout", ["speculators", "official"])
@pytest.mark.parametrize("flags", mostly_slow(FLAGS, FLAGS[0], FLAGS[5]), ids=lambda flags: "+".join(flags) or "plain")
def test_every_draft_is_that_of_the_transcription(tmp_path: Path, layout: str, flags: dict[str, Any]) -> None:
    head = write_head(tmp_path, target(), layout=layout, **flags)
    for text, draft in drafts(head, prompts([17])[0]):
        assert draft == transcribed(head, target(), text, len(draft))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "wrong",
    [
        lambda head: (head, 1),  # features of the previous position
        lambda head: (replace(head, norm_before_residual=True), 0),
        lambda head: (replace(head, norm_output=True), 0),
        lambda head: (replace(head, layers=(0, 1, 3)), 0),
        lambda head: (without(head, "fc_norm.0.weight"), 0),
    ],
    ids=["shift", "residual", "output", "layers", "norms"],
)
def test_a_wrong_transcription_is_noticed(tmp_path: Path, wrong: Callable[[Written], tuple[Written, int]]) -> None:
    head = write_head(tmp_path, target(), fc_norm=True)
    wrong_head, shift = wrong(head)
    assert any(
        draft != transcribed(wrong_head, target(), text, len(draft), shift=shift)
        for text, draft in drafts(head, prompts([17])[0])
    )


@pytest.mark.slow
def test_rows_from_the_heads_own_outputs_are_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three tokens are favored, so that drafts are accepted. Negative control: if rows are kept, drafts differ."""
    favored = dict.fromkeys((7, 9, 21), 30.0)

    def differing() -> int:
        count = 0
        for seed in range(2):
            head = write_head(tmp_path / str(seed), target(), seed=seed, tokens=sorted(favored))
            pairs = drafts(head, prompts([17])[0], 24, logit_bias=favored)
            count += sum(draft != transcribed(head, target(), text, len(draft)) for text, draft in pairs)
        return count

    assert differing() == 0
    monkeypatch.setattr(HeadSession, "keep_drafts", Session.keep_drafts)
    monkeypatch.setattr(HeadSession, "_drop_wrong", lambda self: None)
    assert differing() > 0


@pytest.mark.each_value
@pytest.mark.parametrize("options", mostly_slow([GREEDY, SEEDED], SEEDED), ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", [*mostly_slow(["model", "auto"], "model"), *mostly_exhaustive(["hybrid"])])
def test_texts_are_those_of_plain_decoding_alone_and_in_batches(
    tmp_path: Path, drafter: str, options: dict[str, Any]
) -> None:
    head = write_head(tmp_path, target())
    length = "auto" if drafter == "auto" else STEPS
    decoder = decoder_of(head, drafter=drafter, num_draft_tokens=length)
    texts = prompts([3, 17, 40, 5])
    params = SamplingParams(max_tokens=COUNT, **options)
    results = alone_and_together(decoder, texts, params)
    if drafter == "model":
        assert all(result.stats.num_draft_tokens for result in results)


@pytest.mark.slow
def test_constraints_and_predictions_change_no_text(tmp_path: Path) -> None:
    model, options = fresh("llama", num_hidden_layers=5, eos_token_id=1), {"tokenizer": tokenizer()}
    head = write_head(tmp_path, model)
    decoder = SpeculativeDecoder(model, str(head.folder), drafter="model", num_draft_tokens=STEPS, **options)
    plain = SpeculativeDecoder(model, drafter="none", **options)
    prompt, constrained = (
        prompts([17])[0],
        SamplingParams(max_tokens=COUNT, constraint=Constraint(regex="[a-f]{12,20}")),
    )
    result = decoder.generate(prompt, constrained)
    assert result.token_ids == plain.generate(prompt, constrained).token_ids and result.stats.num_draft_tokens
    text = plain.generate(prompt, SamplingParams(max_tokens=COUNT, ignore_eos=True)).token_ids
    predicted = SamplingParams(max_tokens=COUNT, ignore_eos=True, prediction=[*text[:9], 5, *text[10:]])
    assert decoder.generate(prompt, predicted).token_ids == text


@pytest.mark.slow
def test_a_batch_drafts_what_each_row_drafts_alone(tmp_path: Path) -> None:
    """Rows that enter, leave and move to other slots keep their features and their cached rows of the head."""
    head = write_head(tmp_path, target())
    decoder = decoder_of(head, reproducible=True)
    texts = prompts([3, 17, 9, 40, 5, 30])
    params = [SamplingParams(max_tokens=8 + 5 * i, ignore_eos=True) for i in range(len(texts))]
    for prompt, result in zip(texts, decoder.generate(texts, params), strict=True):
        text = [*prompt, *result.token_ids]
        for round in result.rounds:
            if round.draft:
                draft = list(round.draft)
                assert draft == transcribed(head, target(), text[: round.start], len(draft))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 99}, "its vocab_size is 99, that of"),
        ({"hidden_size": 48}, "its target_hidden_size is 48, that of"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, "reads layers [1, 2, 9] of its target"),
        ({"speculators_model_type": "eagle"}, "is of type 'eagle'; allowed: 'assistant', 'dflash', 'dflash2', "),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'; allowed: 'silu'"),
        ({"num_hidden_layers": 2}, "tensor 'layers.1.self_attn.q_proj.weight' is missing; allowed: [32, 32]"),
        ({"rope_scaling": {"rope_type": "dynamic"}}, "rope_type='dynamic'; allowed: 'default', 'linear', 'llama3'"),
        ({"rope_scaling": {"rope_type": "linear"}}, "rope_type='linear' without what it needs: "),
        ({"intermediate_size": None}, "config.json has no intermediate_size; allowed: a whole number"),
        ({"num_hidden_layers": 10**30}, f"has num_hidden_layers={10**30}; allowed: a whole number from 1 to 1000"),
        ({"rope_theta": "x"}, "has rope_theta='x'; allowed: a number from 1 to "),
        ({"rope_theta": 10**30}, f"has rope_theta={10**30}; allowed: a number from 1 to "),
        ({"rope_scaling": "linear"}, "has rope_scaling='linear'; allowed: an object"),
        ({"rope_parameters": 1.5}, "has rope_parameters=1.5; allowed: an object"),
        ({"layer_types": 1}, "has layer_types=1; allowed: 'sliding_attention' or 'full_attention' for each of"),
        ({"layer_types": [[]]}, "has layer_types=[[]]; allowed: 'sliding_attention' or 'full_attention' for each of"),
        ({"rms_norm_eps": 0}, "has rms_norm_eps=0; allowed: a number above 0"),
        ({"rms_norm_eps": "1e-6"}, "has rms_norm_eps='1e-6'; allowed: a number above 0"),
        ({"intermediate_size": 41}, "tensor 'layers.0.mlp.gate_proj.weight' is [40, 32]; allowed: [41, 32]"),
        ({"partial_rotary_factor": 0.25}, "has partial_rotary_factor=0.25; allowed: 1"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "has partial_rotary_factor=0.25; allowed: 1"),
        ({"attention_mode": "mla"}, "has attention_mode='mla'; allowed: 'gqa', 'mha'"),
        ({"hidden_activation": "gelu_pytorch_tanh"}, "has hidden_activation='gelu_pytorch_tanh'; allowed: 'silu'"),
        ({"use_last_layernorm": False}, "has use_last_layernorm=False; allowed: True"),
        ({"use_mtp_layernorm": True}, "has use_mtp_layernorm=True; allowed: False"),
        ({"use_aux_hidden_state": False}, "has use_aux_hidden_state=False; allowed: True"),
        ({"parallel_draft_step": 2}, "has parallel_draft_step=2; allowed: 0, 1"),
        *(
            ({name: value}, f"has {name}={value!r}, which is unknown and may change what it computes; allowed: ")
            for name, value in [
                ("logit_scale", 0.25),
                ("embedding_multiplier", 12.0),
                ("query_pre_attn_scalar", 256),
                ("rope_interleave", True),
                ("use_parallel_residual", True),
                ("norm_after_fc", True),
                ("attn_logit_softcapping", 50.0),
            ]
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_in_one_line(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    head = write_head(tmp_path, target())
    settings = json.loads((head.folder / "config.json").read_text())
    for name, value in change.items():
        (settings if name in settings else settings["transformer_layer_config"])[name] = value
    (head.folder / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SlipstreamError) as raised:
        decoder_of(head)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("layout", ["speculators", "official"])
def test_settings_that_change_no_computation_are_ignored(tmp_path: Path, layout: str) -> None:
    notes = {
        **{"bos_token_id": 1, "pad_token_id": None, "tie_word_embeddings": False, "initializer_range": 0.02},
        **{
            "attention_dropout": 0.0,
            "attention_mode": "gqa",
            "auto_map": {"AutoModel": "eagle3.Head"},
            "dtype": "float32",
        },
        **{"pretraining_tp": 1, "max_window_layers": 28, "use_cache": True, "transformers_version": "4.57.1"},
        **{"_attn_implementation_autoset": True, "attn_implementation": "flash_attention_2", "rope_interleaved": False},
        **{"residual_multiplier": 1.0, "logit_scale": None, "clip_qkv": None, "partial_rotary_factor": 1.0},
        **{
            "max_grad_norm": 0.5,
            "loss_scale": 2.0,
            "rope_scaling": None,
            "qk_rope_head_dim": 64,
            "layer_norm_eps": 1e-5,
        },
    }
    flags = {
        **{"use_aux_hidden_state": True, "use_last_layernorm": True, "use_input_layernorm_in_first_layer": True},
        **{"use_mtp_layernorm": False, "next_layer_regular": True, "parallel_draft_step": 1, "has_lm_head": True},
        **{"embed_requires_grad": False, "num_eagle_features": 3, "trained": {"steps": 100, "norm": "x"}},
    }
    plain = write_head(tmp_path / "plain", target(), layout=layout)
    with_notes = write_head(tmp_path / "noted", target(), layout=layout, layer=notes, **flags)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    drafts = [
        [round.draft for round in decoder_of(head).generate(prompts([9])[0], params).rounds]
        for head in (plain, with_notes)
    ]
    assert drafts[0] == drafts[1] and any(drafts[0])


def test_missing_and_damaged_tensors_are_named(tmp_path: Path) -> None:
    head = write_head(tmp_path, target())
    file = head.folder / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name != "fc.weight"}, file)
    with pytest.raises(SlipstreamError, match=r"tensor 'fc.weight' is missing; allowed: \[32, 96\]"):
        decoder_of(head)
    for name, kind, allowed in (
        ("fc.weight", torch.int8, "bfloat16"),
        ("fc.weight", torch.float8_e4m3fn, "bfloat16"),
        ("lm_head.weight", torch.complex64, "bfloat16"),
        ("layers.0.self_attn.q_proj.weight", torch.int64, "bfloat16"),
        ("d2t", torch.float32, "int32, int64"),
    ):
        save_file(tensors | {name: tensors[name].to(kind)}, file)
        dtype_name = str(kind).removeprefix("torch.")
        with pytest.raises(SlipstreamError, match=rf"{name}'? is of type {dtype_name}; allowed: {allowed}"):
            decoder_of(head)
    file.write_bytes(b"not a file of tensors")
    with pytest.raises(SlipstreamError, match=r"model\.safetensors could not be read"):
        decoder_of(head)
    file.unlink()
    for content in ([1], {"fc.weight": 5}, {5: torch.zeros(1)}):
        torch.save(content, head.folder / "pytorch_model.bin")
        with pytest.raises(SlipstreamError, match="could not be read: it holds something other than tensors by name"):
            decoder_of(head)
    (head.folder / "pytorch_model.bin").unlink()
    with pytest.raises(SlipstreamError, match="has no weights"):
        decoder_of(head)


def test_a_head_as_the_target_is_refused_as_such_and_an_unknown_model_is_not(tmp_path: Path) -> None:
    head = write_head(tmp_path, target())
    with pytest.raises(UsageError, match=r"is a draft head; allowed: its target, with the head as draft$"):
        SpeculativeDecoder(str(head.folder))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text('{"model_type": "unheard-of"}')
    with pytest.raises(SlipstreamError, match="unheard-of"):
        SpeculativeDecoder(str(tmp_path / "other"))


def test_a_whole_number_is_a_valid_eps(tmp_path: Path) -> None:
    head = write_head(tmp_path, target())
    settings = json.loads((head.folder / "config.json").read_text())
    settings["transformer_layer_config"]["rms_norm_eps"] = 1
    (head.folder / "config.json").write_text(json.dumps(settings))
    assert decoder_of(head).generate([1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids


def test_a_target_without_hidden_states_is_refused(tmp_path: Path) -> None:
    head = write_head(tmp_path, target())
    with pytest.raises(SlipstreamError, match="whose hidden states cannot be read"):
        SpeculativeDecoder("toy", str(head.folder), drafter="model")


def test_weights_stored_in_8_bits_are_read(tmp_path: Path) -> None:
    head = write_head(tmp_path, target())
    file = head.folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name, tensor in tensors.items() if tensor.dim() == 2]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 127
        tensors |= {name: (tensors[name] / scale).round().to(torch.int8), f"{name}_scale": scale}
    save_file(tensors, file)
    rounded = {
        name: tensor.float() * tensors[f"{name}_scale"] if f"{name}_scale" in tensors else tensor
        for name, tensor in tensors.items()
    }
    exact = replace(head, tensors={name: tensor for name, tensor in rounded.items() if not name.endswith("_scale")})
    pairs = drafts(head, prompts([17])[0])
    agreeing = sum(draft == transcribed(exact, target(), text, len(draft)) for text, draft in pairs)
    assert agreeing > 0.7 * len(pairs)  # the loaded weights are rounded to bfloat16


@pytest.mark.smollm2
def test_the_embedded_models_head_drafts_free_text_and_changes_none() -> None:
    decoder = loaded().using()
    assert decoder.draft is not None and decoder.draft.name == "smollm2_head"
    assert (embedded_head() / "config.json").is_file()
    plain = decoder.using("none")
    for options in ({}, {"temperature": 0.5, "seed": 3}):
        params = SamplingParams(max_tokens=32, **options)
        prompt = "Explain step by step how photosynthesis works."
        result = decoder.using("model", num_draft_tokens=3).generate(prompt, params)
        assert result.token_ids == plain.generate(prompt, params).token_ids
        assert result.stats.num_output_tokens > 1.3 * result.stats.num_rounds


@pytest.mark.exhaustive
@pytest.mark.smollm2
def test_the_embedded_head_drafts_for_every_drafter_that_takes_a_draft_model_and_none_refuses_it() -> None:
    decoder = SpeculativeDecoder("smollm2", drafter="hybrid", num_draft_tokens=3)
    assert decoder.draft is not None and draft_name(Models(), decoder) == "smollm2_head"
    decoder = SpeculativeDecoder("smollm2", "none")
    assert decoder.draft is None and decoder.drafter_name == "suffix"
    assert draft_name(Models(draft="none"), decoder) is None
    named = loaded().with_draft("smollm2_head")
    assert named.draft is not None and named.draft.name == "smollm2_head" and named.with_draft("none").draft is None


@pytest.mark.parametrize(("draft", "names"), [(None, "smollm2"), ("none", "smollm2"), ("toy:2", "smollm2 and toy:2")])
def test_the_line_about_loading_names_the_draft_model_if_there_is_one(
    draft: str | None, names: str, capsys: pytest.CaptureFixture[str]
) -> None:
    announce_loading(Models(draft=draft))
    assert capsys.readouterr().err.strip() == f"loading {names} ..."


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, True),
        ({"drafter": "model"}, True),
        ({"drafter": "suffix"}, False),
        ({"device": "cuda"}, False),
        ({"load_options": {"tp_plan": "auto"}}, False),
    ],
)
def test_records_name_the_embedded_head_before_a_model_is_loaded(settings: dict[str, Any], expected: bool) -> None:
    config = DecoderConfig(**{"device": "cpu"} | settings)
    assert draft_before_loading(Models(), config) == ("smollm2_head" if expected else None)
    assert draft_before_loading(Models(target="toy"), config) is None
    assert draft_before_loading(Models(draft="toy:2"), config) == "toy:2"
    assert draft_before_loading(Models(draft="none"), config) is None


@pytest.mark.smollm2
def test_compare_with_transformers_runs_with_the_embedded_head() -> None:
    decoder = loaded().using()
    (comparison,) = compare(decoder, ["What is rain?"], SamplingParams(max_tokens=8), with_hf=True)
    assert set(comparison.runs) == {"plain", "speculative", "hf generate"}


@pytest.mark.smollm2
def test_a_head_drafts_as_well_for_texts_cached_by_a_plain_decoder() -> None:
    decoder = loaded().using("model", num_draft_tokens=3)
    prompt, params = (
        "Tell me in a few sentences how a sailing boat moves against the wind.",
        SamplingParams(max_tokens=24),
    )
    decoder.forget()
    decoder.using("none").generate(prompt, params)
    after_plain = decoder.generate(prompt, params)
    decoder.forget()
    assert after_plain.stats.accepted_per_position == decoder.generate(prompt, params).stats.accepted_per_position


@pytest.mark.smollm2
def test_prompts_cached_before_a_head_was_added_are_read_again() -> None:
    prompt, params = "List the planets from the sun outwards, with one fact about each.", SamplingParams(max_tokens=24)
    bare = SpeculativeDecoder(loaded().target.name, drafter="none")
    bare.generate(prompt, params)
    decoder = bare.with_draft(str(embedded_head())).using("model", num_draft_tokens=3)
    with_cache = decoder.generate(prompt, params)
    decoder.forget()
    assert with_cache.stats.accepted_per_position == decoder.generate(prompt, params).stats.accepted_per_position


class ReadsHiddenStates:
    """Drafts nothing, and records the hidden states of the target that it can read in each round."""

    def __init__(self, session: Session) -> None:
        self.session, self.read = session, list[Tensor]()
        session.backend.keep_hidden_states([1])  # type: ignore[attr-defined]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        base = self.session.slot_states[0].base
        states = self.session.backend.hidden_states([1], 0, 0, base)  # type: ignore[attr-defined]
        self.read.append(torch.empty(0) if states is None else states.clone())
        return Draft.empty(len(rows), sampler.device)


def test_a_users_drafter_can_read_hidden_states_beside_a_loaded_head(tmp_path: Path) -> None:
    decoder = decoder_of(write_head(tmp_path, target()))
    decoder.using("none").generate(prompts([9])[0][::-1], SamplingParams(max_tokens=2))
    drafter = ReadsHiddenStates(decoder._target_session)
    result = decoder.using(drafter, num_draft_tokens=1).generate(prompts([9])[0], SamplingParams(max_tokens=5))
    tokens = torch.tensor([prompts([9])[0] + result.token_ids])
    expected = target()(tokens, output_hidden_states=True).hidden_states[1][0]
    # a first round may have nothing to read, and the last token needs no draft
    assert [len(states) for states in drafter.read][-3:] == [9, 10, 11]
    for states in drafter.read[-3:]:
        torch.testing.assert_close(states.float(), expected[: len(states)].float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["models/x.gguf", "./models.gguf", "models/x"])
def test_the_path_of_a_gguf_file_is_no_hub_id(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write_model(tmp_path / name)
    assert head_files(name, LoadOptions()) is None and trained_kind(name) is None
    assert not (tmp_path / "cache").exists()  # converting it to look at its configuration would take minutes
