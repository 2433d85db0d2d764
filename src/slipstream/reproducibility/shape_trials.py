"""Trials of forward shapes: the same tokens at the same positions, computed in many ways and compared bit by bit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from slipstream.core.interfaces import AttendedLengths, Backend, Checkpoints, set_attended_lengths
from slipstream.core.kv_slots import PROMPT_UNIT
from slipstream.errors import UsageError
from slipstream.models.backend_capabilities import LayerKinds, RaggedForwards, RowSegment
from slipstream.reproducibility.timing import ForwardTimes, end_to_end, ragged_rounds

OF_EACH_KIND = 2  # layers that are tried
REFERENCE = 8  # the width every other one is compared with
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
FURTHER_WIDTHS = (9, 10, 11, 12, 14, 20, 24, 28, 40, 48, 56, 64)  # tried only where it is guaranteed that all agree
ATTENDED_UNITS = (256, 512)
CONTEXTS = (200, 520)  # one inside the first unit, one beyond: the unit must not matter where it pads nor where it ends
MATES = (37, 333, 111, 450, 260, 90, 400)  # context lengths of the other rows of ragged batches, repeated as needed
LENGTH = 16  # positions compared: each width feeds them its own way, so later ones also see what earlier ones stored
FEWEST_LOGITS, LONGEST = 1 << 14, 64  # short sums often round alike, so that tiny models need more positions
PREFILL = 256
ATTENDED_LENGTHS = tuple(range(64, 2049, 64))  # what forwards may read instead of multiples of the unit
STEPS = 4  # consecutive forwards of a batch, to see what each left to the next
CONSECUTIVE = (1, 5)  # widths whose forwards are tried one after the other, to see what each leaves to the next
TOGETHER = 3  # width of batches of all tried sizes
EVERY_SIZE = 64  # batches of up to this many rows are tried at every size
STRIDE = 16  # larger batches at multiples of this, and at the last this many sizes: each remainder occurs
TOTAL = 19  # tokens of a ragged forward: an odd number, as all are allowed then


def trial_backend(backend: Backend) -> Backend:
    """A backend of the layers to try, on the same KV cache if they can; the model itself if that saves nothing."""
    if not isinstance(backend, LayerKinds) or backend.device.type != "cpu":  # elsewhere graphs would be captured
        return backend
    try:
        chosen = first_of_each(backend.layer_kinds())
        if len(chosen) == backend.num_layers:
            return backend
        try:
            subset = backend.layer_subset(chosen)
        except UsageError:  # they have states
            subset = backend.separate_subset(chosen)
    except UsageError:  # the layers are not found
        return backend
    if isinstance(subset, RaggedForwards) and isinstance(backend, RaggedForwards):
        subset.ragged = backend.ragged
    return subset


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
    """Read tokens from `start` to `end`, where the next forward will begin."""
    if isinstance(backend, Checkpoints):
        backend.mark_final(slot, end)
    backend.forward(tokens[None, start:end], [start], first_slot=slot, logits=False)


def read_contexts(backend: Backend, tokens: Tensor, ends: Sequence[int], chunk: int) -> None:
    """Read tokens up to ends[i] into slot i: the longest is read in chunks, and copied wherever another slot's ends.

    A copy is made as soon as it is complete, because a recurrent state exists at the last position only.
    """
    longest_slot, num_read = ends.index(max(ends)), 0
    for end in sorted(set(ends)):
        for start in range(num_read, end, chunk):
            read_context(backend, tokens, start, min(start + chunk, end), longest_slot)
        for slot, slot_end in enumerate(ends):
            if slot_end == end and slot != longest_slot:
                backend.copy(longest_slot, slot, end)
        num_read = end


class Trials:
    """Runs the same tokens through forwards of different shapes, of a few layers; `times` times the whole model.

    All slots hold the same tokens. A trial writes to a slot only after the end of the slot's context, and no trial
    reads what another one has written there.
    """

    def __init__(self, complete: Backend, contexts: Sequence[int], widths: list[int], max_batch_size: int) -> None:
        self._complete, self.contexts, self.widths = complete, contexts, widths
        self.backend = backend = trial_backend(complete)
        mates = [mate for mate in MATES if mate < max(contexts)] or [0]
        others = max(0, max_batch_size - len(contexts))
        self._starts = [*contexts, *(mates[i % len(mates)] for i in range(others))][: max(max_batch_size, 1)]
        self._firsts = [*self._starts, *contexts[len(self._starts) :]]
        length = max(contexts) + max(PREFILL, *WIDTHS)
        generator = torch.Generator().manual_seed(20240229)
        self._tokens = torch.randint(0, backend.vocab_size, (length,), generator=generator).to(backend.device)
        set_attended_lengths(backend, ATTENDED_UNITS[-1], ())
        for tried in (complete, backend):
            tried.reserve(len(self._firsts), length + 3 * ATTENDED_UNITS[-1])
        read_contexts(backend, self._tokens, self._firsts, PREFILL)
        if isinstance(complete, Checkpoints) and complete.checkpoint(0, contexts[0]) < contexts[0]:
            read_context(complete, self._tokens, 0, contexts[0], 0)  # the whole model has a cache of its own
        self._length = min(max(LENGTH, FEWEST_LOGITS // backend.vocab_size), LONGEST)
        self._reference: dict[int, Tensor] = {}  # by the position at which a slot's context ends
        self.times = ForwardTimes.of(complete, self._tokens, self._starts, contexts[0])

    def _forward(self, tokens: Tensor, starts: list[int], first_slot: int) -> Tensor:
        """Logits; later forwards begin where the contexts end."""
        if isinstance(self.backend, Checkpoints):
            for slot in range(first_slot, first_slot + len(starts)):
                self.backend.mark_final(slot, self._firsts[slot])
        return self.backend.forward(tokens, starts, first_slot=first_slot, logits=True)

    def use_unit(self, unit: int) -> None:
        """Read the KV cache in units of `unit` from now on; the reference is computed with it."""
        self.backend.attended_unit = unit
        slots = {start: slot for slot, start in enumerate(self._firsts)}
        self._reference = {
            start: torch.cat(list(self._trace(slot, REFERENCE, max(self._length, *WIDTHS))))
            for start, slot in slots.items()
        }

    def _trace(self, slot: int, width: int, length: int) -> Iterator[Tensor]:
        """Logits [<= width, V] of consecutive forwards over `length` positions or more, fed `width` at a time."""
        first = self._firsts[slot]
        last = min(first + max(length, width), self.backend.max_length) - width + 1
        for start in range(first, last, width):
            tokens = self._tokens[None, start : start + width]
            yield self._forward(tokens, [start], slot)[0].clone()

    def agrees_alone(self, width: int, *, once: bool = False) -> bool:
        """True if every position equals the reference; stops at the first that does not.

        once: in one forward of one context instead of consecutive forwards of each.
        """
        slots = [width % len(self.contexts)] if once else range(len(self.contexts))
        for slot in slots:
            reference = self._reference[self.contexts[slot]]
            compared = 0
            for segment in self._trace(slot, width, width if once else self._length):
                count = min(len(segment), len(reference) - compared)
                if not torch.equal(segment[:count], reference[compared : compared + count]):
                    return False
                compared += count
        return True

    def agrees_in_batches(self, width: int, steps: int = 1) -> bool:
        """True if ragged batches give the reference's bits: for narrow widths of nearly every size, else of a few.

        All rows are compared: products of matrices often compute the last few rows with another kernel.
        steps: minimum number of consecutive forwards that are compared; tiny models need more.
        """
        row_step = 1 if width <= REFERENCE else 3
        steps, most = max(steps, self._length // LENGTH), len(self._starts)
        for rows in range(most, 1, -row_step):
            if EVERY_SIZE < rows <= most - STRIDE and rows % STRIDE:
                continue
            last = self.backend.max_length - max(self._starts[:rows]) - width  # a short context holds fewer steps
            for offset in range(0, min((steps - 1) * width, last) + 1, width):
                starts = [start + offset for start in self._starts[:rows]]
                tokens = torch.stack([self._tokens[start : start + width] for start in starts])
                logits = self._forward(tokens, starts, 0)
                for row, start in zip(logits, self._starts, strict=False):
                    expected = self._reference[start][offset : offset + width]
                    if not torch.equal(row[: len(expected)], expected):
                        return False
        return True

    def attended_lengths(self) -> tuple[int, ...]:
        """Further KV cache lengths that forwards may read with the same bits as whole units."""
        backend, unit = self._complete, self.backend.attended_unit
        if not isinstance(backend, AttendedLengths) or backend.device.type != "cpu":
            return ()
        return tuple(
            length
            for length in ATTENDED_LENGTHS
            if backend.attended_length_agrees(self.widths, length, -(-length // unit) * unit)
        )

    @property
    def chunks(self) -> list[int]:
        """The possible numbers of tokens in a chunk of a prompt."""
        return list(range(PROMPT_UNIT, min(PREFILL, self.backend.max_length - self.contexts[-1]) + 1, PROMPT_UNIT))

    def prompts_agree(self, chunks: Iterable[int]) -> bool:
        """True if prompt chunks of these widths give the bits that forwards of the reference width give."""
        slot = len(self.contexts) - 1
        length = min(PREFILL, self.backend.max_length - self.contexts[slot])
        reference = torch.cat(list(self._trace(slot, REFERENCE, length)))
        for width in chunks:
            segment = next(self._trace(slot, width, length))
            if not torch.equal(segment, reference[:width]):
                return False
        return True

    def longest_chunk_agrees(self) -> bool:
        """True if a prompt's longest chunk gives the reference's bits at its beginning and its end."""
        slot = len(self.contexts) - 1
        if not self.chunks:
            return True
        segment = next(self._trace(slot, self.chunks[-1], self.chunks[-1]))
        reference = self._reference[self.contexts[slot]]
        last = self.contexts[slot] + len(segment) - REFERENCE
        end = self._forward(self._tokens[None, last : last + REFERENCE], [last], slot)[0]
        count = min(len(segment), len(reference))
        return torch.equal(segment[:count], reference[:count]) and torch.equal(segment[-REFERENCE:], end)

    @property
    def _ragged(self) -> bool:
        """True if there are ragged forwards to try."""
        several = len(self._starts) >= max(2, len(self.contexts))
        return isinstance(self.backend, RaggedForwards) and self.backend.ragged and several

    def prompts_agree_together(self) -> bool:
        """True if prompts that share a forward give these bits as well."""
        backend, slot = self.backend, len(self.contexts) - 1
        other = 1 if slot == 0 else 0
        if not self._ragged:
            return False
        assert isinstance(backend, RaggedForwards)
        length = min(PREFILL // 2, backend.max_length - max(self._starts[:2]) - PROMPT_UNIT)
        reference = torch.cat(list(self._trace(slot, REFERENCE, length)))
        for share, order in ((0.2, (slot, other)), (0.5, (other, slot)), (0.7, (slot, other))):
            counts = [max(1, int(share * length)), max(1, int((1 - share) * length) - 1)]
            segments = [RowSegment(s, self._starts[s], count) for s, count in zip(order, counts, strict=True)]
            total = counts[0] - (-counts[1] // PROMPT_UNIT) * PROMPT_UNIT
            tokens = end_to_end(self._tokens, segments, -(-total // PROMPT_UNIT) * PROMPT_UNIT)
            logits = backend.forward_ragged(tokens, segments, widths=None)
            first, count = (0, counts[0]) if order[0] == slot else (counts[0], counts[1])
            if not torch.equal(logits[first : first + count], reference[:count]):
                return False
        return True

    def totals(self, totals: Sequence[int], widths: Sequence[int]) -> list[int]:
        """Those totals for which a ragged forward fits into the context."""
        return [total for total in totals if self._ragged and any(self._ragged_rounds(total, widths))]

    def total_agrees(self, total: int, widths: Sequence[int]) -> bool:
        """True if ragged forwards of this many tokens give the reference's bits, with the most rows and with few."""
        backend = self.backend
        assert isinstance(backend, RaggedForwards)
        for segments in self._ragged_rounds(total, widths):
            logits = backend.forward_ragged(end_to_end(self._tokens, segments, total), segments, widths=widths)
            ends = accumulate(segment.count for segment in segments)
            for end, segment, start in zip(ends, segments, self._starts, strict=False):
                expected = self._reference[start][segment.start - start :][: segment.count]
                if not torch.equal(logits[end - segment.count :][: len(expected)], expected):
                    return False
        return True

    def _ragged_rounds(self, total: int, widths: Sequence[int]) -> Iterator[list[RowSegment]]:
        return ragged_rounds(total, self._starts, self.backend.max_length - widths[-1])

    def unit_agrees(self, unit: int) -> bool:
        """True if reading two or three times as far gives the same bits."""
        self.use_unit(unit)
        agrees = True
        for factor in (2, 3):
            self.backend.attended_unit = unit * factor
            agrees = agrees and self.agrees_alone(REFERENCE)
        self.backend.attended_unit = unit
        return agrees


Check = Callable[[], bool]


def spot_checks(trials: Trials) -> list[Check]:
    """Checks that all hold if the shape changes no bit; the trials must have a reference."""
    alone = [partial(trials.agrees_alone, width, once=width not in CONSECUTIVE) for width in trials.widths]
    ragged = [partial(trials.total_agrees, TOTAL, trials.widths)] if trials.totals([TOTAL], trials.widths) else []
    return [*alone, partial(trials.agrees_in_batches, TOGETHER), *ragged, trials.longest_chunk_agrees]
