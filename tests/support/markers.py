"""Selects the cases of tests: many quick ones in one test, slow ones marked, few of a product of parameters.

A test of a product is marked `pairwise` (each pair of values of two parameters is in some case) or `each_value` (each
value is). `--exhaustive` runs whole products, and the tests marked `exhaustive`.
"""

from __future__ import annotations

import reprlib
import shutil
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import wraps
from inspect import Parameter, signature
from itertools import combinations
from typing import Any

import pytest
import transformers
from packaging.version import Version

from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cpu.processor import NEEDED, processor

STRENGTHS = {"each_value": 1, "pairwise": 2}
needs_avx2 = pytest.mark.skipif(
    shutil.which("cc") is None or not set(NEEDED["avx2"]) <= processor().flags, reason="needs a C compiler and AVX2"
)
needs_kernels = pytest.mark.skipif(kernels() is None, reason="needs a C compiler and a processor with AVX2")


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """`cases` for `parametrize`, marked slow unless they are among `fast`; a tuple has one value per argument."""
    return _marked(cases, fast, pytest.mark.slow)


def mostly_exhaustive(cases: Iterable[Any], *kept: Any) -> list[Any]:
    """Likewise, but only an exhaustive run has the others."""
    return _marked(cases, kept, pytest.mark.exhaustive)


def _marked(cases: Iterable[Any], unmarked: Sequence[Any], mark: pytest.MarkDecorator) -> list[Any]:
    chosen = list(cases)
    assert all(case in chosen for case in unmarked), f"{unmarked} are not all in {chosen}"
    return [
        case if case in unmarked else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=mark)
        for case in chosen
    ]


def needs_transformers(version: str, what: str) -> pytest.MarkDecorator:
    """Skips with older versions, which lack `what` the test compares with."""
    is_older = Version(transformers.__version__) < Version(version)
    return pytest.mark.skipif(is_older, reason=f"{what}: from transformers {version} on")


def subcases(names: str, cases: Iterable[Any], ids: Callable[[Any], str] | None = None) -> Callable[..., Any]:
    """Like `parametrize`, but one test, which runs every case and reports each that fails.

    For many quick cases. They share the fixtures of the test.
    """
    arguments = [name.strip() for name in names.split(",")]
    tuples = [tuple(case) if len(arguments) > 1 else (case,) for case in cases]
    assert tuples and all(len(values) == len(arguments) for values in tuples)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        fixtures = [p for name, p in signature(test).parameters.items() if name not in arguments]

        @wraps(test)
        def run_all(*, subtests: pytest.Subtests, **values: Any) -> None:
            for case in tuples:
                label = ", ".join(map(ids or _shown, case))
                with subtests.test(label):
                    test(**dict(zip(arguments, case, strict=True)), **values)

        keyword = [p.replace(kind=Parameter.KEYWORD_ONLY) for p in fixtures]
        subtests_parameter = Parameter("subtests", Parameter.KEYWORD_ONLY)
        run_all.__signature__ = signature(test).replace(parameters=[*keyword, subtests_parameter])  # type: ignore[attr-defined]
        return run_all

    return decorate


def _shown(value: Any) -> str:
    return getattr(value, "__name__", None) or reprlib.repr(value)


def covering(cases: Sequence[tuple[Hashable, ...]], strength: int) -> list[int]:
    """Indices of few cases that contain every combination of `strength` values found in any case.

    Chosen greedily; of cases that add equally many, the first is taken.
    """

    def combos(case: tuple[Hashable, ...]) -> set[Any]:
        return set(combinations(enumerate(case), min(strength, len(case))))

    missing = set().union(*map(combos, cases))
    indices: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(combos(cases[i]) & missing))
        indices.append(best)
        missing -= combos(cases[best])
    return sorted(indices)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The items that only an exhaustive run has."""
    groups: dict[tuple[str, str], list[pytest.Item]] = {}
    deselected = []
    for item in items:
        if item.get_closest_marker("exhaustive"):
            deselected.append(item)
            continue
        for mark in STRENGTHS:
            if item.get_closest_marker(mark):
                groups.setdefault((item.nodeid.partition("[")[0], mark), []).append(item)
    for (_, mark), group in groups.items():
        group.sort(key=lambda item: item.get_closest_marker("slow") is not None)  # stable, so fast cases are preferred
        cases = [tuple(map(id, item.callspec.params.values())) for item in group]  # type: ignore[attr-defined]
        covering_cases = set(covering(cases, STRENGTHS[mark]))
        deselected += [item for i, item in enumerate(group) if i not in covering_cases]
    return deselected
