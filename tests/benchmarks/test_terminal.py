"""The values that options of the benchmarks accept."""

import pytest
from terminal import numbers

from slipstream.errors import UsageError
from tests.support.markers import subcases

pytestmark = pytest.mark.exhaustive


def test_numbers_are_read_in_order_without_duplicates() -> None:
    assert numbers("--widths", "8,1,8,16") == [8, 1, 16]


@subcases("text", ["", "0", "1,,2", "1,x", "-3", "1.5", "1 2"])
def test_invalid_numbers_are_refused_with_the_option_and_what_is_allowed(text: str) -> None:
    with pytest.raises(UsageError) as refusal:
        numbers("--widths", text)
    assert str(refusal.value) == f"--widths {text!r}; allowed: whole numbers from 1 on, separated by commas"
