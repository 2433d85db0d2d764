"""Which cases of a test the fast part has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def mostly_slow(cases: Iterable[Any], *fast: Any) -> list[Any]:
    """`cases` for `parametrize`, marked slow where they are none of `fast`; a tuple has one value per argument."""
    chosen = list(cases)
    assert all(case in chosen for case in fast), f"{fast} are not all in {chosen}"
    return [case if case in fast else _slow(case) for case in chosen]


def _slow(case: Any) -> Any:
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
