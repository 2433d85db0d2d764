"""Recurrent layers between their projections, computed token by token, and their states, one per slot.

The functions are the specification of `csrc/recurrence.c`. A short causal convolution runs over each channel; then each
head has a state S [key size, value size] that decays and takes in every token: S <- a S + k (b (v - m)), out = S^T q,
all in float32. With m = (a S)^T k this is the gated delta rule (Yang et al. 2024, arXiv:2412.06464, section 3.1), with
m = 0 the state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060, section 3). Every token takes the same operations
in the same order, whatever else the forward computes.

A state cannot be cut back to an earlier position. So `RecurrentStates` keeps, for each row, the state at the last final
position and the inputs of the tokens after it. A forward copies that state, replays the kept inputs up to its own first
token (which costs the recurrence's arithmetic, but no product with weights), and continues from there. Rejected tokens
cost nothing. Copies are also kept at the ends of prompts, for rows that begin with the same prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from slipstream.errors import SlipstreamError

EPSILON = 1e-6  # added under the square root when queries and keys are normalized
RING = 64  # inputs kept at first
PROMPT = 16  # a forward of about this many final tokens or more leaves a copy, since other rows may share the prefix
COPIES = 1 << 30  # bytes, the limit for all copies together


@dataclass(frozen=True)
class Heads:
    """The heads of a recurrence, with a = exp(rate * step) and step = softplus(gate + shift)."""

    count: int
    key_count: int
    key_size: int
    value_size: int
    queries: int  # the convolution's channel at which queries begin
    keys: int
    values: int
    corrects: bool  # subtracts m, as the delta rule does
    normalized: bool  # scales queries and keys to length 1
    rate: Tensor  # [count]
    shift: Tensor  # [count]
    skip: Tensor | None = None  # [count], factors of the values that are added to the output; None: none are added
    least_step: float = 0.0  # the smallest step, without the delta rule

    @property
    def gates(self) -> int:
        """Gates per token: with the delta rule, one per head for b, then one for a; else one per head for both."""
        return self.count * (2 if self.corrects else 1)


@dataclass(frozen=True)
class Recurrence:
    """A convolution and, after SiLU, its heads, if there are any."""

    weight: Tensor  # [C, taps] float32
    bias: Tensor | None  # [C] float32
    heads: Heads | None
    dtype: torch.dtype  # to which the model rounds

    @property
    def channels(self) -> int:
        """Channels of the convolution."""
        return len(self.weight)

    @property
    def taps(self) -> int:
        """How many tokens a channel sees."""
        return self.weight.shape[1]

    @property
    def inputs(self) -> int:
        """Numbers per token: the channels, then the gates."""
        return self.channels + (self.heads.gates if self.heads else 0)

    @property
    def outputs(self) -> int:
        """Numbers per token that a layer returns."""
        return self.heads.count * self.heads.value_size if self.heads else self.channels

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one row's state; empty without heads."""
        return (self.heads.count, self.heads.key_size, self.heads.value_size) if self.heads else (0, 0, 0)


@dataclass(frozen=True)
class Projection:
    """The offsets of a recurrent layer's numbers in its first product, and how its outputs are gated.

    With a norm, outputs are multiplied by the SiLU of their gates, otherwise by the gates themselves.
    """

    channels: int  # offset of the recurrence's channels
    gates: int  # offset of the recurrence's gates
    rest: int  # offset of the gates of the outputs
    factors: int | None = None  # offset of numbers that multiply the channels, if there are any
    norm: tuple[Tensor, float] | None = None  # of the outputs: weight and epsilon
    group: int = 0  # outputs that are normalized together
    gates_first: bool = False  # multiplies by the gates before the norm, not after


@dataclass(frozen=True)
class Segment:
    """One row's tokens in a forward: `count` tokens of `slot` from position `start` on."""

    slot: int
    start: int
    count: int
    known: int  # position of the kept state, at most `start`; the inputs from there to `start` are kept, too
    keep: int  # position of the state that this forward keeps in its place


