"""Heads as each trainer writes them are recognized and read alike; others are refused by name.

The layouts are those of SafeAILab/EAGLE, SpecForge, ModelOpt, AngelSlim, vLLM, SGLang, DeepSpec and z-lab/dflash.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slipstream import SlipstreamError, SpeculativeDecoder
from slipstream.models.cpu.quantized_linear import QuantizedLinear
from slipstream.models.heads import head_tensors as reader
from slipstream.models.heads.head_files import head_files, trained_kind
from slipstream.models.loaded import LoadOptions
from tests.models.heads.test_recorded_heads import RECORDED, TARGET, Steps, agreeing
from tests.support.draft_steps import pair_of, same_logits, step_logits
from tests.support.eagle1_cases import transcribed, write_eagle1
from tests.support.head_cases import write_head
from tests.support.tiny_models import fresh, prompts, tokenizer

Tensors = dict[str, Tensor]
MIDDLE = {r"layers\.0\.": "midlayer."}  # names of SafeAILab, SpecForge and AngelSlim
# names of ModelOpt's Megatron export of several layers
DEEP = {r"layers\.([1-9])\.input_layernorm": r"midlayer.\1.hidden_norm", r"layers\.(\d)\.": r"midlayer.\1."}
NO_PREFIX = {r"^markov_head\.": "", r"^confidence_head\.proj": "confidence_proj"}
IDS = "eagle_aux_hidden_state_layer_ids"
OUTPUTS = {"eagle_config": {IDS: [-1, 0, 1]}}  # the recorded heads' layers by what leaves them
SPARK = {"mask_token_id": 2, "target_layer_ids": [0, 1]}
MARKOV = {"markov_rank": 6, "markov_head_type": "vanilla"}
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def ranked(tensors: Tensors) -> Tensors:
    """The draft vocabulary by frequency, as ModelOpt calibrates it, without t2d."""
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
    ids = (tensors["d2t"] + torch.arange(len(order)))[order]
    changes = {"d2t": (ids - torch.arange(len(order))).int(), "lm_head.weight": tensors["lm_head.weight"][order]}
    return {name: tensor for name, tensor in tensors.items() if name != "t2d"} | changes


def targets(tensors: Tensors) -> Tensors:
    """With the target's embedding and output layer, as DeepSpec stores them."""
    target = load_file(RECORDED / "target" / "model.safetensors")
    return {"embed_tokens.weight": target["model.embed_tokens.weight"], "lm_head.weight": target["lm_head.weight"]} | (
        tensors
    )


@dataclass(frozen=True)
class Layout:
    """How a trainer writes a recorded head."""

    head: str
    settings: Mapping[str, Any]
    renamed: Mapping[str, str] = field(default_factory=dict)
    changed: Callable[[Tensors], Tensors] = dict
    without: Collection[str] = ()
    is_binary: bool = False

    def write(self, folder: Path) -> Path:
        recorded = json.loads((RECORDED / self.head / "config.json").read_text())
        copied = {name: recorded[name] for name in ("draft_vocab_size", "fc_norm", "block_size") if name in recorded}
        settings = recorded["transformer_layer_config"] | copied | self.settings
        tensors = {}
        for name, tensor in self.changed(load_file(RECORDED / self.head / "model.safetensors")).items():
            for pattern, replacement in self.renamed.items():
                name = re.sub(pattern, replacement, name)
            if name not in self.without:
                tensors[name] = tensor.contiguous()
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(settings))
        if self.is_binary:
            torch.save(tensors, folder / "pytorch_model.bin")
        else:
            save_file(tensors, folder / "model.safetensors")
        return folder


def named(architecture: str | None, **settings: Any) -> dict[str, Any]:
    return {} | ({"architectures": [architecture]} if architecture else {"architectures": None}) | settings


