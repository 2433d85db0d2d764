"""Which draft is verified where both the prediction and the decoder's drafter have one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from slipstream import Draft, SamplingParams
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.predicted_outputs.predicted_drafts import FLOOR, PredictedDrafts, Proposal, RowPredictions
from slipstream.sampling.sampler import Sampler

CPU, SIZE = torch.device("cpu"), 200
OLD = list(range(100, 160))


@dataclass
class Others:
    """Drafts only token 7, always with the same acceptance probability; records its calls."""

    probs: Sequence[float] | None
    asked: list[list[int]] = field(default_factory=list)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.asked.append(list(lengths))
        sizes = [min(n, len(self.probs) if self.probs else 2) for n in lengths]
        acceptance_probs = None if self.probs is None else [self.probs[:n] for n in sizes]
        return Draft.from_lists([[7] * n for n in sizes], CPU, acceptance_probs)


def followed() -> Row:
    """A row that has followed its prediction so far."""
    made = Row(0, [1, 2], SamplingParams(max_tokens=100), seed=0)
    made.prediction = OLD
    made.tokens += OLD[:8]
    return made


def proposed(others: Others, *, free_drafts: bool, length: int = 20) -> Draft:
    row = followed()
    predict, sampler = PredictedDrafts(RowPredictions(lambda token: False), free_drafts=free_drafts), _sampler(row)
    return predict([row], [length], [length], lambda lengths: others.propose([row], lengths, sampler))


def _sampler(row: Row) -> Sampler:
    return Sampler([row], Race(SIZE, CPU), SIZE, CPU)


@pytest.mark.parametrize(
    ("probs", "is_other_drafter"),
    [((0.995,) * 20, True), ((0.5, 0.2), False), (None, False)],
    ids=["surer", "worse", "untold"],
)
def test_the_draft_with_more_expected_tokens_is_taken(probs: Sequence[float] | None, is_other_drafter: bool) -> None:
    draft = proposed(others := Others(probs), free_drafts=True)
    assert others.asked == [[20]]
    assert (
        draft.tokens[0, 0] == (7 if is_other_drafter else OLD[8])
        and (draft.records[0].source == "prediction") != is_other_drafter
    )


def test_a_drafter_that_needs_forwards_is_not_asked_beside_a_prediction() -> None:
    draft = proposed(others := Others((0.995,) * 20), free_drafts=False)
    assert others.asked == [[0]] and draft.tokens[0, 0] == OLD[8]


def test_a_prediction_ends_at_unlikely_tokens_unless_costs_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    likely, unlikely = [0.9, 0.8, FLOOR], [FLOOR / 2] * 4
    proposal = Proposal(OLD[8:15], [*likely, *unlikely])
    monkeypatch.setattr(RowPredictions, "proposal", lambda self, row: proposal)
    row, others = followed(), Others(None)
    for decide, count in ((False, 3), (True, 7)):
        predict = PredictedDrafts(RowPredictions(lambda token: False), costs_decide=lambda row, decide=decide: decide)
        draft = predict([row], [12], [12], lambda lengths: others.propose([row], lengths, _sampler(row)))
        assert draft.lengths == (count,)
        assert predict([row], [12], [2], lambda lengths: others.propose([row], lengths, _sampler(row))).lengths == (2,)
