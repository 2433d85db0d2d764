"""4-bit products of our own against the products of the rounded weights."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cpu.quantised_linear import FewLinear, Int4Linear, QuantisedLinear, _few

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs a C compiler and a processor with AVX2")


def parts(outputs: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, steps and the weight they stand for, float32."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, 32 * groups), generator=generator, dtype=torch.uint8)
    steps = torch.randn(outputs, groups, 2, generator=generator).bfloat16().float()
    weight = codes.view(outputs, groups, 32) * steps[..., :1] + steps[..., 1:]
    return codes, steps, weight.flatten(1)


@settings(max_examples=25)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 70), st.booleans())
def test_products_are_those_of_the_rounded_weights(outputs: int, groups: int, count: int, biased: bool) -> None:
    codes, steps, weight = parts(outputs, groups, outputs)
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, 32 * groups, generator=generator).bfloat16()
    bias = torch.randn(outputs, generator=generator).bfloat16() if biased else None
    expected = x.float() @ weight.T + (0 if bias is None else bias.float())
    found = Int4Linear(codes, steps, bias, kernels())(x)
    size = (
        x.float().abs() @ weight.T.abs() + expected.abs()
    )  # of what rounding, also of activations to 8 bits, is a share
    assert ((found.float() - expected).abs() / size).max() <= 0.01


def test_every_code_group_and_output_has_its_place() -> None:
    codes, steps, weight = parts(80, 3, seed=7)
    found = Int4Linear(codes, steps, None, kernels())(torch.eye(96).bfloat16()).T
    assert torch.allclose(found.float(), weight, rtol=1 / 128, atol=1e-3)
    assert len(set(weight.flatten().tolist())) > 1000  # the places differ


@pytest.mark.parametrize("size", [0.0, 1e-39, 1e-36, 1e30])
def test_activations_of_any_size_are_multiplied(size: float) -> None:
    codes, steps, weight = parts(48, 2, seed=3)
    x = torch.full((3, 64), size, dtype=torch.float32).bfloat16()
    found, expected = Int4Linear(codes, steps, None, kernels())(x).float(), x.float() @ weight.T
    assert torch.isfinite(found).all()
    assert ((found - expected).abs() <= 0.02 * (x.float() @ weight.T.abs()) + 1e-26).all()


def test_four_bits_of_bfloat16_are_multiplied_by_our_own_kernel() -> None:
    linear = torch.nn.Linear(64, 32).bfloat16()
    assert type(_few(linear, "int4")) is Int4Linear
    assert type(_few(linear, "int8")) is type(_few(linear.float(), "int4")) is FewLinear


def test_both_kernels_hold_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = torch.nn.Linear(128, 64).bfloat16()
    own = QuantisedLinear(linear, "int4")
    monkeypatch.setattr("slipstream.models.cpu.quantised_linear.kernels", lambda: None)
    other = QuantisedLinear(linear, "int4")
    x = torch.randn(3, 128).bfloat16()
    with torch.inference_mode():
        difference = (own(x).float() - other(x).float()).abs().max()
        assert type(other.few) is FewLinear and difference <= 0.02 * other(x).float().abs().max()
