"""Draft models in few bits: close to what they replace, never the target, and never a change of the text."""

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.models.cpu import quantised_linear as quantised
from slipstream.models.cpu.packed_linear import PackedLinear, pack
from slipstream.models.cpu.processor import parse
from slipstream.models.cpu.quantised_linear import (
    GROUP,
    IntegerLinear,
    QuantisedLinear,
    is_faster,
    multiplies_integers,
    rounded,
)
from slipstream.models.hf.backend import HFBackend
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from tests.support.markers import mostly_slow
from tests.support.tiny_models import fresh, prompts, reference, shared

PROMPT = prompts([9])[0]
WIDER = {"hidden_size": 64, "intermediate_size": 96}


def linear(outputs: int, inputs: int, dtype: torch.dtype = torch.float32, bias: bool = True) -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(inputs, outputs, bias=bias, dtype=dtype).requires_grad_(False)


def seen_weight(layer: QuantisedLinear) -> Tensor:
    """The weight a layer multiplies with, [out, in], read off one input at a time."""
    rows = torch.eye(layer.in_features)
    bias = torch.zeros(()) if layer.bias is None else layer.bias
    return torch.cat([layer(part) - bias for part in rows.split(layer.narrow)]).T


def steps_of(weight: Tensor, bits: str) -> Tensor:
    """How far apart neighbouring quantised values of each weight are."""
    if bits == "int8":
        return (weight.abs().amax(-1, keepdim=True) / 127).expand_as(weight)
    groups = weight.view(len(weight), -1, GROUP)
    return ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(GROUP, dim=-1)


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_every_weight_is_rounded_to_the_nearest_step(bits: str) -> None:
    layer = linear(48, 96)
    error = (seen_weight(QuantisedLinear(layer, bits)) - layer.weight).abs()
    assert bool((error <= 0.501 * steps_of(layer.weight, bits) + 1e-6).all())
    assert bool((error > 0.25 * steps_of(layer.weight, bits)).any())  # it is rounded


@pytest.mark.parametrize("bits", ["int4", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_few_tokens_are_multiplied_with_the_rounded_weight(bits: str, dtype: torch.dtype, bias: bool) -> None:
    layer = linear(64, 96, dtype, bias)
    made = QuantisedLinear(layer, bits)
    exact = linear(64, 96, bias=bias)
    exact.weight.copy_(layer.weight)
    weight = seen_weight(QuantisedLinear(exact, bits))
    for width in (1, 3, made.narrow):
        x = torch.randn(width, 96).to(dtype)
        expected = nn.functional.linear(x.float(), weight, None if layer.bias is None else layer.bias.float())
        tolerance = 1e-4 if dtype is torch.float32 else 0.05
        assert torch.allclose(made(x[None])[0].float(), expected, atol=tolerance * float(expected.abs().max()))


def test_many_tokens_go_through_packed_weights_without_integer_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantised, "multiplies_integers", lambda: False)
    layer = linear(64, 96)
    made = QuantisedLinear(layer, "int4")
    x = torch.randn(made.narrow + 1, 96)
    assert torch.equal(made(x), PackedLinear(layer, 4 * made.narrow)(x))


@pytest.mark.skipif(not multiplies_integers(), reason="needs instructions for products of 8-bit integers (VNNI)")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_integer_products_are_those_of_the_layer_with_both_sides_rounded(dtype: torch.dtype, bias: bool) -> None:
    layer = linear(64, 96, dtype, bias)
    x = torch.randn(5, 96).to(dtype)
    x[2] *= 1000  # every token has a scale of its own
    x[3] = 0
    made = IntegerLinear(layer)(x).float()
    parts = [one.float() for one in (x, layer.weight)]
    steps = [one.abs().amax(-1, keepdim=True).clamp(min=1e-30) / by for one, by in zip(parts, (126, 127), strict=True)]
    steps[0] = steps[0].to(dtype).float()
    rounded = [(one / step).round() * step for one, step in zip(parts, steps, strict=True)]
    expected = nn.functional.linear(*rounded, None if layer.bias is None else layer.bias.float())
    error = (made - expected).abs().amax(-1)
    assert made.dtype is torch.float32 and IntegerLinear(layer)(x).dtype is dtype
    assert bool((error <= (2e-3 if dtype is torch.float32 else 0.02) * expected.abs().amax(-1)).all())


def test_many_tokens_of_a_quantised_layer_are_integer_products_where_those_are_fast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised, "multiplies_integers", lambda: True)
    layer = linear(64, 96)
    made = QuantisedLinear(layer, "int4")
    x = torch.randn(2, made.narrow, 96)
    assert torch.equal(made(x).flatten(0, 1), IntegerLinear(layer)(x.flatten(0, 1)))


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_large_layers_are_quantised_in_parts(bits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer, x = linear(192, 64), torch.randn(2, 64)
    whole = QuantisedLinear(layer, bits)(x)
    monkeypatch.setattr(quantised, "_ROWS", 64)
    assert torch.equal(QuantisedLinear(layer, bits)(x), whole)


def test_a_constant_weight_stays_what_it_is() -> None:
    layer = linear(16, 32, bias=False)
    layer.weight.fill_(0.25)
    layer.weight[0] = 0
    assert torch.allclose(seen_weight(QuantisedLinear(layer, "int4")), layer.weight, atol=1e-6)


def test_layers_of_other_shapes_are_packed() -> None:
    model = fresh("llama")  # 48 inputs and 61 outputs are no multiples
    pack(model, partial(rounded, bits="int4"))
    kinds = {name.rpartition(".")[2]: type(module) for name, module in model.named_modules()}
    assert (
        kinds["q_proj"] is QuantisedLinear and kinds["down_proj"] is PackedLinear and kinds["lm_head"] is PackedLinear
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("bits", mostly_slow(["int4", "int8"], "int8"))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3", "gemma3"], "qwen3"))
def test_a_quantised_draft_changes_no_token(name: str, bits: str, temperature: float) -> None:
    target, draft = shared(name), fresh(name, **WIDER) if name == "llama" else fresh(name)
    decoder = SpeculativeDecoder(target, draft, draft_dtype=bits, acceptance="match", num_draft_tokens=3)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=24)
    results = decoder.generate([PROMPT, PROMPT[:4]], params)
    plain = decoder.using("none").generate([PROMPT, PROMPT[:4]], params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert any(type(m) is QuantisedLinear for m in decoder.draft.backend.model.modules())
    assert not any(type(m) is QuantisedLinear for m in draft.modules())
    assert decoder.draft is not None and isinstance(decoder.draft.backend, HFBackend)  # rounding is no other attention
    assert all(r.stats.num_draft_tokens > 0 for r in results)
    if temperature == 0:
        assert results[0].token_ids == reference(target, PROMPT, 24)


@pytest.mark.slow
def test_a_target_of_the_same_folder_keeps_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.pretrained.SMALLEST", 0)
    monkeypatch.setattr("slipstream.models.pretrained.is_faster", lambda dtype: True)
    shared("llama").save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), str(tmp_path))
    assert decoder.draft is not None
    models = decoder.target.model, decoder.draft.model
    counts = [sum(type(module) is QuantisedLinear for module in model.modules()) for model in models]
    assert counts[0] == 0 and counts[1] > 0  # "auto" quantises the draft alone
    assert decoder.generate(PROMPT, SamplingParams(max_tokens=12)).token_ids == reference(shared("llama"), PROMPT, 12)


