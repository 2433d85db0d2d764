"""Drafters: anything that proposes tokens. A new one is one file (or folder) here.

The file name is the drafter's name. The file has `TRAITS`, what the drafter declares about itself, and
`build(setup, argument)`, which returns an object with the one method of `Drafter`. `argument` is what the user wrote
after a colon: "ngram:5" gives "5". How it is written stands in `ARGUMENTS`, so that `--help` shows it.
Importing this package imports no drafter and no PyTorch.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    import torch

    from slipstream.core.interfaces import Drafter, DraftScorer, Extender
    from slipstream.core.session import Session
    from slipstream.core.types import Traits
    from slipstream.draft_length.planner import Planner
    from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession


ARGUMENTS = {
    "cross_vocabulary": "[:p=PERCENT]",
    "hybrid": "[:STEPS][+SUFFIX]",
    "layer_skip": "[:LAYERS][+p=PERCENT]",
    "model": "[:p=PERCENT]",
    "ngram": "[:N]",
    "ngram_table": "[:N][+fill]",
    "suffix": "[:MIN][+p=PERCENT][+outputs=TOKENS][+store=FILE]",
    "token_recycling": "[:WIDTH]",
}


@dataclass(frozen=True)
class Setup:
    """What a drafter may be built from.

    session: the draft model's. target: the target's, for drafters that share its model or its KV cache.
    bridged: the draft model's over rows of the target, where their vocabularies differ.
    siblings: tokens that may be verified beside each of a one-hot draft. fixed_tree: the user asked for so many, beside
    chains of `depth` tokens.
    coupled: sample with the target's own random numbers (acceptance "match", which "auto" is here).
    planner: given where costs decide how much to draft.
    confidence: a draft model stops at the first token of which it is less confident than this.
    steps: forwards of a draft model in a round at most; extender: goes on behind its drafts.
    acceptance_probs: drafts should say how likely they are to be accepted, if the drafter can tell.
    """

    device: torch.device
    vocab_size: int
    session: DraftScorer | None = None
    coupled: bool = False
    planner: Planner | None = None
    confidence: float = 0.0
    acceptance_probs: bool = False
    target: Session | None = None
    bridged: BridgedSession | None = None
    siblings: int = 0
    fixed_tree: bool = False
    depth: int = 0
    steps: int = MAX_DRAFT_TOKENS
    extender: Extender | None = None


def names() -> list[str]:
    """The known drafters: the files and folders here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_name(text: str) -> None:
    """Refuse an unknown drafter, listing the known ones."""
    name, allowed = text.partition(":")[0], ["auto", *names()]
    if name not in allowed:
        near = did_you_mean(name, *allowed)
        raise UsageError(f"drafter={text!r}; allowed: {', '.join(allowed)}, or a Drafter object{near}")


def traits(text: str) -> Traits:
    """What the drafter called `text` declares about itself."""
    check_name(text)
    return cast("Traits", _module(text).TRAITS)


def traits_of(drafter: str | Drafter) -> Traits:
    """What a drafter declares about itself, given by name or as an object; an object may have no traits of its own."""
    from slipstream.core.types import Declared, Traits

    if isinstance(drafter, str):
        return traits(drafter)
    return drafter.traits if isinstance(drafter, Declared) else Traits()


def preferred(*, draft_model: bool, costs: bool) -> str:
    """What "auto" stands for: the drafter of the highest preference whose needs are met.

    draft_model: there is one. costs: measured costs decide how much to draft.
    """
    by_name = {name: traits(name) for name in names()}
    usable = {
        name: declared.preference
        for name, declared in by_name.items()
        if (draft_model or not declared.needs_draft_model) and (costs or not declared.needs_cost_model)
    }
    return max(usable, key=lambda name: usable[name])


def load(text: str, setup: Setup) -> Drafter:
    """The drafter called `text`, for example "ngram" or "ngram:5"."""
    check_name(text)
    drafter: Drafter = _module(text).build(setup, text.partition(":")[2])
    return drafter


def usage() -> list[str]:
    """How each drafter is written."""
    return [name + ARGUMENTS.get(name, "") for name in names()]


def _module(text: str) -> Any:
    return importlib.import_module(f"{__name__}.{text.partition(':')[0]}")
