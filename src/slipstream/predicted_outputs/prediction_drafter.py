"""Drafts from predictions, and from the decoder's own drafter for the rows whose prediction has nothing to say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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
    speaks costs no forward of `main`.
    """

    main: Drafter
    predictions: RowPredictions

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
        others = [0 if one.tokens else n for one, n in zip(proposals, lengths, strict=True)]
        if not any(others):
            return found
        drafted = self.main.propose(rows, others, sampler)
        check_draft(drafted, rows, self.main)
        return _beside(found, drafted, [bool(one.tokens) for one in proposals])


@dataclass
class ObservingPredictionDrafter(PredictionDrafter):
    """The same with a drafter that observes verdicts: those on predictions teach it as well as any."""

    observer: Observer

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """See `Observer`."""
        self.observer.observe(rows, draft, logits, verdict)


def prediction_drafter(main: Drafter, predictions: RowPredictions) -> PredictionDrafter:
    """A drafter that asks predictions before `main`."""
    if isinstance(main, Observer):
        return ObservingPredictionDrafter(main, predictions, main)
    return PredictionDrafter(main, predictions)


def _beside(found: Draft, drafted: Draft, predicted: Sequence[bool]) -> Draft:
    """Rows of `found` that are `predicted`, else of `drafted`."""
    both = replace(merged(predicted, found, drafted), notes=drafted.notes, predicted=found.predicted)
    if drafted.parents is None:
        return both
    chains = [tuple(range(-1, length - 1)) for length in found.lengths]
    parents = tuple(a if own else b for own, a, b in zip(predicted, chains, drafted.parents, strict=True))
    return replace(both, parents=parents)