class LayerMemory:
    """The memory of one layer: states [slots, ...], float32, and the latest inputs [slots, ring, inputs].

    The input at position p is stored at p modulo the ring's length.
    """

    def __init__(self, recurrence: Recurrence) -> None:
        device = recurrence.weight.device
        self.states = torch.zeros(0, *recurrence.state_shape, dtype=torch.float32, device=device)
        self.inputs = torch.zeros(0, 0, recurrence.inputs, dtype=recurrence.dtype, device=device)

    def resize(self, slots: int, ring: int, ends: Sequence[int]) -> None:
        """Hold this many slots and latest inputs. ends: for each existing slot, the position after its last input."""
        states, inputs = self.states, self.inputs
        self.states = states.new_zeros(slots, *states.shape[1:])
        self.states[: len(states)] = states
        self.inputs = inputs.new_zeros(slots, ring, inputs.shape[2])
        for slot, end in enumerate(ends):
            positions = torch.arange(max(0, end - inputs.shape[1]), end)
            self.inputs[slot, positions % ring] = inputs[slot, positions % max(1, inputs.shape[1])]

    def between(self, slot: int, first: int, last: int) -> Tensor:
        """The inputs [last - first, inputs] at positions `first` to `last` - 1; zeros at negative positions."""
        positions = torch.arange(max(0, first), last)
        kept_inputs = self.inputs[slot, positions % self.inputs.shape[1]]
        return torch.cat([kept_inputs.new_zeros(last - first - len(positions), kept_inputs.shape[1]), kept_inputs])

    def write(self, slot: int, first: int, inputs: Tensor) -> None:
        """Keep these inputs, which begin at position `first`, or the latest of them if the ring is shorter."""
        ring = self.inputs.shape[1]
        positions = torch.arange(first, first + len(inputs))[-ring:]
        self.inputs[slot, positions % ring] = inputs[-ring:]


def advance(recurrence: Recurrence, memory: LayerMemory, segments: Sequence[Segment], x: Tensor) -> Tensor:
    """A forward of rows x [B, W, inputs] -> outputs [B, W, outputs], float32; updates the memory."""
    rows = [_advance_row(recurrence, memory, segment, row) for segment, row in zip(segments, x, strict=True)]
    for segment, row in zip(segments, x, strict=True):
        memory.write(segment.slot, segment.start, row)
    return torch.stack(rows)


def _advance_row(recurrence: Recurrence, memory: LayerMemory, segment: Segment, x: Tensor) -> Tensor:
    before = memory.between(segment.slot, segment.known - recurrence.taps + 1, segment.start)
    inputs, heads, kept = torch.cat([before, x]), recurrence.heads, memory.states[segment.slot]
    mixed = convolve(recurrence, inputs[:, : recurrence.channels])
    if heads is None:
        return mixed[segment.start - segment.known :]
    state = kept.clone() if segment.known else torch.zeros_like(kept)
    gates, outputs = inputs[recurrence.taps - 1 :, recurrence.channels :], []
    for step, position in enumerate(range(segment.known, segment.start + segment.count)):
        state, out = _take_in(recurrence, heads, state, mixed[step], gates[step])
        if position >= segment.start:
            outputs.append(out)
        if position + 1 == segment.keep:
            kept.copy_(state)
    return torch.stack(outputs)


def convolve(recurrence: Recurrence, x: Tensor) -> Tensor:
    """Channels x [taps - 1 + n, C] -> [n, C], float32, rounded where the model rounds; before the activation."""
    count = len(x) - recurrence.taps + 1
    x = x.float()
    mixed = torch.zeros(count, recurrence.channels, dtype=torch.float32, device=x.device)
    for tap in range(recurrence.taps):
        mixed = mixed + x[tap : tap + count] * recurrence.weight[:, tap]
    if recurrence.bias is not None:
        mixed = mixed + recurrence.bias
    return mixed.to(recurrence.dtype).float()


