"""Quantized draft models: their products are right, the target is never quantized, and no text changes."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.models.cpu.block_linear import BlockLinear, BlockPart
from slipstream.models.cpu.kernel_libraries import block_kernels, kernels
from slipstream.models.cpu.packed_linear import CompressedLinear, PackedLinear, pack
from slipstream.models.cpu.quantized_linear import (
    BITS,
    FORMATS,
    QuantizedLinear,
    quantized,
    rounded,
    rows_of_blocks,
)
from slipstream.models.hf.backend import HFBackend
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from tests.support.markers import needs_kernels
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import fresh, prompts, reference, shared

pytestmark = needs_kernels
PROMPT = prompts([9])[0]
WIDER = {"hidden_size": 64, "intermediate_size": 96}


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def specification(layer: nn.Linear, bits: str) -> BlockLinear:
    """The same quantized weights in a layer that computes in float32."""
    rows = rows_of_blocks(layer.weight, BITS[bits])
    block, shape = FORMATS[BITS[bits]], (layer.out_features, layer.in_features)
    part = BlockPart(block, shape, lambda first, last: rows[first:last].copy(), block_kernels())
    return BlockLinear([part], layer.bias, "int8")


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("outputs", [1, 48, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_in_float32_rounded_once(bits: str, outputs: int, bias: bool) -> None:
    layer = linear(outputs, 288, bias=bias)
    quantized_layer = QuantizedLinear(layer, bits, kernels())
    for tokens in (1, 2, 5, 8, 9, 30, 70):
        x = torch.randn(2, tokens, 288).bfloat16()
        expected = specification(layer, bits)(x.float())
        assert quantized_layer(x).dtype == torch.bfloat16 and torch.equal(quantized_layer(x), expected.bfloat16())
        assert torch.equal(quantized_layer(x)[1, -1], quantized_layer(x[1, -1]))
    assert not torch.equal(quantized_layer(x).float(), expected)  # the layer rounds to bfloat16


@pytest.mark.parametrize("bits", BITS)
def test_rows_returns_the_quantized_weights(bits: str) -> None:
    layer = linear(80, 96)
    outputs = torch.tensor([0, 5, 17, 31, 32, 79, 63, 5])
    values = rounded(layer.weight.float(), BITS[bits]).values()
    assert torch.equal(QuantizedLinear(layer, bits, kernels()).rows(outputs), values[outputs].bfloat16())
    assert not torch.equal(values.bfloat16(), layer.weight)


@pytest.mark.parametrize("size", [0.0, 1e-39, 1e-36, 1e30])
def test_activations_of_any_size_are_multiplied(size: float) -> None:
    layer = linear(48, 64, bias=False)
    x = torch.full((3, 64), size, dtype=torch.float32).bfloat16()
    product, expected = QuantizedLinear(layer, "int4", kernels())(x).float(), x.float() @ layer.weight.float().T
    assert torch.isfinite(product).all()
    assert ((product - expected).abs() <= 0.1 * (x.float() @ layer.weight.float().abs().T) + 1e-26).all()


def test_layers_of_float32_keep_their_type() -> None:
    layer, x = linear(64, 96, torch.float32), torch.randn(3, 96)
    product, expected = QuantizedLinear(layer, "int8", kernels())(x), layer(x)
    assert product.dtype == torch.float32 and (product - expected).abs().max() <= 0.02 * expected.abs().max()


def test_layers_of_other_shapes_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama", dtype=torch.bfloat16)  # 48 inputs are not a multiple of 32
    pack(model, partial(quantized, bits="int4"))
    kinds = {name.rpartition(".")[2]: type(module) for name, module in model.named_modules()}
    assert kinds["q_proj"] is kinds["lm_head"] is QuantizedLinear and kinds["down_proj"] is CompressedLinear
    monkeypatch.setattr("slipstream.models.cpu.quantized_linear.kernels", lambda: None)
    assert type(quantized(linear(48, 96, torch.float32), "int4")) is PackedLinear


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("bits", ["int4", "int8"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_a_quantized_draft_changes_no_token(name: str, bits: str, temperature: float) -> None:
    target, draft = shared(name), fresh(name, **WIDER) if name == "llama" else fresh(name)
    decoder = SpeculativeDecoder(target, draft, draft_dtype=bits, acceptance="match", num_draft_tokens=3)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24)
    results = drafted_as_plain(decoder, [PROMPT, PROMPT[:4]], params)
    assert any(type(m) is QuantizedLinear for m in decoder.draft.backend.model.modules())
    assert not any(type(m) is QuantizedLinear for m in draft.modules())
    assert decoder.draft is not None and isinstance(decoder.draft.backend, HFBackend)  # rounding is no other attention
    assert all(r.stats.num_draft_tokens > 0 for r in results)
    if temperature == 0:
        assert results[0].token_ids == reference(target, PROMPT, 24)


def test_the_times_of_a_draft_model_are_kept_by_its_precision(tmp_path: Path) -> None:
    shared("llama").save_pretrained(tmp_path)
    fingerprints = {
        SpeculativeDecoder(shared("llama"), str(tmp_path), draft_dtype=dtype).draft.fingerprint
        for dtype in ("int4", "int8", "bfloat16", "float32")
    }
    assert len(fingerprints) == 4


@pytest.mark.slow
def test_a_target_of_the_same_folder_keeps_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.layer_replacement.SMALLEST", 0)
    shared("llama").save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), str(tmp_path), reproducible=False)
    assert decoder.draft is not None
    models = decoder.target.model, decoder.draft.model
    counts = [sum(type(module) is QuantizedLinear for module in model.modules()) for model in models]
    assert counts[0] == 0 and counts[1] > 0  # "auto" quantizes the draft alone
    assert decoder.generate(PROMPT, SamplingParams(max_tokens=12)).token_ids == reference(shared("llama"), PROMPT, 12)


def test_without_kernels_auto_packs_and_an_explicit_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.layer_replacement.SMALLEST", 0)
    monkeypatch.setattr("slipstream.models.layer_replacement.kernels", lambda: None)
    shared("llama").save_pretrained(tmp_path)
    loaded = load(str(tmp_path), LoadOptions(quantize="auto"))
    kinds = {type(module) for module in loaded.model.modules()}
    assert PackedLinear in kinds and QuantizedLinear not in kinds
    with pytest.raises(UsageError, match=r"draft_dtype='int8', .* own kernels are not available; allowed: "):
        load(str(tmp_path), LoadOptions(quantize="int8"))


@pytest.mark.parametrize("fast", [False, "auto"])
def test_auto_quantizes_neither_small_models_nor_unpacked_ones(tmp_path: Path, fast: bool | str) -> None:
    shared("llama").save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), str(tmp_path), fast=fast, reproducible=False)
    assert decoder.draft is not None and decoder.draft.packed == (fast == "auto")
    assert not any(type(m) is QuantizedLinear for m in decoder.draft.backend.model.modules())


def test_the_draft_model_can_have_another_dtype_than_the_target(tmp_path: Path) -> None:
    shared("llama").save_pretrained(tmp_path)
    options = {"dtype": "float32", "draft_dtype": "bfloat16", "reproducible": False}
    decoder = SpeculativeDecoder(str(tmp_path), str(tmp_path), **options)
    assert decoder.draft is not None
    assert (decoder.target.model.dtype, decoder.draft.model.dtype) == (torch.float32, torch.bfloat16)


def test_impossible_draft_dtypes_are_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"draft_dtype='int4', but there is no draft model; allowed: auto$"):
        SpeculativeDecoder("toy", draft_dtype="int4")
    with pytest.raises(UsageError, match=r"draft_dtype='int4', but the toy model has no weights; allowed: auto$"):
        SpeculativeDecoder("toy", "toy:2", draft_dtype="int4")
    with pytest.raises(UsageError, match=r"draft_dtype='float16'.*allowed: auto, int4, int8$"):
        SpeculativeDecoder(shared("llama"), fresh("llama"), draft_dtype="float16")
    with pytest.raises(UsageError, match=r"draft_dtype='int3'; allowed: auto, int4, int8, bfloat16"):
        SpeculativeDecoder("toy", "toy:2", draft_dtype="int3")
    narrow = fresh("llama", hidden_size=48, intermediate_size=48, num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(
        UsageError, match=r"cannot be quantized: no linear layer has a multiple of 32 inputs; allowed: 'auto'$"
    ):
        SpeculativeDecoder(shared("llama"), narrow, draft_dtype="int8")
