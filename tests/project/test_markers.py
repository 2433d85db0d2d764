"""Selection of cases: pairwise coverage of products, and tables that form one test."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from tests.support.markers import covering, left_out, subcases

SIZES = [(10, 2, 2), (3, 10, 2, 2), (7, 3, 3), (5,), (4, 4)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_pair_of_values_is_in_a_chosen_case(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[i] for i in covering(cases, 2)]
    for i, j in combinations(range(len(sizes)), 2):
        assert {(case[i], case[j]) for case in chosen} == set(product(range(sizes[i]), range(sizes[j])))
    assert len(chosen) <= 1.5 * max((a * b for a, b in combinations(sizes, 2)), default=sizes[0])


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_each_value_is_in_a_chosen_case(sizes: tuple[int, ...]) -> None:
    cases = list(product(*map(range, sizes)))
    chosen = [cases[i] for i in covering(cases, 1)]
    assert all({case[i] for case in chosen} == set(range(size)) for i, size in enumerate(sizes))
    assert len(chosen) == max(sizes)


PRODUCT = """
import pytest
from tests.support.markers import mostly_slow, subcases

@pytest.mark.pairwise
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize(("b", "c"), [(1, True), (1, False)])
@pytest.mark.parametrize("d", mostly_slow([1, 2], 2))
def test_product(a, b, c, d): ...

@pytest.mark.exhaustive
def test_all(): ...

@subcases("value, square", [(1, 1), (2, 4), (3, 8), (4, 15)])
def test_squares(value, square, tmp_path):
    assert value * value == square
"""


def test_markers_leave_out_cases_and_subcases_report_each_failure(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nmarkers =\n    pairwise\n    exhaustive\n    slow")
    plugin = "from tests.support.markers import left_out\n\ndef pytest_collection_modifyitems(items):\n"
    pytester.makeconftest(plugin + "    gone = left_out(items)\n    items[:] = [i for i in items if i not in gone]\n")
    pytester.makepyfile(PRODUCT)
    outcome = pytester.runpytest("-k", "product or all")
    assert outcome.parseoutcomes()["passed"] in (4, 5)  # of eight
    outcome = pytester.runpytest("-k", "squares")
    outcome.assert_outcomes(failed=3)
    outcome.stdout.fnmatch_lines(["SUBFAILED*3, 8*", "SUBFAILED*4, 15*"])


def test_a_test_without_markers_is_never_left_out(request: pytest.FixtureRequest) -> None:
    assert left_out([request.node]) == []
    with pytest.raises(AssertionError):
        subcases("a", [])
