"""Plain decoding: a drafter that proposes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from slipstream.core.interfaces import Sampler
from slipstream.core.types import Draft, Row, Traits
from slipstream.drafters import Setup


@dataclass(frozen=True)
class NoDrafter:
    """Proposes nothing, so that every round commits one token of the target's own."""

    device: torch.device

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return Draft.empty(len(rows), self.device)


TRAITS = Traits(samples=False, needs_forwards=False, default_length=0)


def build(setup: Setup, argument: str) -> NoDrafter:
    """A `NoDrafter`; it takes no argument."""
    return NoDrafter(setup.device)