def _take_in(
    recurrence: Recurrence, heads: Heads, state: Tensor, mixed: Tensor, gates: Tensor
) -> tuple[Tensor, Tensor]:
    """The state after one token with channels [C] and gates, and the token's output [outputs].

    It takes one token at a time, since PyTorch rounds functions such as exp differently at the end of a tensor.
    """
    fade, take = _gates(recurrence, heads, gates)
    mixed = silu(mixed.to(recurrence.dtype)).float()
    query, key = (_vectors(heads, mixed, first) for first in (heads.queries, heads.keys))
    value = mixed.narrow(0, heads.values, heads.count * heads.value_size).view(heads.count, -1)
    if heads.normalized:
        query, key = _normalized(query) * heads.key_size**-0.5, _normalized(key)
    state = state * fade[:, None, None]
    correction = value - (key[:, None] @ state)[:, 0] if heads.corrects else value
    state = torch.baddbmm(state, key[:, :, None], (correction * take[:, None])[:, None])
    out = (query[:, None] @ state)[:, 0]
    return state, (out if heads.skip is None else out + heads.skip[:, None] * value).flatten()


def _gates(recurrence: Recurrence, heads: Heads, gates: Tensor) -> tuple[Tensor, Tensor]:
    """The factors a of the old state and b of the new token, [heads] each, float32."""
    if heads.corrects:
        take, step = gates[: heads.count].sigmoid().float(), softplus(gates[heads.count :].float() + heads.shift)
        return (heads.rate * step).exp(), take
    step = softplus(gates + heads.shift.to(recurrence.dtype)).clamp(min=heads.least_step).float()
    return (heads.rate * step).exp(), step


