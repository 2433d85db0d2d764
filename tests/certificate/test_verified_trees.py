"""Certificates of decoders whose drafts are trees: the wrong rules they are tested against take chains."""

import pytest

from slipstream.certificate.distribution_checks import _chain


@pytest.mark.parametrize(("wanted", "length"), [("2x2", 4), ("4x2", 8), (3, 3), ("auto", "auto"), ("chain", "chain")])
def test_a_tree_is_as_long_a_chain(wanted: int | str, length: int | str) -> None:
    assert _chain(wanted) == length
