"""Drafts of rows that have predictions: chooses between the prediction's tokens and the drafter's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import PREDICTION, Drafts
from slipstream.core.types import Draft, Row
from slipstream.predicted_outputs.row_predictions import Proposal, RowPredictions

FLOOR = 0.2  # where costs do not decide, a prediction is cut below this acceptance probability


@dataclass
class PredictedDrafts:
    """Asks each row's prediction first, and the drafter for the remaining rows; see `core.loop.Predict`.

    A prediction proposes a one-hot chain with acceptance probabilities. If every row's prediction proposes something,
    the round costs no forward of a draft model. A prediction that only guesses its place gives way to a drafter that
    may draft more tokens, so that a wrong prediction replaces no draft.
    longest: most tokens of a prediction in a round. free_drafts: the drafter takes no forwards; then it is asked for
    every row, and the draft with more expected accepted tokens is taken. costs_decide: whether the policy cuts a row's
    draft to what pays.
    """

    predictions: RowPredictions
    longest: int = MAX_DRAFT_TOKENS
    free_drafts: bool = False
    costs_decide: Callable[[Row], bool] = lambda row: False

    def __call__(self, rows: Sequence[Row], lengths: Sequence[int], room: Sequence[int], drafts: Drafts) -> Draft:
        """One draft per row, of its prediction or of the drafter.

        lengths: the most tokens of the drafter's draft; room: of the prediction's.
        """
        proposals = [self._proposal(row, n) for row, n in zip(rows, room, strict=True)]
        if not any(proposal.tokens for proposal in proposals):
            return drafts(lengths)
        goes_first = [
            bool(proposal.tokens) and (n <= len(proposal.tokens) or not self.predictions.only_guesses(row))
            for row, proposal, n in zip(rows, proposals, lengths, strict=True)
        ]
        drafted = drafts(
            [0 if is_first and not self.free_drafts else n for is_first, n in zip(goes_first, lengths, strict=True)]
        )
        expected = [sum(probs or ()) for probs in drafted.acceptance_probs]
        is_predicted = [
            bool(proposal.tokens) and (not n or (is_first and sum(proposal.acceptance_probs) >= accepted))
            for proposal, is_first, n, accepted in zip(proposals, goes_first, drafted.lengths, expected, strict=True)
        ]
        predicted = Draft.from_lists(
            [proposal.tokens for proposal in proposals],
            drafted.tokens.device,
            [proposal.acceptance_probs for proposal in proposals],
            PREDICTION,
        )
        predicted = predicted.cut([n * is_taken for n, is_taken in zip(predicted.lengths, is_predicted, strict=True)])
        return Draft.where(is_predicted, predicted, drafted)

    def _proposal(self, row: Row, room: int) -> Proposal:
        proposal, length = self.predictions.proposal(row) if room else Proposal([], []), min(room, self.longest)
        if not self.costs_decide(row) or row.params.num_draft_tokens is not None:
            length = min(length, sum(prob >= FLOOR for prob in proposal.acceptance_probs))
        return Proposal(proposal.tokens[:length], proposal.acceptance_probs[:length])
