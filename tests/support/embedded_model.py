"""The embedded default model, loaded once for all tests of a process that take it as it is."""

from __future__ import annotations

from functools import cache

from slipstream import SpeculativeDecoder


@cache
def loaded() -> SpeculativeDecoder:
    """Tests decode with its `using(...)`, which shares the models but nothing learned."""
    return SpeculativeDecoder("smollm2")
