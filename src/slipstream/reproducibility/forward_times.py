"""How long forwards of a model take, by their shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from torch import Tensor

from slipstream.core.interfaces import Backend, Checkpoints, RaggedForwards, RowSegment
from slipstream.core.rng import argmax
from slipstream.reproducibility.ragged_rounds import end_to_end, shared_out

FEWEST_TURNS, FEWEST_RAGGED_TURNS, MOST_TURNS = 3, 2, 16
FEW, FEW_RAGGED, FEWEST_OF_FEW = 16, 32, 6  # tokens of most verifications, and turns that tell them from one another
SECONDS = 1.5  # after which no more turns are taken than these


@dataclass(frozen=True)
class ForwardTimes:
    """Times forwards of these tokens [N] in slots that hold as many of them as `starts` says; the first is `start`.

    The shapes alternate and the fastest of many turns counts: whatever else the machine does only adds time. Shapes of
    few tokens, which most verifications have, get more turns than others even where they take long: what a drafted
    token costs is the difference of two of them, and two or three turns leave it to chance.
    """

    backend: Backend
    tokens: Tensor
    starts: Sequence[int]
    start: int

    def alone(self, widths: Sequence[int], turns: Iterable[int]) -> dict[int, float]:
        """Milliseconds of one row's forward, by width. turns: their numbers; taken as long as there is time."""
        started = perf_counter()
        times: dict[int, list[float]] = {width: [] for width in widths}
        for turn in turns:
            late = perf_counter() - started > SECONDS
            due = [width for width in widths if not late or turn < (FEWEST_OF_FEW if width <= FEW else FEWEST_TURNS)]
            if not due:
                break
            for width in due:
                times[width].append(self._seconds(width))
        return {width: 1e3 * min(taken) for width, taken in times.items()}

    def ragged(
        self, turns: Iterable[tuple[int, int]], widths: Sequence[int], alone: Mapping[int, float]
    ) -> dict[int, float]:
        """The same of ragged forwards of as many rows as there may be. turns: a number and how many tokens to take.

        alone: milliseconds of one row's forwards, measured earlier. One of them is timed again beside each turn, and
        all times count in proportion to it: the machine may have become slower or faster since.
        """
        reference, begun = max(width for width in alone if width <= FEW), perf_counter()
        times, again = dict[int, list[float]](), list[float]()
        last, late = -1, False
        for turn, total in turns:
            if turn != last:
                late = perf_counter() - begun > SECONDS
                if late and turn >= FEWEST_OF_FEW:
                    break
                if not times:
                    self._ragged_seconds(total, widths)  # much happens for the first time
                again.append(self._seconds(reference))
                last = turn
            if not (late and turn >= FEWEST_RAGGED_TURNS and total > FEW_RAGGED):
                times.setdefault(total, []).append(self._ragged_seconds(total, widths))
        if not times:
            return {}
        again.append(self._seconds(reference))
        return {total: alone[reference] * min(taken) / min(again) for total, taken in times.items()}

    def _ragged_seconds(self, total: int, widths: Sequence[int]) -> float:
        counts = shared_out(total, min(total, len(self.starts)), 0)
        segments = [RowSegment(i, self.starts[i], count) for i, count in enumerate(counts)]
        tokens = end_to_end(self.tokens, segments, total)
        begun = perf_counter()
        assert isinstance(self.backend, RaggedForwards)
        argmax(self.backend.forward_ragged(tokens, segments, widths=widths))[-1].item()
        return perf_counter() - begun

    def _seconds(self, width: int) -> float:
        tokens = self.tokens[None, self.start : self.start + width]
        if isinstance(self.backend, Checkpoints):
            self.backend.settle(0, self.start)
        begun = perf_counter()
        argmax(self.backend.forward(tokens, [self.start], first_slot=0, logits=True))[-1, -1].item()
        return perf_counter() - begun
