"""How much of a draft model's vocabulary is scored, and giving the model an output layer that can do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import BlockLinear, block_linears
from slipstream.models.cpu.quantised_linear import Int4Linear, QuantisedLinear
from slipstream.models.draft_vocabulary.restricted_head import RestrictedHead, restricted_head

COMMON = 40_960  # first tokens that "auto" always scores; the output layers of smaller vocabularies stay whole
FEWER = 2  # "auto" restricts a vocabulary of at least so many times as many tokens,
SHARE = 0.1  # where that leaves out this share of the weights that a draft step reads
UNIT = 32  # outputs of a layer come in multiples of this

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
