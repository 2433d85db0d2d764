"""Optional capabilities of backends that the core itself does not use.

A backend may be able to run only some of its layers, to compute every token as if it were alone, to take a different
number of tokens from each row, to keep hidden states, to fill in blocks of mask tokens, or to free its KV cache.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from slipstream.core.interfaces import Backend


@runtime_checkable
class LayerSubsets(Protocol):
    """Optional capability: a backend that can run with only some of its `num_layers` layers."""

    num_layers: int

    def weights_digest(self) -> str:
        """A digest of the weights, which identifies the model."""

    def layer_subset(self, layers: Sequence[int]) -> Backend:
        """A backend of these layers (from 0, ascending), on the same KV cache with the same attended lengths.

        Raises `UsageError` if the model's layers are not found, or have states that cannot be shared.
        """


@runtime_checkable
class LayerKinds(LayerSubsets, Protocol):
    """Optional capability: a backend that knows which of its layers are alike."""

    def layer_kinds(self) -> Sequence[Hashable]:
        """One value per layer: layers of the same value run the same operators on tensors of the same sizes."""

    def separate_subset(self, layers: Sequence[int]) -> Backend:
        """`layer_subset` on its own cache. Raises `UsageError` if the model's layers are not found."""


@runtime_checkable
class ShapeIndependent(Protocol):
    """Optional capability of a backend: the shape of a forward changes no bit of a token's results.

    The shape is the number of tokens, the number of rows, and how much of the KV cache attention reads.
    shape_independent: whether the kernels that run this model guarantee this by their order of summation.
    """

    shape_independent: bool


def is_shape_independent(backend: Backend) -> bool:
    """True if a backend declares that the shape of a forward changes no bit of its results."""
    return isinstance(backend, ShapeIndependent) and backend.shape_independent


@runtime_checkable
class Releasing(Protocol):
    """Optional capability of a backend: it can free the KV cache that trials of a loaded model leave behind."""

    def release(self) -> None:
        """Free the cache's memory; what was written is lost."""


@runtime_checkable
class PreparedForwards(Protocol):
    """Optional capability of a backend: it can do at load what the first forwards of each shape would wait for."""

    def prepare(self, rows: int) -> None:
        """Prepare forwards of up to `rows` rows; what is cached is lost."""


@runtime_checkable
class HiddenStates(Protocol):
    """Optional capability: a backend that keeps hidden states next to the KV cache, for draft heads.

    Like keys and values they are addressed by slot: every forward writes them, and they are copied and moved together.
    """

    num_layers: int

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        """From now on, keep the inputs of these decoder layers: for layer i, transformers' `hidden_states[i]`.

        layers: numbered from 0, ascending; `num_layers` means the last layer's output, before the final norm. Raises
        `UsageError` if the model's layers are not found.
        """

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor | None:
        """[stop - start, layers * hidden size] of kept layers, side by side; None before the first forward.

        Values are arbitrary at positions written before `keep_hidden_states`, and beyond what is cached.
        """


@runtime_checkable
class ParallelDrafts(Protocol):
    """Optional capability: a backend that fills in blocks: the newest token, then mask tokens."""

    mask_token: int
    block_size: int  # tokens in every block
    first_place: int  # the index in the block that predicts the draft's first token: 1 in place, 0 one token ahead

    def chained(self, scores: Tensor, newest: Sequence[int], draft: Tensor) -> Tensor:
        """Logits [B, 1, V] of the token that follows each draft [B, K], now that the draft is known.

        scores: [B, 1, V], that token's logits in the block scored last. newest: each row's token before its draft.
        """

    def acceptance(self, newest: Sequence[int], draft: Tensor) -> Tensor | None:
        """[B], the probability that the next token is accepted if the draft is; None if the head has no estimate."""


@dataclass(frozen=True)
class RowSegment:
    """One row's tokens in a forward over several rows: `count` tokens, written to `slot` from position `start` on."""

    slot: int
    start: int
    count: int


@runtime_checkable
class RaggedForwards(Protocol):
    """Optional capability of a backend: forwards that take a different number of tokens from each row.

    ragged: whether this model can run them.
    """

    ragged: bool

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """One forward of tokens [T], the segments end to end; extra tokens continue the last segment.

        widths: for rounds, whose segments are in consecutive slots, the numbers of columns, ascending, in which
        attention may compute a row's tokens; empty allows any number. None for prompts, each of which attends as if
        alone. Returns logits [T, V], or [C, V] if `columns` [C] are given.
        """
