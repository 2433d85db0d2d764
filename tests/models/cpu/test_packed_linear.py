"""Packed weights, which are float32 copies of bfloat16 ones where the processor cannot multiply bfloat16."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from slipstream.models.cpu import packed_linear
from slipstream.models.cpu.packed_linear import (
    PackedLinear,
    needs_float32,
    pack,
    unsupported,
)
from tests.support.tiny_models import fresh


def layer(dtype: torch.dtype, bias: bool = True) -> nn.Linear:
    generator = torch.Generator().manual_seed(0)
    linear = nn.Linear(96, 40, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return linear


@pytest.fixture(params=[True, False], ids=["bfloat16 instructions", "none"])
def has_bf16(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether oneDNN pretends to have bfloat16 kernels."""
    monkeypatch.setattr(packed_linear, "_has_bf16", lambda: request.param)
    return bool(request.param)


def test_only_bfloat16_weights_without_instructions_become_float32(has_bf16: bool) -> None:
    assert needs_float32(torch.bfloat16) == (not has_bf16)
    assert not needs_float32(torch.float32)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("width", [1, 4, 33])
def test_float32_copies_give_the_exact_product_rounded_once(
    width: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "_has_bf16", lambda: False)
    linear = layer(torch.bfloat16, bias)
    x = torch.randn(width, 96, generator=torch.Generator().manual_seed(1)).bfloat16()
    with torch.inference_mode():
        product = PackedLinear(linear)(x)
        exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
    assert product.dtype == torch.bfloat16
    assert bool(((product.double() - exact).abs() <= exact.abs() / 256 + 1e-6).all())
    assert not torch.equal(product, torch.zeros_like(product))


def test_float32_copies_that_would_fill_the_memory_are_refused(has_bf16: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = fresh("llama", dtype=torch.bfloat16)
    monkeypatch.setattr(packed_linear, "kernels", lambda: None)
    assert unsupported(model) is None
    monkeypatch.setattr(packed_linear, "memory_bytes", lambda: 1000)
    reason = unsupported(model)
    assert (reason is None) == has_bf16
    assert reason is None or "float32 copies of the weights would take" in reason
    assert unsupported(fresh("llama")) is None  # float32 weights are packed, not copied to another type


def test_slipstreams_kernels_need_neither_copies_nor_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = fresh("llama", dtype=torch.bfloat16), torch.ones(2, 96).bfloat16()
    monkeypatch.setattr(packed_linear, "_has_bf16", lambda: False)
    monkeypatch.setattr(packed_linear, "memory_bytes", lambda: 1000)
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    monkeypatch.setattr(packed_linear, "kernels", lambda: None)
    assert unsupported(model) == "this PyTorch has no oneDNN"
    monkeypatch.setattr(packed_linear, "kernels", object)
    assert unsupported(model) is None and unsupported(fresh("llama")) is not None
    with torch.inference_mode():
        assert torch.equal(PackedLinear(layer(torch.bfloat16, True))(x), layer(torch.bfloat16, True)(x))


def test_a_packed_bfloat16_model_gives_its_own_logits(has_bf16: bool) -> None:
    if has_bf16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("needs a processor with bfloat16 instructions")
    model, ids = fresh("llama", dtype=torch.bfloat16), torch.arange(1, 40)[None]
    with torch.inference_mode():
        expected = model(ids).logits.float()
        pack(model)
        logits = model(ids).logits.float()
    assert (logits - expected).abs().max() <= 0.05 * expected.abs().max()
