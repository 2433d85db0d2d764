"""Rounds as the loop records them, for tests of what learns from them."""

from __future__ import annotations

import itertools
from typing import Any

from slipstream.core.rounds import Round
from slipstream.core.types import Row

step_numbers = itertools.count()


def add_round(row: Row, drafted: int = 0, accepted: int = 0, **fields: Any) -> Round:
    """Commit a round of the row alone that accepted the first of its draft tokens; `fields` replace its other facts."""
    tokens = (3,) * (accepted + 1)
    numbers = {"step": next(step_numbers), "num_rows": 1} | fields
    outcome = {"tokens": tokens, "num_accepted_tokens": accepted, "rejected": accepted < drafted}
    round = Round(row=row.index, start=len(row.tokens), draft=(3,) * drafted, **outcome, **numbers)
    row.rounds.append(round)
    row.tokens.extend(tokens)
    return round
