"""The mechanisms of `auto`, and the patches by which `policy_replay.py --ablate` removes one at a time."""

from __future__ import annotations

from typing import Any, NamedTuple

from slipstream.draft_length import acceptance_model, costs, planner
from slipstream.drafters.model import model_drafter


class Mechanism(NamedTuple):
    """patches: (object, attribute, replacement)."""

    name: str
    patches: tuple[tuple[Any, str, Any], ...]


def do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a method that learns."""


def unextended(extender: object, row: object, tokens: list[int], probs: list[float], length: int) -> Any:
    """The draft model's draft, without retrieved tokens after it."""
    return tokens, probs


NO_ROWS = {"shared": True, "row_step": 0.0}
MECHANISMS = (
    Mechanism(
        "passing over searches that save less than they take", ((planner.Planner, "_searches", lambda *_: True),)
    ),
    Mechanism("trying again what was passed over", ((planner.Pause, "is_due", False), (planner, "TRIAL", 0.0))),
    Mechanism(
        "counting what lookups leave to the draft model", ((planner, "OWN_TOKENS", 1e9), (planner, "ALL_TOKENS", 1e9))
    ),
    Mechanism("counting the time to read a text", ((costs.CostModel, "reading", lambda self, tokens: 0.0),)),
    Mechanism(
        "more weight for the row that ends last",
        ((planner, "worth_of_tokens", lambda rows, *_: [planner.Worth()] * len(rows)),),
    ),
    Mechanism(
        "correction of how sure the draft model is", ((acceptance_model.ModelDrafts, "_learn_chances", do_nothing),)
    ),
    Mechanism(
        "chances by position in the draft", ((acceptance_model.Positions, "chance", lambda self, row, position: 1.0),)
    ),
    Mechanism("correction of single shapes", ((costs, "SHAPE", 0.0),)),
    Mechanism("a row's own weight", ((acceptance_model.AcceptanceModel.__init__, "__kwdefaults__", NO_ROWS),)),
    Mechanism("lookups that continue the draft model's draft", ((model_drafter, "extended", unextended),)),
    Mechanism(
        "runner-up tokens of the draft model", ((acceptance_model.ModelDrafts, "runner_up_probs", lambda *_: []),)
    ),
)
