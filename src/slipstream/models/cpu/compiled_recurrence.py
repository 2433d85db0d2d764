"""Recurrent layers between their projections, computed by `csrc/recurrence.c`; the specification is `advance`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.kernel_libraries import address, kernels
from slipstream.models.cpu.structs import (
    LANES,
    MAX_HEAD_SIZE,
    MAX_STATE,
    MAX_TAPS,
    MixerStruct,
    RecurrenceStruct,
    SegmentStruct,
)
from slipstream.models.decoder.recurrence import Heads, LayerMemory, Projection, Recurrence, Segment, advance
from slipstream.models.notices import warn_slower

TRIED, CLOSE = 5, {torch.float32: 1e-4, torch.bfloat16: 0.05}  # tokens in a trial; largest relative difference allowed
NO_HEADS = (None, None, None), (0, 0, 0, 0, 0, 0, 0), (0, 0)


class CompiledRecurrence:
    """A recurrent layer that the kernel computes; called like `advance`, without its first argument."""

    def __init__(self, recurrence: Recurrence, library: Any) -> None:
        """recurrence: one for which `unsupported` returns None."""
        self._advance, self._outputs = library.advance_states, recurrence.outputs
        self._dtype, self._tensors = recurrence.dtype, [recurrence.weight.t().contiguous(), recurrence.bias]
        tensors, sizes, traits = NO_HEADS if recurrence.heads is None else _of_heads(recurrence.heads)
        self._tensors += [*tensors]  # kept, since the struct has only their addresses
        self._struct = RecurrenceStruct(
            *map(address, self._tensors),
            recurrence.channels,
            recurrence.taps,
            recurrence.inputs,
            *sizes,
            0,
            *traits,
            recurrence.dtype == torch.float32,
            0.0 if recurrence.heads is None else recurrence.heads.least_step,
        )

    def __call__(self, memory: LayerMemory, segments: Sequence[Segment], x: Tensor) -> Tensor:
        """Inputs [B, W, inputs] -> outputs [B, W, outputs], float32."""
        rows = x.contiguous()
        if rows.dtype != self._dtype:
            raise ValueError(f"x: {rows.dtype}; allowed: {self._dtype}")
        out = torch.empty(*rows.shape[:2], self._outputs, dtype=torch.float32)
        self.use(memory)
        tensors = map(address, (rows, memory.inputs, memory.states, out))
        self._advance(ctypes.byref(self._struct), segment_structs(segments), len(segments), *tensors)
        return out

    def use(self, memory: LayerMemory) -> None:
        """Prepare forwards with this memory."""
        self._struct.ring = memory.inputs.shape[1]

    def mixer(self, projection: Projection, places: Tensor | None) -> ctypes.Structure:
        """The struct of the layer's mixer, valid as long as this object.

        places: [groups of outputs], the index to which each group is written; None: in order.
        """
        weight, eps = projection.norm or (None, 0.0)
        weight = None if weight is None else weight.contiguous()
        self._tensors += [weight, places]
        return MixerStruct(
            ctypes.addressof(self._struct),
            address(weight),
            address(places),
            projection.channels,
            -1 if projection.factors is None else projection.factors,
            projection.gates,
            projection.rest,
            projection.group,
            eps,
            projection.gates_first,
        )


def segment_structs(segments: Sequence[Segment]) -> Any:
    """An array of the segments' structs."""
    structs = (SegmentStruct(s.slot, s.start, s.count, s.known, s.keep) for s in segments)
    return (SegmentStruct * len(segments))(*structs)


def compiled_recurrence(recurrence: Recurrence) -> CompiledRecurrence | None:
    """The compiled recurrence on the CPU; None, with a warning, if it is unsupported or its results differ."""
    library = kernels()
    if library is None:
        return None
    reason = unsupported(recurrence)
    if reason is None:
        compiled = CompiledRecurrence(recurrence, library)
        if agrees(recurrence, compiled):
            return compiled
        reason = "the compiled kernel gives different results"
    warn_slower(f"recurrent layers are computed by PyTorch: {reason}")
    return None


def unsupported(recurrence: Recurrence) -> str | None:
    """The reason the kernel cannot compute a layer; None if it can."""
    heads = recurrence.heads
    sizes = {"channels": recurrence.channels}
    if heads is not None:
        sizes |= {"numbers in a key": heads.key_size, "numbers in a value": heads.value_size}
    odd = next((name for name, size in sizes.items() if size % LANES), None)
    if recurrence.dtype not in CLOSE:
        return f"the weights are {str(recurrence.dtype).removeprefix('torch.')}"
    if odd is not None:
        return f"{sizes[odd]} {odd}, not a multiple of {LANES}"
    if recurrence.taps > MAX_TAPS:
        return f"the convolution sees {recurrence.taps} tokens; at most {MAX_TAPS}"
    if heads is not None and max(heads.key_size, heads.value_size) > MAX_HEAD_SIZE:
        return f"{max(heads.key_size, heads.value_size)} numbers in a head; at most {MAX_HEAD_SIZE}"
    if heads is not None and heads.key_size * heads.value_size > MAX_STATE:
        return f"{heads.key_size * heads.value_size} numbers in a head's state; at most {MAX_STATE}"
    return None


def agrees(recurrence: Recurrence, compiled: CompiledRecurrence) -> bool:
    """True if both give the same outputs and states, apart from rounding. NaN never agrees, not even with NaN."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 2 * TRIED, recurrence.inputs, generator=generator).to(recurrence.dtype)
    results = []
    for compute in (lambda *inputs: advance(recurrence, *inputs), compiled):
        memory = LayerMemory(recurrence)
        memory.resize(1, 4 * TRIED, [])
        first, second = Segment(0, 0, TRIED, 0, 2), Segment(0, TRIED - 1, TRIED, 2, TRIED)
        parts = [compute(memory, [first], x[:, :TRIED]), compute(memory, [second], x[:, TRIED:]), memory.states]
        results.append(torch.cat([part.flatten() for part in parts]))
    error = (results[0] - results[1]).abs().max()
    return bool(error <= CLOSE[recurrence.dtype] * results[0].abs().max())


def _of_heads(heads: Heads) -> tuple[tuple[Tensor, Tensor, Tensor | None], tuple[int, ...], tuple[bool, bool]]:
    tensors = heads.rate.contiguous(), heads.shift.contiguous(), heads.skip
    sizes = heads.count, heads.key_count, heads.key_size, heads.value_size, heads.queries, heads.keys, heads.values
    return tensors, sizes, (heads.corrects, heads.normalized)
