"""Trials of forward shapes: the same tokens at the same positions, computed in many ways and compared bit by bit."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, cycle
from time import perf_counter

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.cache_state import PROMPT_UNIT
from slipstream.core.interfaces import AttendedLengths, Backend, RaggedForwards, RowSegment, set_attended_lengths
from slipstream.reproducibility.trial_layers import trial_backend

REFERENCE = 8  # the width every other one is compared with
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)
FEWEST_TIMINGS, MOST_TIMINGS, TIMING_SECONDS = 3, 40, 2.0
FEWEST_RAGGED_TIMINGS, MOST_RAGGED_TIMINGS = 2, 3
SHARES = (3, 1, 8, 2, 1, 5, 1)  # how many of them are whose, over and over
FEW = 3  # rows
ATTENDED_UNITS = (256, 512)
CONTEXTS = (200, 520)  # one inside the first unit, one beyond: the unit must not matter where it pads nor where it ends
MATES = (37, 333, 111, 450, 260, 90, 400)  # where the other rows of ragged batches stand, over and over
LENGTH = 16  # positions compared: each width feeds them its own way, so later ones also see what earlier ones stored
PREFILL = 256
ATTENDED_LENGTHS = tuple(range(64, 2049, 64))  # what forwards may read instead of multiples of the unit
STEPS = 4  # consecutive forwards of a batch, to see what each left to the next


class Trials:
    """Runs the same tokens through different shapes of a few layers, and times forwards of the whole model.

    All slots hold the same tokens. Slot i is only ever written from contexts[i] on and read from there by nobody
    else, so that no trial changes what another one reads.
    """

    def __init__(self, whole: Backend, contexts: Sequence[int], widths: list[int], max_batch_size: int) -> None:
        self._whole, self.contexts, self.widths = whole, contexts, widths
        self.backend = backend = trial_backend(whole)
        mates = [mate for mate in MATES if mate < max(contexts)] or [0]
        others = max(0, max_batch_size - len(contexts))
        self._starts = [*contexts, *(mates[i % len(mates)] for i in range(others))][: max(max_batch_size, 1)]
        self._slots = max(len(self._starts), len(contexts))
        length = max(contexts) + max(PREFILL, *WIDTHS)
        generator = torch.Generator().manual_seed(20240229)
        self._tokens = torch.randint(0, backend.vocab_size, (length,), generator=generator).to(backend.device)
        set_attended_lengths(backend, ATTENDED_UNITS[-1], ())
        backend.reserve(self._slots, length + 3 * ATTENDED_UNITS[-1])
        for start in range(0, max(contexts), PREFILL):
            chunk = self._tokens[None, start : min(start + PREFILL, max(contexts))]
            backend.forward(chunk, [start], first_slot=0, logits=False)
        for slot in range(1, self._slots):
            backend.copy(0, slot, max(contexts))
        self._reference: list[Tensor] = []

    def use_unit(self, unit: int) -> None:
        """Read the KV cache in units of `unit` from now on; the reference is computed with it."""
        self.backend.attended_unit = unit
        self._reference = [
            torch.cat(list(self._trace(slot, REFERENCE, max(WIDTHS)))) for slot in range(len(self.contexts))
        ]

    def _trace(self, slot: int, width: int, length: int = LENGTH) -> Iterator[Tensor]:
        """Logits [<= width, V] of consecutive forwards over `length` positions or more, fed `width` at a time."""
        first = self.contexts[slot]
        last = min(first + max(length, width), self.backend.max_length) - width + 1
        for start in range(first, last, width):
            tokens = self._tokens[None, start : start + width]
            yield self.backend.forward(tokens, [start], first_slot=slot, logits=True)[0].clone()

    def agrees_alone(self, width: int) -> bool:
        """Whether every position comes out as in the reference; gives up at the first that does not."""
        for slot, reference in enumerate(self._reference):
            at = 0
            for segment in self._trace(slot, width):
                count = min(len(segment), len(reference) - at)
                if not torch.equal(segment[:count], reference[at : at + count]):
                    return False
                at += count
        return True

    def agrees_in_batches(self, width: int, steps: int = 1) -> bool:
        """The same in ragged batches: of every size for widths of plain decoding and short drafts, else of some.

        steps: consecutive forwards that are compared.
        """
        every = 1 if width <= REFERENCE else 3
        for rows in range(len(self._starts), 1, -every):
            last = self.backend.max_length - max(self._starts[:rows]) - width  # a short context holds fewer steps
            for at in range(0, min((steps - 1) * width, last) + 1, width):
                starts = [start + at for start in self._starts[:rows]]
                tokens = torch.stack([self._tokens[start : start + width] for start in starts])
                logits = self.backend.forward(tokens, starts, first_slot=0, logits=True)
                for row, reference in zip(logits, self._reference, strict=False):
                    expected = reference[at : at + width]
                    if not torch.equal(row[: len(expected)], expected):
                        return False
        return True

    def attended_lengths(self) -> tuple[int, ...]:
        """How much of the KV cache forwards may read where it is enough, without a difference to whole units."""
        backend, unit = self.backend, self.backend.attended_unit
        if not isinstance(backend, AttendedLengths) or backend.device.type != "cpu":
            return ()
        return tuple(
            read
            for read in ATTENDED_LENGTHS
            if backend.attended_length_agrees(self.widths, read, -(-read // unit) * unit)
        )

    @property
    def chunks(self) -> list[int]:
        """The numbers of tokens that a chunk of a prompt may have."""
        return list(range(PROMPT_UNIT, min(PREFILL, self.backend.max_length - self.contexts[-1]) + 1, PROMPT_UNIT))

    def prompts_agree(self, chunks: Iterable[int]) -> bool:
        """Whether prompt chunks of these widths leave the bits that forwards of the reference width leave."""
        slot = len(self.contexts) - 1
        length = min(PREFILL, self.backend.max_length - self.contexts[slot])
        reference = torch.cat(list(self._trace(slot, REFERENCE, length)))
        for width in chunks:
            segment = next(self._trace(slot, width, length))
            if not torch.equal(segment, reference[:width]):
                return False
        return True

    def prompts_agree_together(self) -> bool:
        """Whether prompts that share a forward do as well."""
        backend, slot = self.backend, len(self.contexts) - 1
        other = 1 if slot == 0 else 0
        if not isinstance(backend, RaggedForwards) or not backend.ragged or max(slot, other) >= len(self._starts):
            return False
        length = min(PREFILL // 2, backend.max_length - max(self._starts[:2]) - PROMPT_UNIT)
        reference = torch.cat(list(self._trace(slot, REFERENCE, length)))
        for share, order in ((0.2, (slot, other)), (0.5, (other, slot)), (0.7, (slot, other))):
            counts = [max(1, int(share * length)), max(1, int((1 - share) * length) - 1)]
            segments = [RowSegment(s, self._starts[s], count) for s, count in zip(order, counts, strict=True)]
            total = counts[0] - (-counts[1] // PROMPT_UNIT) * PROMPT_UNIT
            tokens = self._end_to_end(segments, -(-total // PROMPT_UNIT) * PROMPT_UNIT)
            logits = backend.forward_ragged(tokens, segments, widths=None)
            first, count = (0, counts[0]) if order[0] == slot else (counts[0], counts[1])
            if not torch.equal(logits[first : first + count], reference[:count]):
                return False
        return True

    def total_agrees(self, total: int, widths: Sequence[int]) -> bool:
        """Whether ragged forwards of this many tokens do, of as many rows as there may be and of few."""
        backend, tried = self.backend, False
        assert isinstance(backend, RaggedForwards)
        for rows in {min(count, len(self._starts), total - 1) for count in (len(self._starts), FEW)}:
            done = [0] * rows
            for turn in range(2):
                counts = _shared_out(total - turn, rows, turn)  # the second time there is padding
                if max(self._starts[:rows]) + max(done) + max(counts) + widths[-1] > backend.max_length:
                    break
                segments = [RowSegment(i, self._starts[i] + done[i], counts[i]) for i in range(rows)]
                logits = backend.forward_ragged(self._end_to_end(segments, total), segments, widths=widths)
                ends = accumulate(counts)
                for reference, end, count, at in zip(self._reference, ends, counts, done, strict=False):
                    expected = reference[at : at + count]
                    if not torch.equal(logits[end - count :][: len(expected)], expected):
                        return False
                done, tried = [at + count for at, count in zip(done, counts, strict=True)], True
        return tried

    def _end_to_end(self, segments: Sequence[RowSegment], total: int) -> Tensor:
        tokens = torch.cat([self._tokens[segment.start : segment.start + segment.count] for segment in segments])
        return pad(tokens, (0, total - len(tokens)))

    def unit_agrees(self, unit: int) -> bool:
        """Whether reading two or three times as far gives the same bits."""
        self.use_unit(unit)
        agrees = True
        for factor in (2, 3):
            self.backend.attended_unit = unit * factor
            agrees = agrees and self.agrees_alone(REFERENCE)
        self.backend.attended_unit = unit
        return agrees

    def milliseconds(self, widths: Sequence[int]) -> dict[int, float]:
        """Time of one forward of each width, one row.

        The widths alternate and the fastest of many rounds counts: whatever else the machine does only adds time.
        """
        started = perf_counter()
        times: dict[int, list[float]] = {width: [] for width in widths}
        for turn in range(MOST_TIMINGS):
            if turn >= FEWEST_TIMINGS and perf_counter() - started > TIMING_SECONDS:
                break
            for width in widths:
                times[width].append(self._time(width))
        return {width: 1e3 * min(taken) for width, taken in times.items()}

    def ragged_milliseconds(self, totals: Sequence[int], widths: Sequence[int]) -> dict[int, float]:
        """The same of ragged forwards of as many rows as there may be; fewer rounds, as they take long."""
        backend, times = self._whole, dict[int, list[float]]()
        started = perf_counter()
        for turn, total in ((turn, total) for turn in range(MOST_RAGGED_TIMINGS) for total in totals):
            if turn >= FEWEST_RAGGED_TIMINGS and perf_counter() - started > TIMING_SECONDS:
                break
            assert isinstance(backend, RaggedForwards)
            counts = _shared_out(total, min(total, len(self._starts)), 0)
            segments = [RowSegment(i, self._starts[i], count) for i, count in enumerate(counts)]
            begun = perf_counter()
            backend.forward_ragged(self._end_to_end(segments, total), segments, widths=widths)[-1, -1].item()
            times.setdefault(total, []).append(perf_counter() - begun)
        return {total: 1e3 * min(taken) for total, taken in times.items()}

    def _time(self, width: int) -> float:
        start = self.contexts[0]
        begun = perf_counter()
        tokens = self._tokens[None, start : start + width]
        self._whole.forward(tokens, [start], first_slot=0, logits=True).sum().item()
        return perf_counter() - begun


def _shared_out(total: int, rows: int, turn: int) -> list[int]:
    """Tokens of each row, at least one."""
    counts = [1] * rows
    places, shares = cycle(range(rows)), cycle((*SHARES[turn:], *SHARES[:turn]))
    while (left := total - sum(counts)) > 0:
        counts[next(places)] += min(left, next(shares) - 1)
    return counts
