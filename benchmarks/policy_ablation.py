"""The mechanisms of `auto` that `policy_replay.py --ablate` removes, one at a time, by replacing what does them."""

from __future__ import annotations

from typing import Any, NamedTuple

from slipstream.draft_length import acceptance_model, costs, planner
from slipstream.drafters.model import model_drafter


class Mechanism(NamedTuple):
    """patches: object, attribute, what takes its place."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...]


def nothing(*_: Any, **__: Any) -> None:
    """Learns nothing."""


def unextended(extender: object, row: object, tokens: list[int], probs: list[float], length: int) -> Any:
    """Nothing behind the draft model's draft."""
    return tokens, probs


NO_ROWS = {"shared": True, "row_step": 0.0}
MECHANISMS = (
    Mechanism(
        "passing over searches that save less than they take", ((planner.Planner, "_searches", lambda *_: True),)
    ),
    Mechanism("trials of what was passed over", ((planner.Pause, "is_due", False),)),
    Mechanism("the first guess of a draft model that is not used", ((acceptance_model.ModelDrafts, "relax", nothing),)),
    Mechanism("what retrieval leaves to the draft model", ((planner, "OWN_TOKENS", 1e9), (planner, "ALL_TOKENS", 1e9))),
    Mechanism("what reading a text takes", ((costs.CostModel, "reading", lambda self, tokens: 0.0),)),
    Mechanism("how long texts get (64 tokens)", ((planner.TextLengths, "learn", nothing),)),
    Mechanism(
        "the row that ends last counts more",
        ((planner, "worth_of_tokens", lambda rows, *_: [planner.Worth()] * len(rows)),),
    ),
    Mechanism("a draft model's sureness, corrected", ((acceptance_model.ModelDrafts, "_learn_chances", nothing),)),
    Mechanism("acceptance by position", ((acceptance_model.Positions, "chance", lambda self, row, position: 1.0),)),
    Mechanism("correction of single shapes", ((costs, "SHAPE", 0.0),)),
    Mechanism("a row's own weight", ((acceptance_model.AcceptanceModel.__init__, "__kwdefaults__", NO_ROWS),)),
    Mechanism("retrieval behind the draft model's draft", ((model_drafter, "extended", unextended),)),
    Mechanism(
        "runner-up tokens of the draft model", ((acceptance_model.ModelDrafts, "runner_up_probs", lambda *_: []),)
    ),
)
