"""An output layer restricted to some tokens computes the logits of the whole layer for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from slipstream.models.cpu.packed_linear import CompressedLinear, PackedLinear, compressed_or_packed
from slipstream.models.cpu.quantized_linear import QuantizedLinear, quantized
from slipstream.models.draft_vocabulary import RestrictedHead, restricted_head
from tests.support.markers import needs_kernels

FIRST, OUTPUTS, INPUTS = 32, 96, 64
OTHERS = torch.tensor([95, 40, 33, 64])

Convert = Callable[[nn.Linear], nn.Module]
KINDS: dict[str, Convert | None] = {
    "plain": None,
    "packed": PackedLinear,
    "compressed": compressed_or_packed,
    "int8": lambda linear: quantized(linear, "int8"),
    "int4": lambda linear: quantized(linear, "int4"),
}


def layer(biased: bool = False) -> nn.Linear:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(INPUTS, OUTPUTS, bias=biased, dtype=torch.bfloat16).requires_grad_(False)


def head_of_kind(kind: str, biased: bool = False) -> RestrictedHead:
    linear, convert = layer(biased), KINDS[kind]
    return restricted_head(linear if convert is None else convert(linear), linear, FIRST, convert)


def inputs(tokens: int) -> Tensor:
    return torch.randn(1, tokens, INPUTS, generator=torch.Generator().manual_seed(5)).bfloat16()


@pytest.mark.pairwise
@pytest.mark.parametrize("biased", [False, True], ids=["bare", "biased"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 20])
@torch.inference_mode()
def test_restricted_logits_are_those_of_the_whole_layer(kind: str, tokens: int, biased: bool) -> None:
    head, x = head_of_kind(kind, biased), inputs(tokens)
    whole = head(x)
    with head.only(head.chosen(OTHERS)):
        part = head(x)
    assert whole.shape[-1] == OUTPUTS and part.shape == (1, tokens, FIRST + len(OTHERS))
    expected = whole[..., [*range(FIRST), *OTHERS.tolist()]].float()
    assert (part.float() - expected).abs().max() <= 0.02 * expected.abs().max()
    assert (
        part[..., :FIRST].float() - expected[..., -FIRST:]
    ).abs().max() > 0.1  # negative control: logits of other tokens differ


@torch.inference_mode()
def test_a_failure_ends_the_restriction() -> None:
    head, x = head_of_kind("plain"), inputs(1)
    with pytest.raises(RuntimeError), head.only(head.chosen(OTHERS)):
        head(inputs(1)[..., 1:])
    assert torch.equal(head(x), head.complete(x))


@needs_kernels
@torch.inference_mode()
def test_a_restricted_kernel_shares_the_weights_of_the_whole_one() -> None:
    for kind, kernel in (("int4", QuantizedLinear), ("int8", QuantizedLinear), ("compressed", CompressedLinear)):
        head = head_of_kind(kind)
        assert isinstance(head.complete, kernel) and isinstance(head.first, kernel)
        assert head.first.weights.data == head.complete.weights.data
        assert (head.first.out_features, head.complete.out_features) == (FIRST, OUTPUTS)
