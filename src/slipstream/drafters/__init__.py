"""Drafters: anything that proposes tokens. A new one is one file (or folder) here.

The file name is the drafter's name. The file has `USAGE`, how a user writes it; `TRAITS`, what it declares about
itself; and `build(setup, argument)`, where `argument` is what the user wrote after a colon ("ngram:5" gives "5"), which
returns an object with the one method of `Drafter`. Importing this package imports no drafter and no PyTorch.
"""

from __future__ import annotations

import ast
import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from pathlib import Path
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


@dataclass(frozen=True)
class Setup:
    """What a drafter may be built from.

    session: the draft model's. target: the target's, for drafters that share its model or its KV cache.
    bridged: the draft model's over rows of the target, where their vocabularies differ.
    siblings: tokens that may be verified beside each of a one-hot draft. shaped: the user asked for so many, beside
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
    shaped: bool = False
    depth: int = 0
    steps: int = MAX_DRAFT_TOKENS
    extender: Extender | None = None


def names() -> list[str]:
    """The known drafters: the files and folders here."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_name(text: str) -> None:
    """Refuse an unknown drafter, listing the known ones."""
    name, known = text.partition(":")[0], ["auto", *names()]
    if name not in known:
        near = did_you_mean(name, *known)
        raise UsageError(f"drafter={text!r}; allowed: {', '.join(known)}, or a Drafter object{near}")


def traits(text: str) -> Traits:
    """What the drafter called `text` declares about itself."""
    check_name(text)
    return cast("Traits", _module(text).TRAITS)


def traits_of(drafter: str | Drafter) -> Traits:
    """The same of a name or of an object, which may declare `traits`; the defaults assume the worst of others."""
    from slipstream.core.types import Declared, Traits

    if isinstance(drafter, str):
        return traits(drafter)
    return drafter.traits if isinstance(drafter, Declared) else Traits()


def preferred(*, draft_model: bool, costs: bool) -> str:
    """What "auto" stands for: the drafter of the highest preference whose needs are met.

    draft_model: there is one. costs: measured costs decide how much to draft.
    """
    known = {name: traits(name) for name in names()}
    usable = [
        name
        for name, one in known.items()
        if one.preference and (draft_model or not one.needs_draft_model) and (costs or not one.needs_costs)
    ]
    return max(usable, key=lambda name: known[name].preference)


def load(text: str, setup: Setup) -> Drafter:
    """The drafter called `text`, for example "ngram" or "ngram:5"."""
    check_name(text)
    drafter: Drafter = _module(text).build(setup, text.partition(":")[2])
    return drafter


@cache
def usage() -> tuple[str, ...]:
    """How each drafter is written, read from the source, so that `--help` need not import PyTorch."""
    folder = Path(__file__).parent
    found = []
    for name in names():
        files = [folder / f"{name}.py", folder / name / f"{name}_drafter.py"]
        source = ast.parse(next(file for file in files if file.is_file()).read_text(encoding="utf-8"))
        found += [
            str(ast.literal_eval(node.value))
            for node in source.body
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "USAGE"
        ]
    return tuple(found)


def _module(text: str) -> Any:
    return importlib.import_module(f"{__name__}.{text.partition(':')[0]}")
