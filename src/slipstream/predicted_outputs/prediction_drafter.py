"""Predictions before the drafter: which rows are drafted by their prediction, how many tokens, and what the drafter
does beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from slipstream.core.interfaces import Drafter, Observer, Policy, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import check_draft
from slipstream.core.types import Draft, Row, Verdict
from slipstream.draft_length.acceptance_model import DraftNote
from slipstream.draft_length.costs import CostModel, best_lengths
from slipstream.drafters.hybrid import merged
from slipstream.predicted_outputs.row_predictions import NOTHING, Proposal, RowPredictions

FLOOR = 0.2  # where costs do not decide, a prediction ends where its acceptance is less likely than this


@dataclass
class PredictionDrafter:
    """Asks the prediction of each row first, and `main` for the rows that it leaves.

    A prediction proposes a chain, one-hot, with acceptance probabilities. A round in which every row's prediction
    speaks costs no forward of `main`. One that only guesses comes after `main` where that may draft more, so that a
    wrong prediction takes the place of no draft.
    free_drafts: a draft of `main` costs no forward; then it is always asked, and of two drafts with acceptance
    probabilities the one is taken of which more tokens promise to be accepted.
    """

    main: Drafter
    predictions: RowPredictions
    free_drafts: bool = False

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """For each row the draft of its prediction or of `main`; `Draft.predicted` says which."""
        proposals = [self.predictions.proposal(row) if n else NOTHING for row, n in zip(rows, lengths, strict=True)]
        if not any(one.tokens for one in proposals):
            return self.main.propose(rows, lengths, sampler)
        found = Draft.from_lists(
            [one.tokens[:n] for one, n in zip(proposals, lengths, strict=True)],
            sampler.device,
            [one.acceptance_probs[:n] for one, n in zip(proposals, lengths, strict=True)],
        )
        found = replace(found, predicted=found.lengths)
        first = [
            bool(one.tokens) and (n <= len(one.tokens) or not self.predictions.only_guesses(row))
            for row, one, n in zip(rows, proposals, lengths, strict=True)
        ]
        others = [0 if own and not self.free_drafts else n for own, n in zip(first, lengths, strict=True)]
        if not any(others):
            return found
        drafted = self.main.propose(rows, others, sampler)
        check_draft(drafted, others, self.main)
        ours, theirs = _promised(found), _promised(drafted)
        predicted = [
            n > 0 and (not m or (own and a >= b))
            for own, n, m, a, b in zip(first, found.lengths, drafted.lengths, ours, theirs, strict=True)
        ]
        found = found.cut([n * own for n, own in zip(found.lengths, predicted, strict=True)])
        return _beside(found, drafted, predicted)


@dataclass
class ObservingPredictionDrafter(PredictionDrafter):
    """The same with a drafter that observes verdicts: those on predictions teach it as well as any."""

    observer: Observer = field(kw_only=True)

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """See `Observer`."""
        self.observer.observe(rows, draft, logits, verdict)


def prediction_drafter(main: Drafter, predictions: RowPredictions, *, free_drafts: bool = False) -> PredictionDrafter:
    """A drafter that asks predictions before `main`; see `PredictionDrafter`."""
    if isinstance(main, Observer):
        return ObservingPredictionDrafter(main, predictions, free_drafts, observer=main)
    return PredictionDrafter(main, predictions, free_drafts)


def _promised(draft: Draft) -> list[float]:
    """How many tokens of each row promise to be accepted; none of rows without acceptance probabilities."""
    probs = draft.acceptance_probs or (None,) * len(draft.lengths)
    return [sum(known[:n]) if known else 0.0 for known, n in zip(probs, draft.lengths, strict=True)]


def _beside(found: Draft, drafted: Draft, predicted: Sequence[bool]) -> Draft:
    """Rows of `found` that are `predicted`, else of `drafted`."""
    both = replace(merged(predicted, found, drafted), notes=drafted.notes, predicted=found.predicted)
    if drafted.parents is None:
        return both
    chains = [tuple(range(-1, length - 1)) for length in found.lengths]
    parents = tuple(a if own else b for own, a, b in zip(predicted, chains, drafted.parents, strict=True))
    return replace(both, parents=parents)


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
