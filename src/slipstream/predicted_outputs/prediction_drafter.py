"""Drafts from predictions, and from the decoder's own drafter where the prediction has nothing or less to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from slipstream.core.interfaces import Drafter, Observer, Sampler
from slipstream.core.loop import check_draft
from slipstream.core.types import Draft, Row, Verdict
from slipstream.drafters.hybrid import merged
from slipstream.predicted_outputs.row_predictions import NOTHING, RowPredictions


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
