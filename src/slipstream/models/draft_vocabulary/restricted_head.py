"""The output layer of a draft model, computed whole or for some tokens only.

Byte-pair vocabularies are numbered in the order of their merges, so that the first tokens are the frequent ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear as multiply

from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.packed_linear import KernelLinear
from slipstream.models.cpu.quantised_linear import Int4Linear, QuantisedLinear

Rows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ChosenRows:
    """The part of an output layer for some tokens. weight: [N, in]; bias: [N] or None."""

    weight: Tensor
    bias: Tensor | None


class RestrictedHead(nn.Module):
    """An output layer that gives the logits of all tokens or, within `only`, of the first ones and of chosen others.

    The specification of a part is the whole: the same logits, but for rounding where the whole is quantised.
    """

    def __init__(self, whole: Any, first: nn.Module, num_first: int, rows: Rows) -> None:
        """first: the layer of tokens 0 to num_first - 1; rows: the weights [N, in] of tokens [N]."""
        super().__init__()
        self.whole, self.first, self.num_first, self._rows = whole, first, num_first, rows
        self.in_features, self.out_features = whole.in_features, whole.out_features
        self.bias = whole.bias
        self._others: ChosenRows | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features] or, within `only`, [..., num_first + N]."""
        if self._others is None:
            whole: Tensor = self.whole(x)
            return whole
        others = multiply(x, self._others.weight, self._others.bias)
        return torch.cat([self.first(x), others], -1)

    def chosen(self, tokens: Tensor) -> ChosenRows:
        """What `only` needs of these tokens [N]."""
        return ChosenRows(self._rows(tokens), None if self.bias is None else self.bias[tokens])

    @contextmanager
    def only(self, others: ChosenRows) -> Iterator[None]:
        """Inside the block the layer gives the logits of the first tokens, then those of `others`."""
        self._others = others
        try:
            yield
        finally:
            self._others = None


def restricted_head(
    whole: Any, linear: Any, num_first: int, convert: Callable[[nn.Linear], nn.Module] | None
) -> RestrictedHead:
    """The restricted form of an output layer `linear` and of what took its place, `whole`. convert: what made that.

    Weights of the kernels are shared. Elsewhere the first tokens get a layer of their own, and the original weights
    stay for the others; where they are the embeddings' as well that takes no memory.
    """
    few = whole.few if isinstance(whole, QuantisedLinear) else whole
    if isinstance(few, BlockLinear):
        return RestrictedHead(whole, few.first(num_first), num_first, few.rows)
    weight = linear.weight.detach()
    first: nn.Module
    if isinstance(few, KernelLinear):
        first = few.first(num_first)
    else:
        part: Any = nn.Linear(linear.in_features, num_first, linear.bias is not None, device="meta")
        part.weight = nn.Parameter(weight[:num_first], requires_grad=False)
        if linear.bias is not None:
            part.bias = nn.Parameter(linear.bias.detach()[:num_first], requires_grad=False)
        first = part if convert is None else convert(part)
    if isinstance(few, Int4Linear):
        return RestrictedHead(whole, first, num_first, few.rows)
    return RestrictedHead(whole, first, num_first, lambda tokens: weight[tokens])
