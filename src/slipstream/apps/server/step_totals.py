"""What all steps so far have done, folded once for the metrics and the engine room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from slipstream.apps.server.answer_parts import ModelFacts, shares
from slipstream.core.rounds import Round
from slipstream.text.stats import Stats


class StepTotals:
    """stats: over all rounds. num_drafts: rounds that drafted. drafted, accepted: tokens by the source of the draft."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.num_drafts = 0
        self.drafted: Counter[str] = Counter()
        self.accepted: Counter[str] = Counter()

    def step(self, rounds: Sequence[Round], facts: ModelFacts) -> int:
        """Add the rounds of one step; returns how many tokens it committed."""
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
