"""What some backends can do besides forwards: run with a part of their layers, or compute every token as if it were
alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, runtime_checkable

from slipstream.core.interfaces import Backend
from slipstream.errors import UsageError


@runtime_checkable
class LayerSubsets(Protocol):
    """Optional capability: a backend that can run with some of its layers only.

    num_layers: how many there are to choose from.
    """

    num_layers: int

    def weights_digest(self) -> str:
        """A name that no other model has: a digest of the weights."""

    def layer_subset(self, layers: Sequence[int]) -> Backend:
        """A backend of these layers, numbered from 0, ascending, on the same KV cache with the same attended lengths.

        Raises `UsageError` where the model's layers cannot be told, or have states that cannot be shared.
        """


@runtime_checkable
class LayerKinds(LayerSubsets, Protocol):
    """Optional capability: a backend that knows which of its layers are alike."""

    def layer_kinds(self) -> Sequence[Hashable]:
        """One value per layer: layers of the same value run the same operators on tensors of the same sizes."""

    def separate_subset(self, layers: Sequence[int]) -> Backend:
        """As `layer_subset`, on a cache of its own. Raises `UsageError` where the model's layers cannot be told."""


def num_layers(backend: Backend) -> int:
    """How many layers there are to choose from; for the toy, how many lengths of context it mixes."""
    return _layered(backend).num_layers


def identity(backend: Backend) -> str:
    """A name that no other model has: a digest of the weights."""
    return _layered(backend).weights_digest()


def layer_subset(backend: Backend, layers: Sequence[int]) -> Backend:
    """A backend of the given layers of a model; see `LayerSubsets.layer_subset`."""
    check_layers(layers, num_layers(backend))
    return _layered(backend).layer_subset(layers)


def _layered(backend: Backend) -> LayerSubsets:
    if not isinstance(backend, LayerSubsets):
        raise UsageError(
            f"drafter='layer_skip': {type(backend).__name__} cannot run with some of its layers; allowed: models whose "
            "KV cache is written by position, toy, or another drafter"
        )
    return backend


def check_layers(layers: Sequence[int], count: int) -> None:
    """Refuse layers that a model of `count` layers does not have, or not in this order."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
        raise UsageError(f"layers {list(layers)}; allowed: at least one of 0 to {count - 1}, each once, ascending")


@runtime_checkable
class ShapeIndependent(Protocol):
    """Optional capability of a backend: the shape of a forward changes no bit of a token's results.

    The shape is the number of tokens, how many rows they belong to, and how much of the KV cache attention reads.
    shape_independent: whether the kernels that run this model here guarantee that by the order of their sums.
    """

    shape_independent: bool


def is_shape_independent(backend: Backend) -> bool:
    """Whether a backend says that the shape of a forward changes no bit."""
    return isinstance(backend, ShapeIndependent) and backend.shape_independent
