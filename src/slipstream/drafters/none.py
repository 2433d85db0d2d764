"""Plain decoding: no source of drafts."""

from __future__ import annotations

from slipstream.core.interfaces import Source
from slipstream.core.types import Traits
from slipstream.drafters import Setup

TRAITS = Traits(samples=False, needs_forwards=False, default_length=0)


def build(setup: Setup, argument: str) -> list[Source]:
    """No source, so that every round commits one token of the target's own; takes no argument."""
    return []
