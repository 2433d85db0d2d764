"""Random recurrent layers, and readings of a row in forwards of any widths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.models.decoder.recurrence import Advance, Heads, Recurrence, RecurrentStates

KINDS = ("delta rule", "shared keys", "state space", "convolution")


def make_recurrence(kind: str, dtype: torch.dtype, size: int = 16) -> Recurrence:
    """A layer of four heads of this size; a convolution has no heads."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    if kind == "convolution":
        return Recurrence(random(2 * size, 3), None, None, dtype)
    corrects, shared = kind != "state space", 4 if kind == "delta rule" else 2
    keys, values = shared * size, 4 * 2 * size
    heads = Heads(
        4,
        shared,
        size,
        2 * size,
        *(0, keys, 2 * keys),
        corrects=corrects,
        normalized=corrects,
        rate=-random(4).abs(),
        shift=random(4),
        skip=None if corrects else random(4),
        least_step=0.0 if corrects else 0.3,
    )
    bias = None if corrects else random(2 * keys + values)
    return Recurrence(random(2 * keys + values, 4) / 2, bias, heads, dtype)


def make_inputs(recurrence: Recurrence, rows: int, length: int) -> Tensor:
    """[rows, length, inputs]"""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(rows, length, recurrence.inputs, generator=generator).to(recurrence.dtype)


def make_states(recurrence: Recurrence, compiled: Advance | None = None, slots: int = 3) -> RecurrentStates:
    """The states of a model of this one layer."""
    states = RecurrentStates({0: (recurrence, compiled)})
    states.reserve(slots)
    return states


def feed(
    states: RecurrentStates, x: Tensor, start: int, count: int, slot: int = 0, settled: int | None = None
) -> Tensor:
    """Outputs [count, outputs] of a row's inputs x [length, inputs] from `start` on."""
    if settled is not None:
        states.mark_final(slot, settled)
    states.begin(slot, [start], count)
    outputs = states.run(0, x[None, start : start + count])
    states.end()
    return outputs[0]


def read(states: RecurrentStates, x: Tensor, counts: Sequence[int], slot: int = 0) -> Tensor:
    """All outputs of a row that is read in forwards of these numbers of tokens."""
    parts, position = [], 0
    for count in counts:
        parts.append(feed(states, x, position, count, slot))
        position += count
    return torch.cat(parts)