@pytest.mark.parametrize("flags", ["fpu avx2", "fpu avx2 avx512f"])
def test_auto_packs_float32_drafts_where_quantised_ones_are_slower(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.models.pretrained.SMALLEST", 0)
    monkeypatch.setattr("slipstream.models.cpu.quantised_linear.processor", lambda: parse(f"flags: {flags}"))
    assert is_faster(torch.bfloat16) and is_faster(torch.float32) == ("avx512f" in flags)
    shared("llama").save_pretrained(tmp_path)
    loaded = load(str(tmp_path), LoadOptions(dtype="float32", quantise="auto"))
    assert any(type(m) is QuantisedLinear for m in loaded.model.modules()) == ("avx512f" in flags)


@pytest.mark.parametrize("fast", [False, "auto"])
def test_auto_leaves_models_that_fit_the_caches_and_plain_weights_alone(tmp_path: Path, fast: bool | str) -> None:
    shared("llama").save_pretrained(tmp_path)
    decoder = SpeculativeDecoder(str(tmp_path), str(tmp_path), fast=fast, reproducible=False)
    assert decoder.draft is not None and decoder.draft.packed == (fast == "auto")
    assert not any(type(m) is QuantisedLinear for m in decoder.draft.backend.model.modules())


def test_a_draft_dtype_of_its_own(tmp_path: Path) -> None:
    shared("llama").save_pretrained(tmp_path)
    options = {"dtype": "float32", "draft_dtype": "bfloat16", "reproducible": False}
    decoder = SpeculativeDecoder(str(tmp_path), str(tmp_path), **options)
    assert decoder.draft is not None
    assert (decoder.target.model.dtype, decoder.draft.model.dtype) == (torch.float32, torch.bfloat16)


def test_what_cannot_be_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"draft_dtype='int4', but there is no draft model; allowed: auto$"):
        SpeculativeDecoder("toy", draft_dtype="int4")
    with pytest.raises(UsageError, match=r"draft_dtype='int4', but the toy model has no weights; allowed: auto$"):
        SpeculativeDecoder("toy", "toy:2", draft_dtype="int4")
    with pytest.raises(UsageError, match=r"draft_dtype='float16'.*allowed: auto, int4, int8$"):
        SpeculativeDecoder(shared("llama"), fresh("llama"), draft_dtype="float16")
    with pytest.raises(UsageError, match=r"draft_dtype='int3'; allowed: auto, int4, int8, bfloat16"):
        SpeculativeDecoder("toy", "toy:2", draft_dtype="int3")
    with pytest.raises(
        UsageError, match=r"GPT2LMHeadModel cannot be quantised: no linear layer has a shape .*; allowed: 'auto'$"
    ):
        SpeculativeDecoder(shared("gpt2"), fresh("gpt2"), draft_dtype="int8")
