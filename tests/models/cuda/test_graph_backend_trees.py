"""Draft trees in captured forwards give the logits of eager ones."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream.core.trees import segments_of
from slipstream.models.cuda.indexed_cache import TreeTable
from tests.support.graph_cases import MODELS, STARTS, Case

pytestmark = pytest.mark.slow

PARENTS = [
    [(-1, 0, 1, 1, 3, -1)],
    [(-1, -1, 1, 2, 1), (-1, 0)],
    [(-1, 0, 1, 2, 3, 4, 2, 6, 7, -1), (-1,), (-1, -1, -1)],
]


def both_trees(case: Case, parents: Sequence[tuple[int, ...]], num_uncached: int) -> tuple[Tensor, Tensor]:
    """Logits of trees after `num_uncached` committed tokens that are not cached, eager and captured."""
    bases = [start + num_uncached for start in STARTS[: len(parents)]]
    segments = [
        segment
        for slot, (base, row_parents) in enumerate(zip(bases, parents, strict=True))
        for segment in segments_of(slot, base - num_uncached, base, row_parents)
    ]
    tokens = case.tokens(1, sum(segment.count for segment in segments))[0]
    eager, captured = (backend.forward_tree(tokens, segments, widths=None) for backend in (case.eager, case.graphed))
    return eager, captured


@pytest.mark.each_value
@pytest.mark.parametrize("parents", PARENTS)
@pytest.mark.parametrize("name", MODELS)
def test_captured_trees_give_the_logits_of_eager_ones(name: str, parents: list[tuple[int, ...]]) -> None:
    case = Case(name, length=300)
    for num_uncached in (1, 3):
        for _ in range(2):  # captured, then replayed on other tokens
            expected, got = both_trees(case, parents, num_uncached)
            assert got.shape == expected.shape
            assert (expected - got).abs().max() < 1e-4
        for backend in (case.eager, case.graphed):
            backend.move(0, [STARTS[0] + num_uncached + 3], STARTS[0] + num_uncached + 1)
        expected, got = case.both(case.tokens(1, 2), [STARTS[0] + num_uncached + 2])
        assert (expected - got).abs().max() < 1e-4
    assert 0 < case.tape.captured < case.tape.replayed


@pytest.mark.parametrize("name", MODELS)
def test_branches_that_attend_to_each_other_are_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    padded = TreeTable.padded

    def seeing_all(table: TreeTable, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        depths, visible, ancestors = padded(table, rows, width)
        return depths, torch.ones_like(visible), ancestors

    monkeypatch.setattr(TreeTable, "padded", seeing_all)
    expected, got = both_trees(Case(name, length=300), PARENTS[2], 1)
    assert (expected - got).abs().max() > 1e-2


def test_wide_trees_run_eagerly() -> None:
    case = Case("llama", length=300)
    expected, got = both_trees(case, [(-1,) * 40], 1)
    assert torch.equal(expected, got)
    assert case.tape.captured == 0
