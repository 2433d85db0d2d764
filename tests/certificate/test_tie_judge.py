"""Ties and bugs are told apart by full precision, not by hope."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.certificate.parity import CEILING, Difference, explain, first_difference

PROMPT, EXPECTED, GOT = [1, 2, 3, 4], [5, 6, 7], [5, 6, 8]
VOCAB = 20


def exact(second: float) -> Tensor:
    """Logits whose best token is 7, with token 8 `second` below it and the others far below."""
    logits = torch.full((VOCAB,), -9.0)
    logits[7], logits[8] = 3.0, 3.0 - second
    return logits


def judged(gap: float, errors: list[float], dtype: torch.dtype = torch.bfloat16) -> Difference:
    """errors: of token 8, at the position of the difference and at those before it."""

    def working(ids: list[int]) -> Tensor:
        rounded = exact(gap)
        rounded[8] += (errors + [0.0] * 9)[len(PROMPT) + 2 - len(ids)]
        return rounded

    found = explain(PROMPT, EXPECTED, GOT, lambda ids, n: exact(gap).expand(n, -1), working, dtype)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("expected", "got", "at"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [1], 0)]
)
def test_first_difference(expected: list[int], got: list[int], at: int | None) -> None:
    assert first_difference(expected, got) == at


def test_a_gap_within_rounding_is_a_tie() -> None:
    found = judged(0.1, [0.08, 0.0, 0.0, 0.0])
    assert (found.position, found.expected, found.got, found.tie) == (2, 7, 8, True)
    assert found.expected_gap == 0 and found.got_gap == pytest.approx(0.1)


def test_a_lucky_position_does_not_hide_the_rounding_of_its_neighbours() -> None:
    assert judged(0.1, [0.0, 0.0, 0.08, 0.0]).tie


@pytest.mark.parametrize("gap", [0.2, 1.0, 3.0])
def test_a_gap_beyond_rounding_is_no_tie(gap: float) -> None:
    assert not judged(gap, [0.04, 0.05, 0.03, 0.05]).tie


def test_no_rounding_explains_a_gap_above_the_ceiling() -> None:
    assert not judged(CEILING[torch.bfloat16] + 0.1, [9.0] * 4).tie
    assert not judged(CEILING[torch.float32] * 2, [9.0] * 4, torch.float32).tie


def test_a_text_that_goes_on_after_the_others_end_is_no_tie() -> None:
    found = explain(PROMPT, [5], [5, 6], lambda ids, n: exact(0).expand(n, -1), lambda ids: exact(0), torch.bfloat16)
    assert found == Difference(1, None, 6)
    assert explain(PROMPT, [5], [5], lambda ids, n: exact(0), lambda ids: exact(0), torch.bfloat16) is None
