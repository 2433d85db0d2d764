"""What all steps so far have done, folded once for the metrics and the engine room.

Steps are folded many at once: one on its own, between two forwards, finds cold caches and costs more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from time import monotonic

from slipstream.apps.server.answer_parts import ModelFacts, shares
from slipstream.core.rounds import Round
from slipstream.text.results import Stats

MOST_UNFOLDED = 64


class StepTotals:
    """stats: over all rounds. num_drafts: rounds that drafted. drafted, accepted: tokens by the source of the draft.

    on_step: told of every step when it was and how many tokens it committed. All of it is true after `fold`.
    """

    def __init__(self, on_step: Callable[[float, int], None]) -> None:
        self._on_step = on_step
        self._unfolded: list[tuple[float, Sequence[Round], ModelFacts]] = []
        self.stats = Stats()
        self.num_drafts = 0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def step(self, rounds: Sequence[Round], facts: ModelFacts) -> None:
        """Add the rounds of one step."""
        self._unfolded.append((monotonic(), rounds, facts))
        if len(self._unfolded) >= MOST_UNFOLDED:
            self.fold()

    def fold(self) -> StepTotals:
        """The same, brought up to date."""
        steps, self._unfolded = self._unfolded, []
        for at, rounds, facts in steps:
            self._on_step(at, self._add(rounds, facts))
        return self

    def _add(self, rounds: Sequence[Round], facts: ModelFacts) -> int:
        before = self.stats.num_output_tokens
        self.stats.add_step(rounds)
        for done in rounds:
            if not done.draft:
                continue
            self.num_drafts += bool(done.own.draft)
            for share in shares(done, facts):
                self.drafted[share.source] += share.drafted
                self.accepted[share.source] += share.accepted
        return self.stats.num_output_tokens - before
