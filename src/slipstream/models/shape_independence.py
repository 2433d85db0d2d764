"""Backends whose kernels compute every token as if it were alone."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from slipstream.core.interfaces import Backend


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