LAYOUTS = {
    # the recorded layers are those that the official code reads of a target of three layers
    "SafeAILab": Layout("eagle3_qwen3", named("LlamaForCausalLM"), MIDDLE, is_binary=True),
    "SafeAILab's Vicuna": Layout("eagle3_qwen3", named("LlamaForCausalLM", num_hidden_layers=40), MIDDLE),
    "no architecture": Layout("eagle3_qwen3", named(None, eagle_config=None), MIDDLE),
    "no size of a draft vocabulary": Layout("eagle3_qwen3", named("LlamaForCausalLM", draft_vocab_size=None), MIDDLE),
    "AngelSlim": Layout("eagle3_qwen3", named("Eagle3LlamaForCausalLM", tie_word_embeddings=True), MIDDLE),
    "vLLM": Layout("eagle3_qwen3", named("Eagle3LlamaForCausalLM"), {"^": "model."}),
    "SpecForge": Layout(
        "eagle3_qwen3", named("LlamaForCausalLMEagle3") | OUTPUTS, MIDDLE, without=["embed_tokens.weight"]
    ),
    "SpecForge's Qwen2.5-VL": Layout(
        "eagle3_qwen3",
        named("LlamaForCausalLMEagle3", rope_scaling={"type": "mrope", "mrope_section": [1, 1]}, rope_parameters=None),
        MIDDLE,
    ),
    "ModelOpt": Layout("eagle3", named("LlamaForCausalLMEagle3", eagle_config={IDS: []}), changed=ranked),
    "ModelOpt's Megatron": Layout(
        "eagle3_qwen3", named("LlamaForCausalLMEagle3", eagle_config={IDS: [1, -1, 0], "use_aux_hidden_state": True})
    ),
    "ModelOpt's Megatron, 2 layers": Layout("eagle3", named("LlamaForCausalLMEagle3Deep") | OUTPUTS, DEEP),
    "speculators, not ascending": Layout(
        "eagle3_qwen3", named("Eagle3Speculator", **{IDS: [2, 0, 1]}, speculators_model_type="eagle3")
    ),
    "speculators, none listed": Layout(
        "eagle3_qwen3", named("Eagle3Speculator", **{IDS: []}, speculators_model_type="eagle3")
    ),
    "DeepSpec": Layout("eagle3_qwen3", named("Qwen3Eagle3Model", target_layer_ids=[-1, 0, 1]), changed=targets),
    "SpecForge's P-EAGLE": Layout("peagle", named("PEagleDraftModel", mask_token_id=2) | OUTPUTS),
    "vLLM's P-EAGLE": Layout("peagle", named("LlamaForCausalLMEagle3", pard_token=2) | OUTPUTS, MIDDLE),
    "DFlash 2": Layout(
        "dflash2",
        named(
            "DFlash2DraftModel",
            dflash_config=SPARK
            | {"conv_kernel_size": 3, "conv_group_size": 4, "selector_rank": 6, "selector_top_k": 7},
        ),
    ),
    "SpecForge's DSpark": Layout(
        "dspark", named("DSparkDraftModel", dflash_config=SPARK | MARKOV | CONFIDENCE | {"projector_type": "dspark"})
    ),
    "SpecForge's DSpark for SGLang": Layout(
        "dspark",
        named("Qwen3DSparkModel", dflash_config=SPARK | MARKOV | {"projector_type": "dspark"}) | MARKOV | CONFIDENCE,
    ),
    "DeepSpec's DSpark": Layout("dspark", named("Qwen3DSparkModel") | SPARK | MARKOV, changed=targets),
    "ModelOpt's DSpark": Layout(
        "dspark",
        named(
            "DFlashDraftModel",
            dflash_config=SPARK
            | MARKOV
            | {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True},
        ),
        NO_PREFIX,
    ),
    "ModelOpt's gated DSpark": Layout(
        "dspark_gated",
        named(
            "DFlashDraftModel",
            dflash_config=SPARK | MARKOV | {"markov_head_type": "gated", "projector_type": "dspark"},
        ),
        NO_PREFIX,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("writer", LAYOUTS)
def test_every_writers_layout_drafts_what_was_recorded(tmp_path: Path, writer: str) -> None:
    layout = LAYOUTS[writer]
    assert all(agreeing(layout.write(tmp_path), Steps.of(layout.head)))


@pytest.mark.parametrize(
    ("writer", "settings"),
    [
        ("ModelOpt's Megatron", OUTPUTS["eagle_config"] | {IDS: [0, 0, 1]}),
        ("ModelOpt's Megatron, 2 layers", OUTPUTS["eagle_config"] | {IDS: [0, 0, 1]}),
    ],
)
def test_other_layers_are_noticed(tmp_path: Path, writer: str, settings: dict[str, Any]) -> None:
    layout = LAYOUTS[writer]
    folder = layout.write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eagle_config": settings}))
    assert not any(agreeing(folder, Steps.of(layout.head)))


@pytest.mark.parametrize(
    "changes",
    [
        {"draft_vocab_size": 37},
        {"architectures": ["EagleLlamaForCausalLM"], "bias": None},
        {"architectures": None, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_eagle_1_stays_eagle_1_whatever_it_is_called(tmp_path: Path, changes: dict[str, Any]) -> None:
    model = fresh("llama", num_hidden_layers=3)
    head = write_eagle1(tmp_path, model, bias=False if "bias" in changes else None)
    settings = json.loads((tmp_path / "config.json").read_text())
    settings.pop("bias", None)
    (tmp_path / "config.json").write_text(json.dumps(settings | {k: v for k, v in changes.items() if k != "bias"}))
    tensors = load_file(tmp_path / "model.safetensors") | {"lm_head.weight": model.lm_head.weight.detach().clone()}
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    assert trained_kind(str(tmp_path)) == "eagle1"
    text = prompts([17])[0]
    assert all(same_logits(step_logits(pair_of(model, tmp_path), text, 3), transcribed(head, model, text, 3)))


KINDS: list[tuple[dict[str, Any], str, str]] = [
    ({"architectures": ["DominoDraftModel"]}, "fc.weight", "domino"),
    ({"dflash_config": {"projector_type": "domino"}, "architectures": ["DFlashDraftModel"]}, "fc.weight", "domino"),
    ({}, "prefix_gru.weight_ih_l0", "domino"),
    ({"architectures": ["QwenDFlareDraftModel"]}, "hidden_norm.weight", "dflare"),
    ({}, "layer_fusion_weights", "dflare"),
    ({"architectures": ["Eagle3DeepseekV2ForCausalLM"]}, "layers.0.hidden_norm.weight", "Eagle3 of DeepSeek"),
    ({"architectures": ["Gemma4DSparkModel"]}, "fc.weight", "DSpark of Gemma 4"),
    ({"architectures": ["MedusaModel"], "model_type": "medusa"}, "fc.weight", "medusa"),
    ({"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2}, "fc.weight", "medusa"),
    ({"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "hydra_num_heads": 4}, "fc.weight", "hydra"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"]}, "fc.weight", "mlp_speculator"),
]


@pytest.mark.parametrize(("settings", "tensor", "kind"), KINDS)
def test_unsupported_kinds_of_heads_are_refused_by_name(
    tmp_path: Path, settings: dict[str, Any], tensor: str, kind: str
) -> None:
    save_file({tensor: torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(settings))
    with pytest.raises(SlipstreamError, match=f"is of type '{kind}'; allowed: 'assistant', 'dflash', 'dflash2', "):
        pair_of(TARGET, tmp_path)


def test_models_and_names_that_only_sound_like_heads_are_no_heads(tmp_path: Path) -> None:
    fresh("llama", num_hidden_layers=1).save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "config.json").read_text())
    for architectures in (["LlamaForCausalLM"], ["Eagle3_VLForConditionalGeneration"], ["EagleChatModel"], None, [3]):
        (tmp_path / "config.json").write_text(json.dumps(settings | {"architectures": architectures}))
        assert head_files(str(tmp_path), LoadOptions()) is None


def head_with(folder: Path, changed: Callable[[Tensors], Tensors], **settings: Any) -> Path:
    """A random EAGLE-3 head with other tensors."""
    write_head(folder, fresh("llama", num_hidden_layers=5), layout="official")
    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: tensor.contiguous() for name, tensor in changed(load_file(file)).items()}, file)
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    return folder


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_scales(shape: tuple[int, ...], kind: torch.dtype = torch.float8_e4m3fn) -> Callable[[Tensors], Tensors]:
    """fc in 8 bits with scales of this shape, and one of activations, as ModelOpt exports it."""
    scales = {"fc.weight_scale": torch.full(shape, 0.5), "fc.input_scale": torch.tensor(0.1)}
    return lambda tensors: tensors | {"fc.weight": tensors["fc.weight"].to(kind)} | scales


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            without("d2t", "t2d"),
            "scores 37 of 61 tokens, and has no tensor 'd2t', which says which they are; allowed: ",
        ),
        (without("d2t", "t2d", "lm_head.weight"), "scores 37 of 61 tokens, and has no tensor 'd2t', which says which"),
        (lambda t: t | {"d2t": t["d2t"] * 0 - torch.arange(37)}, "d2t names 1 tokens for 37 scores, from 0 to 0; "),
        (lambda t: t | {"d2t": t["d2t"] - 30}, "; allowed: a token for each, from 0 to 60"),
        (lambda t: t | {"t2d": ~t["t2d"] | (torch.arange(61) < 13)}, ""),  # not as many tokens: says nothing of d2t
        (lambda t: t | {"t2d": torch.arange(61) < 37}, "d2t names other tokens than t2d; allowed: the same"),
        (lambda t: t | {"t2d": torch.ones(37, dtype=torch.bool)}, ""),  # nor is it read
        (
            lambda t: t | {"midlayer.mlp.up_proj.weight": t["midlayer.mlp.up_proj.weight"].to(torch.float8_e5m2)},
            "tensor 'layers.0.mlp.up_proj.weight' is of type float8_e5m2; allowed: bfloat16",
        ),
        (
            with_scales((3, 5)),
            "tensor 'fc.weight' of float8_e4m3fn [32, 96] has scales of float32 [3, 5]; allowed: 8-bit",
        ),
        (with_scales((32, 3)), "tensor 'fc.weight' of float8_e4m3fn [32, 96] has scales of float32 [32, 3]; allowed: "),
        (with_scales((), torch.float32), "tensor 'fc.weight' of float32 [32, 96] has scales of float32 []; allowed: "),
    ],
    ids=range(11),
)
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, changed: Callable[[Tensors], Tensors], message: str) -> None:
    folder = head_with(tmp_path, changed)
    if not message:
        pair_of(fresh("llama", num_hidden_layers=5), folder)
        return
    with pytest.raises(SlipstreamError) as raised:
        pair_of(fresh("llama", num_hidden_layers=5), folder)
    assert message in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("shape", [(), (1,), (32,), (32, 1)], ids=str)
