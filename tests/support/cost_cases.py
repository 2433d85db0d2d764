"""Costs of rounds and acceptance with round numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.round_costs import Costs


def linear_costs(base: float = 10.0, per_token: float = 0.5, step: float = 1.0, **changes: Any) -> Costs:
    """A forward takes base + per_token * tokens and 0.25 ms around it, at batches 1, 2, 4, 8 and widths 1 to 17."""
    batches, widths = (1, 2, 4, 8), range(1, 18)
    return replace(
        Costs(
            target={b: {w: base + per_token * b * w for w in widths} for b in batches},
            overhead={b: dict.fromkeys(widths, 0.25) for b in batches},
            draft_step=dict.fromkeys(batches, step),
            draft_round=dict.fromkeys(batches, 0.5),
        ),
        **changes,
    )


RAGGED = Acceptance.by_position([0.9, 0.7, 0.8, 0.5], [0.8, 0.8, 0.6, 0.3])
