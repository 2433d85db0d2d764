"""How much of a prediction to verify, beside whatever decides about the decoder's own drafter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from slipstream.core.interfaces import Policy
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.types import Draft, Row
from slipstream.draft_length.acceptance_model import DraftNote
from slipstream.draft_length.costs import CostModel, best_lengths
from slipstream.predicted_outputs.row_predictions import Proposal, RowPredictions

FLOOR = 0.2  # where costs do not decide, a prediction ends where its acceptance is less likely than this


@dataclass(frozen=True)
class PredictionLimits:
    """What bounds the verification of predictions.

    cost_model: None where costs do not decide. shares_costs: the drafter's own policy goes by the same costs.
    is_fixed: whether a row's text depends on its drafts, so that they may depend on nothing but the row. free_drafts:
    the decoder's own drafts cost no forward, so that they are asked for beside every prediction.
    longest: tokens of a prediction in a round at most.
    """

    cost_model: CostModel | None = None
    shares_costs: bool = False
    is_fixed: Callable[[Row], bool] = lambda row: False
    longest: int = MAX_DRAFT_TOKENS
    free_drafts: bool = False


@dataclass
class PredictionPolicy:
    """Decides for the rows whose prediction speaks, and leaves the others to `main`.

    Of a prediction as many tokens are verified as promise the most tokens per second. What came of it teaches `main`
    nothing but what forwards cost.
    """

    main: Policy
    predictions: RowPredictions
    limits: PredictionLimits = PredictionLimits()

    def observe(self, rows: Sequence[Row]) -> None:
        """Learn from the newest round of each row; predictions learn when they are read."""
        predicted = [bool(row.rounds[-1].num_prediction_tokens) for row in rows]
        own = [row for row, theirs in zip(rows, predicted, strict=True) if not theirs]
        self.main.observe(rows if self.limits.shares_costs else own)  # notes say then which rows teach something
        if self.limits.cost_model is not None:
            self.limits.cost_model.learn([row for row in rows if row.finish_reason is None])

    def lengths(self, rows: Sequence[Row]) -> list[int]:
        """As many tokens of a prediction as may be cut afterwards; what `main` chooses where the prediction is silent,
        and no fewer than that where both may draft, because the prediction guesses or drafts cost nothing."""
        proposals = [self.predictions.proposal(row) for row in rows]
        free = self.limits.free_drafts
        return [
            max(self._length(row, one), length * (free or self.predictions.only_guesses(row))) if one.tokens else length
            for row, one, length in zip(rows, proposals, self.main.lengths(rows), strict=True)
        ]

    def worth_verifying(self, rows: Sequence[Row], draft: Draft) -> Draft:
        """The draft with each row cut by whom it belongs to."""
        if not draft.predicted or not any(draft.predicted):
            return self.main.worth_verifying(rows, draft)
        lengths, notes = list(draft.lengths), draft.notes
        if any(n and not own for n, own in zip(draft.lengths, draft.predicted, strict=True)):
            rest = self.main.worth_verifying(rows, _without_predictions(draft))
            lengths = [own or n for own, n in zip(draft.predicted, rest.lengths, strict=True)]
            notes = rest.notes and tuple(
                _silenced(note) if own else note for note, own in zip(rest.notes, draft.predicted, strict=True)
            )
        return replace(draft.cut(self._cut(rows, draft, lengths)), notes=notes)

    def _length(self, row: Row, proposal: Proposal) -> int:
        count = len(proposal.tokens)
        if self._decides(row):
            return min(count, self.limits.longest)
        return min(_likely(proposal.acceptance_probs), self.limits.longest)

    def _decides(self, row: Row) -> bool:
        """Whether costs decide how much of a row's prediction is verified."""
        return (
            self.limits.cost_model is not None and row.params.num_draft_tokens is None and not self.limits.is_fixed(row)
        )

    def _cut(self, rows: Sequence[Row], draft: Draft, lengths: Sequence[int]) -> list[int]:
        """Lengths with those of predictions cut to what is likely, or pays beside what the other rows have."""
        assert draft.predicted is not None and draft.acceptance_probs is not None
        cut = [bool(own) and self._decides(row) for row, own in zip(rows, draft.predicted, strict=True)]
        lengths = [
            min(n, _likely(probs or ())) if own and not ours else n
            for n, probs, own, ours in zip(lengths, draft.acceptance_probs, draft.predicted, cut, strict=True)
        ]
        if self.limits.cost_model is None or not any(cut):
            return lengths
        cost_model, count = self.limits.cost_model, len(rows)
        whole = [n for n, ours in zip(lengths, cut, strict=True) if not ours]
        least, beside = max(whole, default=0), sum(whole)
        chosen, _ = best_lengths(
            [list(probs or ()) if ours else [] for probs, ours in zip(draft.acceptance_probs, cut, strict=True)],
            lambda longest, drafted: cost_model.verify(count, max(longest, least), drafted + beside),
            count,
            even=cost_model.even,
        )
        return [mine if ours else n for n, mine, ours in zip(lengths, chosen, cut, strict=True)]


def _likely(acceptance_probs: Sequence[float]) -> int:
    """How many tokens of a prediction are verified where costs do not decide."""
    return sum(prob >= FLOOR for prob in acceptance_probs)


def _without_predictions(draft: Draft) -> Draft:
    """The draft of the decoder's own drafter alone, with acceptance probabilities if that knows any."""
    assert draft.predicted is not None
    rest = draft.cut([0 if own else n for n, own in zip(draft.lengths, draft.predicted, strict=True)])
    known = [
        probs for probs, own in zip(rest.acceptance_probs or (), draft.predicted, strict=True) if not own and probs
    ]
    return replace(rest, predicted=None, acceptance_probs=rest.acceptance_probs if known else None)


def _silenced(note: object) -> object:
    """A note that tells nothing about the row's own draft, which the drafter was not asked for."""
    return DraftNote(decided=note.decided, unread=note.unread) if isinstance(note, DraftNote) else note
