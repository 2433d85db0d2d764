"""Decides how much of its vocabulary a draft model scores, and provides the output layer that scores a part of it.

Byte-pair vocabularies are numbered in the order of their merges, so the first tokens are the most frequent ones.
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
from slipstream.models.cpu.packed_linear import KernelLinear
from slipstream.models.cpu.quantized_linear import QuantizedLinear

COMMON = 40_960  # first tokens that "auto" scores
MIN_RATIO = 2  # "auto" restricts vocabularies that are at least this many times as large
MIN_SAVED_SHARE = 0.1  # of the weights that a draft step reads: "auto" restricts only if it saves this much
UNIT = 32  # outputs of a layer come in multiples of this
Rows = Callable[[Tensor], Tensor]
Convert = Callable[[nn.Linear], nn.Module] | None


@dataclass(frozen=True)
class ChosenRows:
    """The rows of an output layer for some tokens. weight: [N, in]; bias: [N] or None."""

    weight: Tensor
    bias: Tensor | None


class RestrictedHead(nn.Module):
    """An output layer for all tokens or, within `only`, for the first tokens and some others.

    Restricted or not, a token's logit is the same, except for rounding if the complete layer is quantized.
    """

    def __init__(self, complete: Any, first: nn.Module, num_first: int, rows: Rows) -> None:
        """first: the layer of tokens 0 to num_first - 1; rows: the weights [N, in] of tokens [N]."""
        super().__init__()
        self.complete, self.first, self.num_first, self._rows = complete, first, num_first, rows
        self.in_features, self.out_features = complete.in_features, complete.out_features
        self.bias = complete.bias
        self._others: ChosenRows | None = None

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features] or, within `only`, [..., num_first + N]."""
        if self._others is None:
            logits: Tensor = self.complete(x)
            return logits
        others = multiply(x, self._others.weight, self._others.bias)
        return torch.cat([self.first(x), others], -1)

    def chosen(self, tokens: Tensor) -> ChosenRows:
        """The rows for these tokens [N], as `only` takes them."""
        return ChosenRows(self._rows(tokens), None if self.bias is None else self.bias[tokens])

    @contextmanager
    def only(self, others: ChosenRows) -> Iterator[None]:
        """Inside the block the layer gives the logits of the first tokens, then those of `others`."""
        self._others = others
        try:
            yield
        finally:
            self._others = None


def restricted_head(complete: Any, linear: Any, num_first: int, convert: Convert) -> RestrictedHead:
    """A layer that scores all tokens or a part of them.

    linear: the original output layer; complete: its replacement; convert: the function that made it. Weights in the
    kernels' format are shared. Otherwise the first tokens get a layer of their own, and the other tokens use the
    original weights, which cost no memory if the embedding shares them.
    """
    if isinstance(complete, BlockLinear | QuantizedLinear):
        return RestrictedHead(complete, complete.first(num_first), num_first, complete.rows)
    weight = linear.weight.detach()
    first: nn.Module
    if isinstance(complete, KernelLinear):
        first = complete.first(num_first)
    else:
        part: Any = nn.Linear(linear.in_features, num_first, linear.bias is not None, device="meta")
        part.weight = nn.Parameter(weight[:num_first], requires_grad=False)
        if linear.bias is not None:
            part.bias = nn.Parameter(linear.bias.detach()[:num_first], requires_grad=False)
        first = part if convert is None else convert(part)
    return RestrictedHead(complete, first, num_first, lambda tokens: weight[tokens])


class Restriction:
    """Decides how many tokens a draft model scores before its layers are replaced, and restricts it afterwards.

    vocabulary: see `DecoderConfig.draft_vocabulary`.
    """

    def __init__(self, model: Any, vocabulary: int | str, convert: Convert) -> None:
        self._model, self._vocabulary, self._convert = model, vocabulary, convert
        self._linear: Any = model.get_output_embeddings() if vocabulary != "full" else None
        self._num_first = self._choose_num_first()

    def _choose_num_first(self) -> int | None:
        """The number of first tokens to score; None for all tokens."""
        linear, vocabulary = self._linear, self._vocabulary
        if vocabulary == "full":
            return None
        is_block = isinstance(linear, BlockLinear)
        if type(linear) is not nn.Linear and not is_block:
            self._refuse(f"its output layer is a {type(linear).__name__}")
            return None
        if vocabulary != "auto":
            size = -(-int(vocabulary) // UNIT) * UNIT
            return size if size < linear.out_features else None
        converted = is_block or (self._convert is not None and linear.weight.device.type == "cpu")
        if not converted or linear.out_features < MIN_RATIO * COMMON:
            return None
        read = sum(block.in_features * block.out_features for block in block_linears(self._model))
        read += sum(module.weight.numel() for module in self._model.modules() if type(module) is nn.Linear)
        return COMMON if (linear.out_features - COMMON) * linear.in_features >= MIN_SAVED_SHARE * read else None

    def _refuse(self, reason: str) -> None:
        """Raise `UsageError` where the user asked for a number of tokens; "auto" accepts any outcome."""
        if self._vocabulary != "auto":
            raise UsageError(
                f"draft_vocabulary={self._vocabulary!r}, but {type(self._model).__name__} cannot be restricted: "
                f"{reason}; allowed: 'auto' or 'full'"
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
        complete = self._model.get_output_embeddings()
        if self._vocabulary == "auto" and not self._takes_no_memory(complete):
            return None  # the original weights would have to be kept
        head = restricted_head(complete, self._linear, self._num_first, self._convert)
        self._model.set_output_embeddings(head)
        return head

    def _takes_no_memory(self, complete: Any) -> bool:
        """True if the original weights of all tokens stay in memory anyway."""
        if isinstance(complete, BlockLinear | QuantizedLinear):
            return True
        tied: bool = self._linear.weight.data_ptr() == self._model.get_input_embeddings().weight.data_ptr()
        return tied
