"""How much of its vocabulary a draft model scores, and the output layer that can score a part of it.

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

from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import BlockLinear, block_linears
from slipstream.models.cpu.compressed_linear import KernelLinear
from slipstream.models.cpu.int4_linear import Int4Linear
from slipstream.models.cpu.quantised_linear import QuantisedLinear

COMMON = 40_960  # first tokens that "auto" always scores; the output layers of smaller vocabularies stay whole
FEWER = 2  # "auto" restricts a vocabulary of at least so many times as many tokens,
SHARE = 0.1  # where that leaves out this share of the weights that a draft step reads
UNIT = 32  # outputs of a layer come in multiples of this


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


Convert = Callable[[nn.Linear], nn.Module] | None


class Restriction:
    """What becomes of a draft model's output layer. Made before the model's layers are replaced, applied afterwards.

    wanted: see `DecoderConfig.draft_vocabulary`.
    """

    def __init__(self, model: Any, wanted: int | str, convert: Convert) -> None:
        self._model, self._wanted, self._convert = model, wanted, convert
        self._linear: Any = model.get_output_embeddings() if wanted != "full" else None
        self._num_first = self._chosen()

    def _chosen(self) -> int | None:
        """How many first tokens are scored; None for all."""
        linear, wanted = self._linear, self._wanted
        if wanted == "full":
            return None
        is_block = isinstance(linear, BlockLinear)
        if type(linear) is not nn.Linear and not is_block:
            self._refuse(f"its output layer is a {type(linear).__name__}")
            return None
        if wanted != "auto":
            size = -(-int(wanted) // UNIT) * UNIT
            return size if size < linear.out_features else None
        converted = is_block or (self._convert is not None and linear.weight.device.type == "cpu")
        if not converted or linear.out_features < FEWER * COMMON:
            return None
        read = sum(block.in_features * block.out_features for block in block_linears(self._model))
        read += sum(module.weight.numel() for module in self._model.modules() if type(module) is nn.Linear)
        return COMMON if (linear.out_features - COMMON) * linear.in_features >= SHARE * read else None

    def _refuse(self, reason: str) -> None:
        """Say why what was asked for in numbers cannot be had; "auto" asks for nothing."""
        if self._wanted != "auto":
            raise UsageError(
                f"draft_vocabulary={self._wanted!r}, but {type(self._model).__name__} cannot be restricted: {reason}; "
                "allowed: 'auto' or 'full'"
            )

    def apply(self, *, by_position: bool) -> RestrictedHead | None:
        """Replace the model's output layer; None if it stays whole.

        by_position: the model's forwards are neither captured nor run on caches of its own.
        """
        if self._num_first is None:
            return None
        if not by_position:
            self._refuse("its forwards are captured, or run on caches of its own")
            return None
        whole = self._model.get_output_embeddings()
        if self._wanted == "auto" and not self._takes_no_memory(whole):
            return None  # the original weights would have to be kept
        head = restricted_head(whole, self._linear, self._num_first, self._convert)
        self._model.set_output_embeddings(head)
        return head

    def _takes_no_memory(self, whole: Any) -> bool:
        """Whether the weights of all tokens are there anyway."""
        if isinstance(whole, BlockLinear) or (isinstance(whole, QuantisedLinear) and isinstance(whole.few, Int4Linear)):
            return True
        tied: bool = self._linear.weight.data_ptr() == self._model.get_input_embeddings().weight.data_ptr()
        return tied
