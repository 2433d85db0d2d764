"""Drafts of rows that have predictions: their own where they have something to say, the drafter's elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import PREDICTION, Drafts
from slipstream.core.types import Draft, Row
from slipstream.predicted_outputs.row_predictions import Proposal, RowPredictions

FLOOR = 0.2  # where costs do not decide, a prediction ends where its acceptance is less likely than this


@dataclass
class PredictedDrafts:
    """Asks the prediction of each row first, and the drafter for the rows that it leaves; see `core.loop.Predict`.

    A prediction proposes a chain, one-hot, with acceptance probabilities. A round in which every row's prediction
    speaks costs no forward of a draft model. One that only guesses comes after the drafter where that may draft more,
    so that a wrong prediction takes the place of no draft.
    longest: tokens of a prediction in a round at most. free_drafts: a draft of the drafter costs no forward; then it is
    always asked, and of two drafts with acceptance probabilities the one is taken of which more tokens promise to be
    accepted. costs_decide: whether the policy cuts a row's draft to what pays.
    """

    predictions: RowPredictions
    longest: int = MAX_DRAFT_TOKENS
    free_drafts: bool = False
    costs_decide: Callable[[Row], bool] = lambda row: False

    def __call__(self, rows: Sequence[Row], lengths: Sequence[int], room: Sequence[int], drafts: Drafts) -> Draft:
        """For each row the draft of its prediction or of the drafter. lengths: the drafter's; room: for predictions."""
        proposals = [self._proposal(row, n) for row, n in zip(rows, room, strict=True)]
        if not any(proposal.tokens for proposal in proposals):
            return drafts(lengths)
        first = [
            bool(proposal.tokens) and (n <= len(proposal.tokens) or not self.predictions.only_guesses(row))
            for row, proposal, n in zip(rows, proposals, lengths, strict=True)
        ]
        drafted = drafts([0 if goes and not self.free_drafts else n for goes, n in zip(first, lengths, strict=True)])
        promised = [sum(probs or ()) for probs in drafted.acceptance_probs]
        predicted = [
            bool(proposal.tokens) and (not n or (goes and sum(proposal.acceptance_probs) >= other))
            for proposal, goes, n, other in zip(proposals, first, drafted.lengths, promised, strict=True)
        ]
        own = Draft.from_lists(
            [proposal.tokens for proposal in proposals],
            drafted.tokens.device,
            [proposal.acceptance_probs for proposal in proposals],
            PREDICTION,
        )
        return Draft.where(
            predicted, own.cut([n * goes for n, goes in zip(own.lengths, predicted, strict=True)]), drafted
        )

    def _proposal(self, row: Row, room: int) -> Proposal:
        """What a prediction says, as far as there is room, and where costs do not decide as far as it is likely."""
        proposal, most = self.predictions.proposal(row) if room else Proposal([], []), min(room, self.longest)
        if not self.costs_decide(row) or row.params.num_draft_tokens is not None:
            most = min(most, sum(prob >= FLOOR for prob in proposal.acceptance_probs))
        return Proposal(proposal.tokens[:most], proposal.acceptance_probs[:most])
