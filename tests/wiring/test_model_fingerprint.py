"""The fingerprint covers everything that a text depends on, and nothing that depends on the speed of the machine."""

from dataclasses import replace
from typing import Any

from slipstream import SpeculativeDecoder
from slipstream.wiring.model_pair import fingerprint_of


def with_shapes(decoder: SpeculativeDecoder, **changes: Any) -> str:
    return fingerprint_of(decoder.target, replace(decoder.shapes, **changes))


def test_the_fingerprint_covers_shapes_that_change_bits_but_not_speed() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    unchanged = fingerprint_of(decoder.target, decoder.shapes)
    assert with_shapes(decoder, alone=(1, 8), totals=(4, 64)) == unchanged
    for changes in ({"attended_unit": 17}, {"chunk": 17}, {"widths": (1, 2)}, {"reuse": 17}):
        assert with_shapes(decoder, **changes) != unchanged, changes
