"""The mechanisms of `auto` that `policy_replay.py --ablate` removes, one at a time, by replacing what does them."""

from __future__ import annotations

from typing import Any, NamedTuple

from slipstream.draft_length import acceptance_model, costs, planner, row_history
from slipstream.drafters import hybrid
from slipstream.drafters.suffix import suffix_drafter


class Mechanism(NamedTuple):
    """patches: object, attribute, what takes its place."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...]


def nothing(*_: Any, **__: Any) -> None:
    """Learns nothing."""


NO_ROWS = {"shared": True, "common": False, "row_step": 0.0}
MECHANISMS = (
    Mechanism(
        "optimism about forwards not made lately",
        ((costs.CostModel, "optimistic", lambda self, rows, longest, n: self.verify(rows, longest, n)),),
    ),
    Mechanism("doubt about reading that kept a text unread", ((costs.CostModel, "doubt_drafting", nothing),)),
    Mechanism("yields relax in rounds without news", ((acceptance_model.DraftYields, "relax", nothing),)),
    Mechanism("quiet rounds: looking less where nothing is found", ((row_history.QuietRounds, "learn", nothing),)),
    Mechanism("backoff: every round is a trial", ((row_history.Backoff, "due", lambda self, row: True),)),
    Mechanism("backoff: no trials", ((row_history.Backoff, "due", lambda self, row: False),)),
    Mechanism("what retrieval leaves to the draft model", ((row_history.LeftToModel, "learn", nothing),)),
    Mechanism("how long texts get (64 tokens)", ((row_history.TextLengths, "learn", nothing),)),
    Mechanism(
        "the row that ends last counts more",
        ((planner, "worth_of_tokens", lambda rows, *_: [planner.Worth()] * len(rows)),),
    ),
    Mechanism("confidence corrected by what was accepted", ((acceptance_model.Confidence, "learn", nothing),)),
    Mechanism("acceptance by position", ((acceptance_model.DraftYields, "at", lambda self, row, position: 1.0),)),
    Mechanism("correction of single shapes", ((costs, "SHAPE", 0.0),)),
    Mechanism("what drafted tokens cost, learned", ((costs, "COST_DRIFT", 0.0), (costs, "UNSURE", 1e-6))),
    Mechanism("a row's own weight", ((acceptance_model.AcceptanceModel.__init__, "__kwdefaults__", NO_ROWS),)),
    Mechanism("greedy rows' common weight for matches", ((acceptance_model, "COMMON_STEP", 0.0),)),
    Mechanism("retrieval behind the draft model's draft", ((hybrid, "_extended", lambda by, rows, n, draft: draft),)),
    Mechanism(
        "matches end where they cannot pay",
        (
            (suffix_drafter, "CERTAIN", 2.0),
            (planner.DraftController, "least_useful", lambda self, rows: [0.0] * len(rows)),
        ),
    ),
    Mechanism("runner-up tokens beside matches", ((suffix_drafter, "BRANCHES", 0),)),
)
