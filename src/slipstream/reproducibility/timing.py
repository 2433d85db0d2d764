"""The one timing instrument: how long forwards take by their shape, and how long a draft model reads and drafts.

Shapes take turns, and of each the fastest of many turns counts: whatever else the machine does only adds time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import cycle
from time import perf_counter, process_time, thread_time
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.interfaces import Backend, Checkpoints, DraftScorer, Experts, counted_experts
from slipstream.core.rng import argmax
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import RaggedForwards, RowSegment
from slipstream.reproducibility.expert_reads import ExpertReads
from slipstream.sampling.params import SamplingParams

SHARES = (3, 1, 8, 2, 1, 5, 1)  # how many tokens of a ragged forward its rows get, in turn
FEW_ROWS = 3  # of ragged forwards of few rows
FEWEST_TURNS, FEWEST_RAGGED_TURNS, MOST_TURNS = 3, 2, 16
# forwards of up to this many tokens (ragged: FEW_RAGGED), as most verifications have, get FEWEST_OF_FEW turns or more
FEW, FEW_RAGGED, FEWEST_OF_FEW = 16, 32, 6
EXPERTS_TIMED = (2, 4, 8)  # tokens of forwards that read few experts or many
SECONDS = 1.5  # after this time a shape gets no more than its fewest turns
# share of the processors' time: 0.94 and more if nothing else runs, 0.2 to 0.76 next to busy programs
UNDISTURBED = 0.85
TEXT, SHORT = 64, 8  # tokens of a prompt whose reading is timed, and of prompts for which only drafting is timed
STEPS, TURNS = 6, 2  # steps of a draft; how often a single row's draft is timed: the first time includes other work

Shape = TypeVar("Shape")


@dataclass
class Fastest(Generic[Shape]):
    """The least time seen of each shape, in milliseconds."""

    milliseconds: dict[Shape, float] = field(default_factory=dict)

    def add(self, shape: Shape, seconds: float) -> None:
        """Keep the time of a forward or draft if it is the fastest of its shape."""
        ms = 1e3 * max(0.0, seconds)
        self.milliseconds[shape] = min(ms, self.milliseconds.get(shape, ms))


class ProcessorShare:
    """The share of the time since its creation in which this thread ran: less than 1 if others used its processor."""

    def __init__(self) -> None:
        self._began, self._used = perf_counter(), thread_time()

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return (thread_time() - self._used) / max(perf_counter() - self._began, 1e-9)


def processors_are_free() -> bool:
    """True if PyTorch's threads, computing for a tenth of a second, get nearly all of their processors' time."""
    numbers = torch.ones(1 << 20)
    began, used = perf_counter(), process_time()
    while (elapsed := perf_counter() - began) < 0.1:
        numbers.mul_(1.0)
    return process_time() - used > UNDISTURBED * elapsed * torch.get_num_threads()


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has done its work; a CPU's is done when a call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ragged_rounds(total: int, starts: Sequence[int], limit: int) -> Iterator[list[RowSegment]]:
    """Ragged forwards of `total` tokens: two consecutive ones with a row for each of the starts, two with few rows.

    The second of two has padding. Forwards that could reach beyond position `limit` are left out.
    """
    for rows in {min(count, len(starts), total - 1) for count in (len(starts), FEW_ROWS)}:
        num_read = [0] * rows
        for turn in range(2):
            counts = shared_out(total - turn, rows, turn)
            if max(starts[:rows]) + max(num_read) + max(counts) > limit:
                break
            yield [RowSegment(i, starts[i] + num_read[i], counts[i]) for i in range(rows)]
            num_read = [before + count for before, count in zip(num_read, counts, strict=True)]


def shared_out(total: int, rows: int, turn: int) -> list[int]:
    """The number of tokens, at least one, that each row gets of `total`; SHARES are used from number `turn` on."""
    counts = [1] * rows
    places, shares = cycle(range(rows)), cycle((*SHARES[turn:], *SHARES[:turn]))
    while (remaining := total - sum(counts)) > 0:
        counts[next(places)] += min(remaining, next(shares) - 1)
    return counts


def end_to_end(tokens: Tensor, segments: Sequence[RowSegment], total: int) -> Tensor:
    """The tokens that the segments cover, one segment after the other, padded to `total`."""
    joined = torch.cat([tokens[segment.start : segment.start + segment.count] for segment in segments])
    return pad(joined, (0, total - len(joined)))


class ForcedExperts:
    """Chooses the experts of timed forwards: as many as on texts, and each time others, which are in no cache.

    On random tokens routers choose fewer or more experts than on texts.
    """

    def __init__(self, experts: Experts) -> None:
        self._experts, self._next = experts, 0
        self.reads = ExpertReads(experts.count, experts.used, milliseconds=0.0)

    @contextmanager
    def chosen(self, tokens: int, distinct: int | None = None) -> Iterator[None]:
        """Forwards of `tokens` tokens read this many distinct experts in each layer (default: as many as on texts)."""
        distinct = distinct or self.reads.timed(tokens)
        places = torch.arange(tokens * self.reads.used) % distinct
        self._experts.force(((self._next + places) % self.reads.count).view(tokens, -1))
        self._next += distinct
        try:
            yield
        finally:
            self._experts.force(None)


@dataclass(frozen=True)
class ForwardTimes:
    """Times forwards of different shapes on one backend.

    Shapes of few tokens, which most verifications have, get more turns even where they take long: the cost of a drafted
    token is the difference between two of them, which two or three turns would leave to chance.
    """

    backend: Backend
    tokens: Tensor  # [N]
    starts: Sequence[int]  # slot i holds the first starts[i] tokens
    start: int  # number of tokens that slot 0 holds
    forced: ForcedExperts | None = None  # of a mixture

    @classmethod
    def of(cls, backend: Backend, tokens: Tensor, starts: Sequence[int], start: int) -> ForwardTimes:
        """Times of a backend's forwards."""
        experts = counted_experts(backend)
        has_choice = experts is not None and experts.used < experts.count
        return cls(backend, tokens, starts, start, ForcedExperts(experts) if experts and has_choice else None)

    def alone(self, widths: Sequence[int], turns: Iterable[int]) -> dict[int, float]:
        """Milliseconds of one row's forward, by width. turns: numbers of the turns, used while time is left."""
        started = perf_counter()
        times = Fastest[int]()
        for turn in turns:
            late = perf_counter() - started > SECONDS
            due = [width for width in widths if not late or turn < (FEWEST_OF_FEW if width <= FEW else FEWEST_TURNS)]
            if not due:
                break
            for width in due:
                times.add(width, self._seconds(width))
        return times.milliseconds

    def experts(self, widths: Sequence[int], turns: Iterable[int]) -> ExpertReads | None:
        """The experts of a mixture and what each takes: the slope, by least squares, from few to as many as can be."""
        if self.forced is None:
            return None
        reads, times = self.forced.reads, Fastest[tuple[int, int]]()
        largest = {width: min(width * reads.used, reads.count) for width in widths}
        started = perf_counter()
        for turn in turns:
            if turn >= FEWEST_TURNS and perf_counter() - started > SECONDS:
                break
            for width, distinct in largest.items():
                times.add((width, reads.used), self._seconds(width, reads.used))
                times.add((width, distinct), self._seconds(width, distinct))
        further = {width: distinct - reads.used for width, distinct in largest.items()}
        extra = {
            width: times.milliseconds[width, largest[width]] - times.milliseconds[width, reads.used]
            for width in largest
        }
        slope = sum(further[width] * extra[width] for width in largest) / sum(count**2 for count in further.values())
        return replace(reads, milliseconds=max(0.0, slope))

    def ragged(
        self, turns: Iterable[tuple[int, int]], widths: Sequence[int], alone: Mapping[int, float]
    ) -> dict[int, float]:
        """Milliseconds of a ragged forward with the most rows, by number of tokens.

        turns: pairs of a turn's number and a number of tokens. alone: earlier milliseconds of one row's forwards. One
        of these is timed again with each turn, and all times are scaled by it: the machine's speed may have changed.
        """
        reference = max(width for width in alone if width <= FEW)
        started = perf_counter()
        times, reference_times = Fastest[int](), Fastest[int]()
        last, late = -1, False
        for turn, total in turns:
            if turn != last:
                late = perf_counter() - started > SECONDS
                if late and turn >= FEWEST_OF_FEW:
                    break
                if not times.milliseconds:
                    self._ragged_seconds(total, widths)  # not counted: the first includes work that is done once
                reference_times.add(reference, self._seconds(reference))
                last = turn
            if not (late and turn >= FEWEST_RAGGED_TURNS and total > FEW_RAGGED):
                times.add(total, self._ragged_seconds(total, widths))
        if not times.milliseconds:
            return {}
        reference_times.add(reference, self._seconds(reference))
        speed = alone[reference] / reference_times.milliseconds[reference]
        return {total: ms * speed for total, ms in times.milliseconds.items()}

    def _ragged_seconds(self, total: int, widths: Sequence[int]) -> float:
        counts = shared_out(total, min(total, len(self.starts)), 0)
        segments = [RowSegment(i, self.starts[i], count) for i, count in enumerate(counts)]
        tokens = end_to_end(self.tokens, segments, total)
        assert isinstance(self.backend, RaggedForwards)
        with self._forced(total):
            started = perf_counter()
            argmax(self.backend.forward_ragged(tokens, segments, widths=widths))[-1].item()
            return perf_counter() - started

    def _seconds(self, width: int, distinct: int | None = None) -> float:
        """Seconds of one row's forward. distinct: experts of a mixture that each layer reads."""
        tokens = self.tokens[None, self.start : self.start + width]
        if isinstance(self.backend, Checkpoints):
            self.backend.mark_final(0, self.start)
        with self._forced(width, distinct):
            started = perf_counter()
            argmax(self.backend.forward(tokens, [self.start], first_slot=0, logits=True))[-1, -1].item()
            return perf_counter() - started

    def _forced(self, tokens: int, distinct: int | None = None) -> AbstractContextManager[None]:
        return nullcontext() if self.forced is None else self.forced.chosen(tokens, distinct)


