"""The fingerprint of what a text depends on: not of what the machine's speed decides."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from slipstream import SpeculativeDecoder
from slipstream.wiring.model_fingerprint import fingerprint_of


def with_shapes(decoder: SpeculativeDecoder, **changes: Any) -> Any:
    return SimpleNamespace(target=decoder.target, shapes=replace(decoder.shapes, **changes))


def test_it_is_that_of_the_bits_and_not_of_the_widths_that_pay() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    own = fingerprint_of(decoder)
    assert fingerprint_of(with_shapes(decoder, alone=(1, 8), totals=(4, 64))) == own
    for changes in ({"attended_unit": 17}, {"chunk": 17}, {"widths": (1, 2)}, {"reuse": 17}):
        assert fingerprint_of(with_shapes(decoder, **changes)) != own, changes
