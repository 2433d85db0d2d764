"""Drafters: anything that proposes tokens. A new one is one file (or folder) here.

The file name is the drafter's name; files that begin with an underscore hold what several drafters share. A drafter's
file has `TRAITS`, what it declares about itself, and `build(setup, argument)`, which returns an object with the one
method of `Drafter`, or a list of `Source`s that are asked in turn. `argument` is what the user wrote after a colon:
"ngram:5" gives "5". `ARGUMENTS` has its syntax for `--help`.
Importing this package imports no drafter and no PyTorch.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from functools import cache
from inspect import signature
from typing import TYPE_CHECKING, Any, cast

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.user_objects import is_users, user_object
from slipstream.errors import UsageError, did_you_mean, with_class

if TYPE_CHECKING:
    import torch

    from slipstream.core.interfaces import Drafter, DraftScorer, Extender, Source
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
    """The parts that a drafter may be built from."""

    device: torch.device
    vocab_size: int
    session: DraftScorer | None = None  # the draft model's
    coupled: bool = False  # sample with the target's own random numbers, as acceptance "match" needs
    planner: Planner | None = None  # where costs decide how much to draft
    confidence: float = 0.0  # a draft model stops at the first token whose probability is lower
    acceptance_probs: bool = False  # drafts should carry acceptance probabilities, if the drafter can estimate them
    target: Session | None = None  # for drafters that share the target's model or its KV cache
    bridged: BridgedSession | None = None  # the draft model's, over rows of the target, if their vocabularies differ
    siblings: int = 0  # alternatives to each drafted token that may be verified
    fixed_tree: bool = False  # the user asked for exactly that many, around a chain of `depth` tokens
    depth: int = 0
    steps: int = MAX_DRAFT_TOKENS  # most forward passes of a draft model in a round
    extender: Extender | None = None  # continues a draft model's drafts


def names() -> tuple[str, ...]:
    """The names of all drafters."""
    return _names_in(tuple(__path__))


@cache
def _names_in(folders: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in pkgutil.iter_modules(folders) if not module.name.startswith("_")))


def check_name(text: str) -> None:
    """Raise UsageError, which lists all drafters, unless `text` names one, with an argument only if it takes one."""
    if is_of_user(text):
        user_object("drafter", text)
        return
    name, allowed = text.partition(":")[0], ["auto", *names()]
    if name not in allowed:
        near = did_you_mean(name, *allowed)
        raise UsageError(
            f"drafter={text!r}; allowed: {', '.join(allowed)}, MODULE:NAME, or in Python a Drafter object{near}"
        )
    if ":" in text and name not in ARGUMENTS:
        raise UsageError(f"drafter={text!r}; allowed: {name!r} without an argument")
    if text.endswith(":"):
        raise UsageError(f"drafter={text!r}; allowed: {name}{ARGUMENTS[name]}")


def traits(text: str) -> Traits:
    """The traits of the drafter called `text`; of a user's class, those that the class itself declares."""
    check_name(text)
    if is_of_user(text):
        from slipstream.core.types import Traits

        declared = getattr(user_object("drafter", text), "traits", None)
        return declared if isinstance(declared, Traits) else Traits()
    return cast("Traits", _module(text).TRAITS)


def is_of_user(text: str) -> bool:
    """True if `text` names a drafter outside this package: `module:Name`, or an entry point."""
    return text.partition(":")[0] not in names() and is_users("drafter", text)


def users_drafter(text: str, setup: Setup) -> Drafter:
    """A user's drafter: the object that `text` names, or what the class or function makes of `setup` or of nothing.

    setup: its parts that need no draft model.
    """
    from slipstream.core.interfaces import Drafter

    factory = user_object("drafter", text)
    if isinstance(factory, Drafter) and not isinstance(factory, type):
        return factory
    try:
        parameters = signature(factory).parameters.values()
        takes_setup = any(p.default is p.empty and p.kind <= p.VAR_POSITIONAL for p in parameters)
        drafter = factory(setup) if takes_setup else factory()
    except Exception as error:  # a user's class may raise anything
        raise UsageError(f"drafter={text!r} cannot be made: {with_class(error)}") from error
    if not isinstance(drafter, Drafter):
        raise UsageError(
            f"drafter={text!r} makes {drafter!r:.60}; allowed: an object with propose(rows, lengths, sampler)"
        )
    return drafter


def traits_of(drafter: str | Drafter) -> Traits:
    """The traits of a drafter, a name or an object; an object without traits has the defaults."""
    from slipstream.core.types import Declared, Traits

    if isinstance(drafter, str):
        return traits(drafter)
    if isinstance(drafter, type):
        raise UsageError(f"drafter={drafter!r}; allowed: a name or an object, such as {drafter.__name__}(...)")
    declared = drafter.traits if isinstance(drafter, Declared) else Traits()
    if not isinstance(declared, Traits):
        raise UsageError(f"drafter {type(drafter).__name__} has traits={declared!r:.80}; allowed: a slipstream.Traits")
    return declared


def preferred(*, draft_model: bool, costs: bool) -> str:
    """The drafter that "auto" stands for: the one of the highest preference whose needs are met.

    draft_model: there is one. costs: measured costs decide how much to draft.
    """
    by_name = {name: traits(name) for name in names()}
    usable = {
        name: declared.preference
        for name, declared in by_name.items()
        if (draft_model or not declared.needs_draft_model) and (costs or not declared.needs_cost_model)
    }
    return max(usable, key=lambda name: usable[name])


def load(text: str, setup: Setup) -> Any:
    """The drafter called `text`, for example "ngram" or "ngram:5", or its list of sources."""
    check_name(text)
    return _module(text).build(setup, text.partition(":")[2])


def sources(text: str, setup: Setup) -> list[Source]:
    """The sources of the drafter called `text`; most drafters are one source."""
    from slipstream.core.interfaces import Source

    built = load(text, setup)
    return built if isinstance(built, list) else [Source(built, traits(text).needs_forwards)]


def summary(text: str) -> str:
    """One line on what a drafter does: the first line of its module's docstring, or of a user's object's."""
    check_name(text)
    if is_of_user(text):
        return (
            str(user_object("drafter", text).__doc__ or f"a drafter from outside the package, {text}")
            .partition("\n")[0]
            .rstrip(".")
        )
    return str(_module(text).__doc__).partition("\n")[0].rstrip(".")


def usage() -> list[str]:
    """The spelling of each drafter, with its arguments."""
    return [name + ARGUMENTS.get(name, "") for name in names()]


def _module(text: str) -> Any:
    return importlib.import_module(f"{__name__}.{text.partition(':')[0]}")