@dataclass(frozen=True)
class DraftTimes:
    """Milliseconds that a draft model takes."""

    steps: dict[int, float] = field(default_factory=dict)  # of one step, by the number of rows that draft
    token: float | None = None  # of one prompt token


def time_drafts(scorer: DraftScorer, max_rows: int) -> DraftTimes:
    """Draft for 1, 2, 4, ... and `max_rows` rows of random tokens; the fastest step counts.

    scorer: must have room for these rows; what it has cached is overwritten.
    """
    steps, reading = Fastest[int](), Fastest[int]()
    for turn in range(TURNS):
        first, *others = _step_seconds(scorer, 1, TEXT, turn)
        steps.add(1, min(others))
        reading.add(1, (first - 1e-3 * steps.milliseconds[1]) / (TEXT - 1))
    for rows in sorted({*(1 << n for n in range(1, max_rows.bit_length())), max_rows} - {1}):
        steps.add(rows, min(_step_seconds(scorer, rows, SHORT, rows)[1:]))
    return DraftTimes(steps.milliseconds, reading.milliseconds[1])


@torch.inference_mode()
def _step_seconds(scorer: DraftScorer, num_rows: int, length: int, seed: int) -> list[float]:
    """Seconds of each step of a draft for `num_rows` new prompts of `length` tokens; the first reads the prompts."""
    backend, generator = scorer.backend, torch.Generator().manual_seed(20240229 + seed)
    prompts = torch.randint(0, backend.vocab_size, (num_rows, length), generator=generator).tolist()
    rows = [Row(i, prompt, SamplingParams(temperature=0.0), seed=0) for i, prompt in enumerate(prompts)]
    drafted = torch.zeros(num_rows, STEPS, dtype=torch.int64, device=backend.device)
    seconds = []
    for step in range(STEPS):
        started = perf_counter()
        logits = scorer.score(rows, drafted[:, :step], [step] * num_rows, keep=1)
        drafted[:, step] = logits[:, 0].argmax(-1)
        wait_for_device(backend.device)
        seconds.append(perf_counter() - started)
    return seconds
