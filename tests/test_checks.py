"""What counts as a whole number, a number and a text, and how other values are refused."""

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from slipstream.checks import check_choice, check_whole, is_number, is_text, is_whole, why_no_file, why_no_folder
from slipstream.errors import UsageError


@pytest.mark.parametrize(
    ("value", "whole", "number"),
    [
        (0, True, True),
        (7, True, True),
        (-1, False, True),
        (True, False, False),
        (1.0, False, True),
        (math.nan, False, False),
        (math.inf, False, False),
        (10**400, True, True),
        ("1", False, False),
        (None, False, False),
    ],
)
def test_booleans_texts_and_infinity_are_not_numbers(value: Any, whole: bool, number: bool) -> None:
    assert (is_whole(value), is_number(value)) == (whole, number)


def test_bounds_are_inclusive() -> None:
    assert is_whole(3, 3, 3) and not is_whole(2, 3) and not is_whole(4, 3, 3)
    assert is_number(0.5, 0.5, 0.5) and not is_number(0.4, 0.5) and not is_number(0.6, 0.5, 0.5)


def test_a_lone_surrogate_is_not_text() -> None:
    assert is_text("a\U0001f680") and not any(map(is_text, ("", "a\ud800", b"a", 1)))


def test_a_refusal_names_the_value_and_what_is_allowed() -> None:
    check_whole("n", "auto", 1, words=("auto",))
    check_choice("dtype", "auto", ("auto", "float32"))
    for refused, message in (
        (lambda: check_whole("n", 0, 1), "n=0; allowed: a whole number, 1 or more"),
        (lambda: check_whole("n", 9, 1, 8), "n=9; allowed: a whole number from 1 to 8"),
        (
            lambda: check_whole("n", "all", words=("auto", "full")),
            "n='all'; allowed: 'auto', 'full' or a whole number, 0 or more",
        ),
        (
            lambda: check_choice("dtype", "flaot32", ("auto", "float32")),
            "dtype='flaot32'; allowed: auto, float32; did you mean 'float32'?",
        ),
    ):
        with pytest.raises(UsageError) as refusal:
            refused()
        assert str(refusal.value) == message


def test_a_read_only_file_system_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: False)
    assert why_no_file(tmp_path / "x") == f"no permission to write into {str(tmp_path)!r}"
    monkeypatch.setattr("os.statvfs", lambda path: SimpleNamespace(f_flag=os.ST_RDONLY))
    assert why_no_file(tmp_path / "x") == why_no_folder(tmp_path) == "read-only file system"
