"""The layers that trials of forward shapes run: two of every kind instead of all.

How a forward rounds depends on the kernels that the sizes of its tensors select, and layers of one kind have the same
sizes. A kernel that rounds differently does so in a good part of the thousands of numbers that one layer computes, so
a further layer of the same kind shows nothing that two of them and the head do not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from torch import Tensor

from slipstream.core.interfaces import Backend, Checkpoints, RaggedForwards
from slipstream.errors import UsageError
from slipstream.models.layer_subset import LayerKinds

OF_EACH_KIND = 2


def trial_backend(backend: Backend) -> Backend:
    """The layers to try as a backend, on the same KV cache if they can; the model itself where that saves nothing."""
    if not isinstance(backend, LayerKinds) or backend.device.type != "cpu":  # elsewhere graphs would be captured
        return backend
    try:
        chosen = first_of_each(backend.layer_kinds())
        if len(chosen) == backend.num_layers:
            return backend
        subset = _subset(backend, chosen)
    except UsageError:  # the layers cannot be told
        return backend
    if isinstance(subset, RaggedForwards) and isinstance(backend, RaggedForwards):
        subset.ragged = backend.ragged
    return subset


def _subset(backend: LayerKinds, chosen: Sequence[int]) -> Backend:
    try:
        return backend.layer_subset(chosen)
    except UsageError:  # they have states
        return backend.separate_subset(chosen)


def first_of_each(kinds: Sequence[Hashable]) -> list[int]:
    """The numbers of the first layers of every kind, ascending."""
    seen: Counter[Hashable] = Counter()
    chosen = []
    for layer, kind in enumerate(kinds):
        if seen[kind] < OF_EACH_KIND:
            chosen.append(layer)
        seen[kind] += 1
    return chosen


def read_context(backend: Backend, tokens: Tensor, start: int, end: int, slot: int) -> None:
    """Read tokens from `start` to `end`, from where the next forward begins."""
    if isinstance(backend, Checkpoints):
        backend.settle(slot, end)
    backend.forward(tokens[None, start:end], [start], first_slot=slot, logits=False)


def read_contexts(backend: Backend, tokens: Tensor, ends: Sequence[int], chunk: int) -> None:
    """Read tokens up to ends[i] into slot i: the longest is read in chunks, and copied wherever another slot's ends.

    A copy is made as soon as it is complete: states are known at no earlier position.
    """
    reader, done = ends.index(max(ends)), 0
    for end in sorted(set(ends)):
        for start in range(done, end, chunk):
            read_context(backend, tokens, start, min(start + chunk, end), reader)
        for slot, own in enumerate(ends):
            if own == end and slot != reader:
                backend.copy(reader, slot, end)
        done = end