def _vectors(heads: Heads, mixed: Tensor, first: int) -> Tensor:
    """Queries or keys [heads, key size]; neighboring heads share them."""
    vectors = mixed.narrow(0, first, heads.key_count * heads.key_size).view(heads.key_count, -1)
    return vectors.repeat_interleave(heads.count // heads.key_count, 0)


def _normalized(vectors: Tensor) -> Tensor:
    return vectors * torch.rsqrt(vectors.square().sum(-1, keepdim=True) + EPSILON)


Advance = Callable[[LayerMemory, Sequence[Segment], Tensor], Tensor]
Copy = Sequence[tuple[Tensor, Tensor]]  # per layer, a state and the inputs that the next token's convolution sees


@dataclass
class SlotPositions:
    """The positions that a slot holds: a state at `kept`, and the inputs from there to `end`."""

    kept: int = 0
    end: int = 0


class RecurrentStates:
    """The states of all recurrent layers of a model, by slot, and the functions that advance them."""

    def __init__(self, layers: Mapping[int, tuple[Recurrence, Advance | None]]) -> None:
        """layers: by number, each with its compiled recurrence; None: `advance` of this module computes it."""
        self._layers = {i: recurrence for i, (recurrence, _) in layers.items()}
        self._advances = {i: compiled for i, (_, compiled) in layers.items() if compiled is not None}
        self._memory = {i: LayerMemory(recurrence) for i, recurrence in self._layers.items()}
        self.moves = 0  # grows whenever states have moved in memory
        self._taps = max(recurrence.taps for recurrence in self._layers.values())
        self._ring = RING
        self._slots: list[SlotPositions] = []
        self._final_positions: dict[int, int] = {}
        self._segments: list[Segment] = []
        self._copies: OrderedDict[tuple[int, int], Copy] = OrderedDict()  # by (slot, position), oldest use first

    @property
    def compiled(self) -> bool:
        """True if Slipstream's kernels advance all layers."""
        return len(self._advances) == len(self._layers)

    def reserve(self, slots: int) -> None:
        """Hold at least `slots` slots."""
        if slots > len(self._slots):
            ends = [slot.end for slot in self._slots]
            self._slots.extend(SlotPositions() for _ in range(slots - len(self._slots)))
            self._resize(self._ring, ends)

    def mark_final(self, slot: int, position: int) -> None:
        """Declare tokens up to `position` final, before a forward: later forwards begin there or later, or at a copy.

        Without this call a later forward may begin only a few tokens before the end of this one.
        """
        self._final_positions[slot] = position

    def checkpoint(self, slot: int, limit: int) -> int:
        """The last position, at most `limit`, at which a forward of a slot can begin."""
        held = self._slots[slot]
        near = min(limit, held.end) if held.kept <= limit else 0
        return max([near, *(position for position in self._copied_positions(slot) if position <= limit)])

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy another slot's state, and the inputs after it, up to `length`."""
        for position in self._copied_positions(destination):
            del self._copies[destination, position]
        for position in self._copied_positions(source):
            if position <= length:
                self._add_copy(destination, position, self._copies[source, position])
        held = self._slots[source]
        if held.kept <= length <= held.end:
            for memory in self._memory.values():
                memory.states[destination] = memory.states[source]
                memory.inputs[destination] = memory.inputs[source]
            self._slots[destination] = SlotPositions(held.kept, length)
        else:
            self._restore(destination, length)

    def begin(self, first_slot: int, starts: Sequence[int], width: int) -> None:
        """Prepare a forward of `width` tokens in each slot from `first_slot` on.

        starts: the position of the first token in each of these slots.
        """
        self._segments = []
        for slot, start in enumerate(starts, first_slot):
            held = self._slots[slot]
            if not held.kept <= start <= held.end:
                held = self._restore(slot, start)
            for position in self._copied_positions(slot):
                if position > start:
                    del self._copies[slot, position]
            end = start + width
            final = self._final_positions.pop(slot, end - self._ring + self._taps - 1)
            keep = max(held.kept, min(final, end))
            self._segments.append(Segment(slot, start, width, held.kept, keep))
        needed = max(segment.start + width - segment.keep for segment in self._segments) + self._taps - 1
        if needed > self._ring:
            self._resize(1 << (needed - 1).bit_length(), [slot.end for slot in self._slots])
        # a failing forward leaves layers at different positions, so the slots count as empty until `end`
        for segment in self._segments:
            self._slots[segment.slot] = SlotPositions()

    @property
    def segments(self) -> Sequence[Segment]:
        """The rows of the forward that `begin` prepared."""
        return self._segments

    def memory(self, layer: int) -> LayerMemory:
        """The memory of a layer."""
        return self._memory[layer]

    def run(self, layer: int, x: Tensor) -> Tensor:
        """A layer's part of the forward: inputs [B, W, inputs] -> outputs [B, W, outputs], float32."""
        memory, compiled = self._memory[layer], self._advances.get(layer)
        if compiled is not None:
            return compiled(memory, self._segments, x)
        return advance(self._layers[layer], memory, self._segments, x)

    def end(self) -> None:
        """Record the positions that the forward has reached, and keep a copy at the end of a prompt."""
        for segment in self._segments:
            slot, end = segment.slot, segment.start + segment.count
            self._slots[slot] = SlotPositions(segment.keep, end)
            if segment.keep - segment.start >= PROMPT - 1:
                self._add_copy(slot, segment.keep, self._copy_of(slot, segment.keep))

    def _resize(self, ring: int, ends: Sequence[int]) -> None:
        self._ring = ring
        self.moves += 1
        for memory in self._memory.values():
            memory.resize(len(self._slots), ring, ends)

    def _copied_positions(self, slot: int) -> list[int]:
        return [position for owner, position in self._copies if owner == slot]

    def _copy_of(self, slot: int, position: int) -> Copy:
        first = position - self._taps + 1
        return [
            (memory.states[slot].clone(), memory.between(slot, first, position)) for memory in self._memory.values()
        ]

    def _add_copy(self, slot: int, position: int, copy: Copy) -> None:
        self._copies[slot, position] = copy
        self._copies.move_to_end((slot, position))
        while sum(state.nbytes + inputs.nbytes for kept in self._copies.values() for state, inputs in kept) > COPIES:
            self._copies.popitem(last=False)

    def _restore(self, slot: int, position: int) -> SlotPositions:
        """Reset a slot to position 0 or to a copy."""
        copy = self._copies.get((slot, position))
        if position and copy is None:
            raise SlipstreamError(f"slot {slot}: no state is kept for position {position}")
        if copy is not None:
            self._copies.move_to_end((slot, position))
            for memory, (state, inputs) in zip(self._memory.values(), copy, strict=True):
                memory.states[slot] = state
                first = max(0, position - self._taps + 1)
                memory.write(slot, first, inputs[len(inputs) - (position - first) :])
        self._slots[slot] = SlotPositions(position, position)
        return self._slots[slot]