def test_scales_of_tensors_and_of_outputs_are_applied(tmp_path: Path, shape: tuple[int, ...]) -> None:
    model, text = fresh("llama", num_hidden_layers=5), prompts([17])[0]
    folder = head_with(tmp_path / "8", with_scales(shape))
    plain = head_with(
        tmp_path / "16",
        lambda t: (
            {n: x if n in ("d2t", "t2d") else x.bfloat16() for n, x in t.items()}
            | {"fc.weight": (t["fc.weight"].to(torch.float8_e4m3fn).float() / 2).bfloat16()}
        ),
    )
    logits = (step_logits(pair_of(model, head), text, 2) for head in (folder, plain))
    assert all(torch.equal(a, b) for a, b in zip(*logits, strict=True))


@pytest.mark.parametrize("is_restricted", [False, True])
def test_a_head_without_an_output_layer_uses_the_targets(tmp_path: Path, is_restricted: bool) -> None:
    model, text = fresh("llama", num_hidden_layers=5), prompts([17])[0]
    ids = torch.arange(0, 61, 2) if is_restricted else torch.arange(61)
    d2t = {"d2t": ids - torch.arange(len(ids))} if is_restricted else {}

    def changed(tensors: Tensors) -> Tensors:
        return without("d2t", "t2d", "lm_head.weight")(tensors) | d2t

    size = {"draft_vocab_size": len(ids)}
    bare = head_with(tmp_path / "bare", changed, **size)
    rows = {"lm_head.weight": model.lm_head.weight.detach()[ids]}
    whole = head_with(tmp_path / "whole", lambda tensors: changed(tensors) | rows, **size)
    logits = [step_logits(pair_of(model, folder), text, 2) for folder in (bare, whole)]
    assert all(same_logits([a[ids]], [b[ids]])[0] for a, b in zip(*logits, strict=True))


