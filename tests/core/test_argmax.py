"""The greedy choice is PyTorch's, whatever computes it."""

from __future__ import annotations

import pytest
import torch

from slipstream.core.rng import argmax


@pytest.mark.each_value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(7,), (3, 7), (2, 5, 1000), (0, 7)])
def test_argmax_is_the_first_of_the_largest_scores(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert torch.equal(argmax(scores), scores.argmax(-1)) and argmax(scores).dtype == torch.int64
    coarse = (scores.float() * 2).round().to(dtype)  # many are equal
    first = (coarse == coarse.amax(-1, keepdim=True)).to(torch.int8).argmax(-1)
    assert torch.equal(argmax(coarse), first)


def test_argmax_handles_infinities_nan_and_strided_tensors() -> None:
    all_impossible = torch.full((2, 5), float("-inf"))
    assert argmax(all_impossible).tolist() == [0, 0]
    assert argmax(torch.tensor([1.0, float("nan"), float("inf")])).item() == 1
    table = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)
    assert torch.equal(argmax(table[:, 1::2, :]), table[:, 1::2, :].argmax(-1))
    assert torch.equal(argmax(table.transpose(1, 2)), table.transpose(1, 2).argmax(-1))


def test_argmax_distinguishes_close_double_precision_scores() -> None:
    assert argmax(torch.tensor([1.0, 1.0 + 1e-12], dtype=torch.float64)).item() == 1
