"""`accept` draws as the rule's distributions say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from slipstream.core import acceptance
from slipstream.core.acceptance import Distributions, Rule, accept
from slipstream.core.rng import Race
from slipstream.core.types import Draft, Row
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler

VOCAB = 3
DRAWS = 2000


@pytest.fixture
def draws(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], None]:
    """Replaces the uniform numbers of `accept` by given ones, one per row."""

    def throw(values: list[float]) -> None:
        numbers = iter(values)
        monkeypatch.setattr(acceptance, "uniform", lambda _bits: next(numbers))

    return throw


def verdicts(keep: list[float], rows: int) -> list[int]:
    """How many tokens `accept` keeps in each of `rows` equal rows, under a rule that says `keep`."""
    distributions = Distributions(
        torch.tensor([keep] * rows, dtype=torch.float64), lambda accepted: torch.ones(rows, VOCAB)
    )
    params = SamplingParams(temperature=1.0)
    batch = [Row(i, [0], params, seed=i) for i in range(rows)]
    sampler = Sampler(batch, Race(VOCAB, torch.device("cpu")), VOCAB, torch.device("cpu"))
    width = len(keep) - 1
    draft = Draft(torch.zeros(rows, width, dtype=torch.int64), (width,) * rows)
    logits = torch.zeros(rows, width + 1, VOCAB)
    return accept(Rule("fixed", True, lambda p, scores, draft: distributions), logits, draft, sampler).accepted.tolist()


@pytest.mark.parametrize(
    "keep", [[0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
def test_accept_keeps_as_many_as_the_rule_says_as_often_as_it_says(
    keep: list[float], draws: Callable[[list[float]], None]
) -> None:
    draws([(i + 0.5) / DRAWS for i in range(DRAWS)])
    counts = np.bincount(verdicts(keep, DRAWS), minlength=len(keep))
    assert (counts / DRAWS).tolist() == pytest.approx(keep, abs=1e-9)


@pytest.mark.parametrize("u", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_accept_never_keeps_an_impossible_number(u: float, draws: Callable[[list[float]], None]) -> None:
    for keep in ([0.0, 0.5, 0.5, 0.0], [0.0, 1.0, 0.0, 0.0], [0.3, 0.3 + 4e-16, 0.4, 0.0], [0.0, 0.0, 1 - 1e-16, 0.0]):
        draws([u])
        assert keep[verdicts(keep, 1)[0]] > 0
