"""A user's drafter that fails is asked row by row; tests/end_to_end/test_drafters_of_users.py has the refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from slipstream import Draft, SamplingParams, UsageError
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.models.toy import ToyBackend
from slipstream.sampling.sampler import Sampler
from slipstream.wiring.draft_check import CheckedDrafter

CPU = torch.device("cpu")
BAD = 1  # the index of the row at fault


class Users:
    """Drafts row i's index, with its distribution; several tokens where a tree is asked for."""

    def __init__(self, fails: Any, tree: bool = False) -> None:
        self.fails, self.tree, self.batches = fails, tree, list[list[int]]()

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        self.batches.append([row.index for row in rows])
        assert sampler.rows == list(rows)
        if self.fails(rows, len(self.batches)):
            raise KeyError("row at fault")
        tokens = torch.tensor([[row.index] * max(lengths) for row in rows])
        if self.tree:
            return Draft(tokens, tuple(lengths), parents=tuple(tuple([-1] * length) for length in lengths))
        probs = torch.nn.functional.one_hot(tokens, ToyBackend().vocab_size).float()
        return Draft(tokens, tuple(lengths), probs)


def drafted(drafter: Users, lengths: Sequence[int] = (2, 2, 1)) -> tuple[list[Row], Draft]:
    backend = ToyBackend()
    rows = [Row(i, [9, 8, 7], SamplingParams(max_tokens=9, temperature=0.5), seed=i) for i in range(len(lengths))]
    sampler = Sampler(rows, Race(backend.vocab_size, CPU), backend.vocab_size, CPU)
    return rows, CheckedDrafter(drafter, backend).propose(rows, lengths, sampler)


def has_bad(rows: Sequence[Row], num_calls: int) -> bool:
    return any(row.index == BAD for row in rows)


@pytest.mark.parametrize("tree", [False, True])
def test_only_the_row_at_fault_ends_and_the_others_keep_their_drafts(tree: bool) -> None:
    drafter = Users(has_bad, tree)
    rows, draft = drafted(drafter)
    _, whole = drafted(Users(lambda *_: False, tree))
    assert drafter.batches == [[0, 1, 2], [0], [1], [2]]
    assert [type(row.error) for row in rows] == [type(None), KeyError, type(None)]
    assert draft.lengths == (2, 0, 1)
    for place in (0, 2):
        length = draft.lengths[place]
        assert draft.tokens[place, :length].tolist() == [place] * length
        assert tree or torch.equal(draft.probs[place, :length], whole.probs[place, :length])  # type: ignore[index]
        assert not tree or draft.parents[place] == whole.parents[place]  # type: ignore[index]


def test_an_error_that_does_not_recur_is_no_rows_fault() -> None:
    with pytest.raises(KeyError, match="row at fault"):
        drafted(Users(lambda rows, num_calls: num_calls == 1))


def test_a_keyboard_interrupt_is_not_held_back() -> None:
    def interrupt(rows: Sequence[Row], num_calls: int) -> bool:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        drafted(Users(interrupt))


def test_an_invalid_draft_is_the_rows_error() -> None:
    class Longer(Users):
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
            wrong = [length + (row.index == BAD) for row, length in zip(rows, lengths, strict=True)]
            return Draft.from_lists([[3] * length for length in wrong], CPU)

    rows, draft = drafted(Longer(has_bad))
    assert isinstance(rows[BAD].error, UsageError) and "returned 3 tokens for row 0" in str(rows[BAD].error)
    assert draft.lengths == (2, 0, 1)