@pytest.mark.parametrize(
    ("draft_dtype", "dtype", "is_quantized"),
    [
        ("auto", torch.bfloat16, True),
        ("bfloat16", torch.bfloat16, False),
        ("float32", torch.float32, False),
        ("int8", torch.bfloat16, True),
    ],
)
def test_the_user_chooses_the_precision_of_a_head(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_dtype: str, dtype: torch.dtype, is_quantized: bool
) -> None:
    monkeypatch.setattr(reader, "SMALLEST", 1)

    def in_bfloat16(tensors: Tensors) -> Tensors:
        return {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}

    folder, options = head_with(tmp_path, in_bfloat16), {"drafter": "model", "reproducible": False}
    decoder = SpeculativeDecoder(
        fresh("llama", num_hidden_layers=5), str(folder), tokenizer=tokenizer(), draft_dtype=draft_dtype, **options
    )
    network = decoder.draft.backend.network
    assert network.dtype == dtype and isinstance(network.weights.fc, QuantizedLinear) == is_quantized
    assert decoder.generate(prompts([9])[0], max_tokens=4, ignore_eos=True).stats.num_draft_tokens
    if draft_dtype == "int8":
        assert network.weights.fc.part.block.name.startswith("Q8")


def test_bits_without_kernels_for_them_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = head_with(tmp_path, dict)
    monkeypatch.setattr(reader, "kernels", lambda: None)
    with pytest.raises(SlipstreamError, match=r"draft_dtype='int4', but draft head .* own kernels are not available"):
        SpeculativeDecoder(fresh("llama", num_hidden_layers=5), str(folder), draft_dtype="int4", drafter="model")
