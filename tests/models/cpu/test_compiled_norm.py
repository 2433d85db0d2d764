"""Norms of draft heads by the kernels equal PyTorch's up to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import rms_norm

from slipstream.models.cpu.compiled_norm import compiled_norm
from tests.models.heads.test_compiled_layer import network
from tests.support.markers import needs_kernels

pytestmark = needs_kernels


def numbers(*shape: int, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))).bfloat16()


@pytest.mark.parametrize("shape", [(96,), (1, 1, 96), (2, 5, 64), (0, 32)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_norm_equals_pytorchs_up_to_the_last_bit(shape: tuple[int, ...], scale: float) -> None:
    x, weight = numbers(*shape, scale=scale), 1 + numbers(shape[-1], scale=0.1)
    norm = compiled_norm(weight, 1e-5)
    assert norm is not None
    expected = rms_norm(x, x.shape[-1:], weight, 1e-5)
    assert norm(x).shape == x.shape and norm(x).dtype == x.dtype
    torch.testing.assert_close(norm(x), expected, rtol=2**-7, atol=0)
    if x.numel():  # another weight makes a difference, and so does another epsilon unless the numbers are large
        other = compiled_norm(weight.flip(0), 1e-5)
        assert other is not None and not torch.allclose(other(x), expected, rtol=2**-7, atol=0)
        wrong = compiled_norm(weight, 1.0)
        assert wrong is not None and torch.allclose(wrong(x), expected, rtol=2**-7, atol=0) == (scale == 1e3)


def test_rows_that_are_not_contiguous_are_read_in_order() -> None:
    x, weight = numbers(3, 64, 2), numbers(64)
    norm = compiled_norm(weight, 1e-5)
    assert norm is not None and torch.equal(norm(x.mT), norm(x.mT.contiguous()))


def test_other_types_and_sizes_have_no_compiled_norm() -> None:
    assert compiled_norm(torch.ones(64), 1e-5) is None
    assert compiled_norm(numbers(60), 1e-5) is None


def test_a_head_uses_the_compiled_norm_only_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    head = network()
    weight = head.weights.final_norm
    monkeypatch.setattr("slipstream.models.heads.network.compiled_norm", lambda *options: calls.append(options))
    x = numbers(2, len(weight)).requires_grad_()
    head._norm(x, weight).sum().backward()
    assert x.grad is not None and not calls
    with torch.inference_mode():
        head._norm(x.detach(), weight)
    assert len(calls) == 1
