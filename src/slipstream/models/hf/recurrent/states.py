"""The states of a model's recurrent layers, by slot: one kept per row, and the inputs that came after it.

A state cannot be taken back, so of each row it is kept where the text is settled, with the inputs of the tokens behind.
A forward begins with a copy of it, goes through the kept inputs once more up to its own first token, which repeats
the arithmetic of a token and none of the products with weights, and on from there. Rejected tokens cost nothing.
Where prompts ended, further copies are kept, for texts that begin alike.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.hf.recurrent.recurrence import LayerMemory, Recurrence, Segment, advance

RING = 64  # inputs kept at first
PROMPT = 16  # where a forward has read as many settled tokens, a copy is kept: others may begin alike
COPIES = 1 << 30  # bytes of all copies together, at most

Advance = Callable[[LayerMemory, Sequence[Segment], Tensor], Tensor]
Copy = Sequence[tuple[Tensor, Tensor]]  # for each layer, a state and the inputs that the next token's convolution sees


@dataclass
class SlotPositions:
    """What is known of a slot: the state at `kept`, and the inputs from there to `end`."""

    kept: int = 0
    end: int = 0


class RecurrentStates:
    """The states of all recurrent layers, by number, and what computes them; `advance` if nothing faster does."""

    def __init__(self, layers: Mapping[int, tuple[Recurrence, Advance | None]]) -> None:
        self._layers = {i: recurrence for i, (recurrence, _) in layers.items()}
        self._advances = {i: compiled for i, (_, compiled) in layers.items() if compiled is not None}
        self._memory = {i: LayerMemory(recurrence) for i, recurrence in self._layers.items()}
        self._taps = max(recurrence.taps for recurrence in self._layers.values())
        self._ring = RING
        self._slots: list[SlotPositions] = []
        self._settled: dict[int, int] = {}
        self._segments: list[Segment] = []
        self._copies: OrderedDict[tuple[int, int], Copy] = OrderedDict()  # (slot, position), the latest used last

    @property
    def bytes_per_slot(self) -> int:
        """Memory that a row takes, besides copies."""
        tensors = [part for memory in self._memory.values() for part in (memory.states, memory.inputs)]
        return sum(part.nbytes // max(1, len(part)) for part in tensors)

    @property
    def compiled(self) -> bool:
        """Whether kernels of ours advance them all."""
        return len(self._advances) == len(self._layers)

    def reserve(self, slots: int) -> None:
        """Hold at least `slots` slots."""
        if slots > len(self._slots):
            ends = [slot.end for slot in self._slots]
            self._slots.extend(SlotPositions() for _ in range(slots - len(self._slots)))
            self._resize(self._ring, ends)

    def mark_final(self, slot: int, position: int) -> None:
        """Before a forward: none after it will begin before `position`, but at a copy. The text is true up to there.

        Without this it may begin a few tokens before the forward's end.
        """
        self._settled[slot] = position

    def checkpoint(self, slot: int, limit: int) -> int:
        """The last position, at most `limit`, at which a forward of a slot can begin."""
        known = self._slots[slot]
        near = min(limit, known.end) if known.kept <= limit else 0
        return max([near, *(position for position in self._positions(slot) if position <= limit)])

    def copy(self, source: int, destination: int, length: int) -> None:
        """Let a slot know what another one knows up to `length`."""
        for position in self._positions(destination):
            del self._copies[destination, position]
        for position in self._positions(source):
            if position <= length:
                self._keep(destination, position, self._copies[source, position])
        known = self._slots[source]
        if known.kept <= length <= known.end:
            for memory in self._memory.values():
                memory.states[destination] = memory.states[source]
                memory.inputs[destination] = memory.inputs[source]
            self._slots[destination] = SlotPositions(known.kept, length)
        else:
            self._restore(destination, length)

    def begin(self, first_slot: int, starts: Sequence[int], width: int) -> None:
        """Prepare a forward of `width` tokens of each slot from `first_slot` on, written from these positions on."""
        self._segments = []
        for slot, start in enumerate(starts, first_slot):
            known = self._slots[slot]
            if not known.kept <= start <= known.end:
                known = self._restore(slot, start)
            for position in self._positions(slot):
                if position > start:
                    del self._copies[slot, position]
            end = start + width
            settled = self._settled.pop(slot, end - self._ring + self._taps - 1)
            keep = max(known.kept, min(settled, end))
            self._segments.append(Segment(slot, start, width, known.kept, keep))
        needed = max(segment.start + width - segment.keep for segment in self._segments) + self._taps - 1
        if needed > self._ring:
            self._resize(1 << (needed - 1).bit_length(), [slot.end for slot in self._slots])
        for segment in self._segments:  # a forward that fails leaves layers at different positions
            self._slots[segment.slot] = SlotPositions()

    def run(self, layer: int, x: Tensor) -> Tensor:
        """A layer's part of the forward: inputs [B, W, inputs] -> outputs [B, W, outputs], float32."""
        memory, compiled = self._memory[layer], self._advances.get(layer)
        if compiled is not None:
            return compiled(memory, self._segments, x)
        return advance(self._layers[layer], memory, self._segments, x)

    def end(self) -> None:
        """Note what the forward has left."""
        for segment in self._segments:
            slot, end = segment.slot, segment.start + segment.count
            self._slots[slot] = SlotPositions(segment.keep, end)
            if segment.keep - segment.start >= PROMPT - 1:
                self._keep(slot, segment.keep, self._copy_of(slot, segment.keep))

    def _resize(self, ring: int, ends: Sequence[int]) -> None:
        self._ring = ring
        for memory in self._memory.values():
            memory.resize(len(self._slots), ring, ends)

    def _positions(self, slot: int) -> list[int]:
        return [position for owner, position in self._copies if owner == slot]

    def _copy_of(self, slot: int, position: int) -> Copy:
        first = position - self._taps + 1
        return [
            (memory.states[slot].clone(), memory.between(slot, first, position)) for memory in self._memory.values()
        ]

    def _keep(self, slot: int, position: int, copy: Copy) -> None:
        self._copies[slot, position] = copy
        self._copies.move_to_end((slot, position))
        while sum(state.nbytes + inputs.nbytes for one in self._copies.values() for state, inputs in one) > COPIES:
            self._copies.popitem(last=False)

    def _restore(self, slot: int, position: int) -> SlotPositions:
        """Go back to the beginning or to a copy."""
        copy = self._copies.get((slot, position))
        if position and copy is None:
            raise SlipstreamError(f"slot {slot}: the state at position {position} is not known")
        if copy is not None:
            self._copies.move_to_end((slot, position))
            for memory, (state, inputs) in zip(self._memory.values(), copy, strict=True):
                memory.states[slot] = state
                first = max(0, position - self._taps + 1)
                memory.write(slot, first, inputs[len(inputs) - (position - first) :])
        self._slots[slot] = SlotPositions(position, position)
        return self._slots[slot]
