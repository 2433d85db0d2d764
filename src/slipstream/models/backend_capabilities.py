"""Optional capabilities of backends that the core itself does not use.

A backend may be able to run some of its layers only, to compute every token as if it were alone, to take a different
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
    """Optional capability: a backend that can run with some of its layers only.

    num_layers: how many there are to choose from.
    """

    num_layers: int

    def weights_digest(self) -> str:
        """A digest of the weights, which identifies the model."""

    def layer_subset(self, layers: Sequence[int]) -> Backend:
        """A backend of these layers, numbered from 0, ascending, on the same KV cache with the same attended lengths.

        Raises `UsageError` where the model's layers are not found, or have states that cannot be shared.
        """


@runtime_checkable
class LayerKinds(LayerSubsets, Protocol):
    """Optional capability: a backend that knows which of its layers are alike."""

    def layer_kinds(self) -> Sequence[Hashable]:
        """One value per layer: layers of the same value run the same operators on tensors of the same sizes."""

    def separate_subset(self, layers: Sequence[int]) -> Backend:
        """As `layer_subset`, on a cache of its own. Raises `UsageError` where the model's layers are not found."""


@runtime_checkable
class ShapeIndependent(Protocol):
    """Optional capability of a backend: the shape of a forward changes no bit of a token's results.

    The shape is the number of tokens, how many rows they belong to, and how much of the KV cache attention reads.
    shape_independent: whether the kernels that run this model here guarantee that by the order of their sums.
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
class HiddenStates(Protocol):
    """Optional capability: a backend that keeps hidden states beside the KV cache, for draft heads.

    They are slot-addressed as keys and values are: written by every forward, copied and moved with them.
    """

    num_layers: int

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        """From now on, keep what enters these decoder layers: for layer i, transformers' `hidden_states[i]`.

        layers: numbered from 0, ascending; `num_layers` stands for what leaves the last layer, before the final norm.
        Raises `UsageError` where the model's layers are not found.
        """

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor | None:
        """[stop - start, layers * hidden size] of layers that are kept, side by side; None before the first forward.

        Positions written before `keep_hidden_states`, and those beyond what is cached, have arbitrary values.
        """


@runtime_checkable
class ParallelDrafts(Protocol):
    """Optional capability: a backend that fills in whole blocks, the newest token and mask tokens after it.

    block_size: tokens in every block. first_place: the place in the block whose logits are those of the draft's first
    token: 1 if a place has the logits of its own token, 0 if it has those of the token after it.
    """

    mask_token: int
    block_size: int
    first_place: int

    def chained(self, scores: Tensor, newest: Sequence[int], draft: Tensor) -> Tensor:
        """Logits [B, 1, V] of the token that follows each draft [B, K], now that the draft is known.

        scores: [B, 1, V] the logits of that token's place in the block scored last. newest: each row's token before
        its draft.
        """

    def acceptance(self, newest: Sequence[int], draft: Tensor) -> Tensor | None:
        """[B] the probability that the next token is accepted if the draft is; None if the head has no estimate."""


@dataclass(frozen=True)
class RowSegment:
    """One row's part of a forward over several rows: `count` tokens, written to `slot` from position `start` on."""

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
        """One forward of tokens [T]: the segments' tokens one after the other; any further ones continue the last.

        widths: for rounds, whose segments are of consecutive slots: the numbers of columns, ascending, in which
        attention may compute a row's tokens; empty for any number. None for prompts, each of which attends as if alone.
        Returns logits [T, V], or [C, V] of the given columns [C].
        """
