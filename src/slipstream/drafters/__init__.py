"""Drafters: anything that proposes tokens. A new one is one file in this folder.

The file name is the drafter's name. The file has a function `build(setup, argument)`, where `argument` is what the
user wrote after a colon ("ngram:5" gives "5"), and returns an object with the one method of `Drafter`.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from typing import Any

import torch

from slipstream.core.interfaces import Drafter
from slipstream.core.session import Session
from slipstream.draft_length.controller import DraftController
from slipstream.errors import UsageError


@dataclass(frozen=True)
class Setup:
    """What a drafter may be built from.

    coupled: draws must share the target's noise (acceptance "match").
    control: given where nobody said how many tokens to draft; knows what pays.
    confidence: a draft model stops at the first token of which it is less sure than this.
    hopes: drafts should say how likely they are to come true, if the drafter can tell.
    target: the target's session, for drafters that share its model or its memory.
    """

    device: torch.device
    vocab_size: int
    session: Session | None = None
    coupled: bool = False
    controller: DraftController | None = None
    confidence: float = 0.0
    acceptance_probs: bool = False
    target: Session | None = None


def names() -> list[str]:
    """The known drafters: the files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def check_name(text: str) -> None:
    """Refuse an unknown drafter, listing the known ones."""
    if text.partition(":")[0] not in ("auto", *names()):
        raise UsageError(f"drafter={text!r}; allowed: {', '.join(['auto', *names()])}, or a Drafter object")


def load(text: str, setup: Setup) -> Drafter:
    """The drafter called `text`, for example "ngram" or "ngram:5"."""
    check_name(text)
    name, _, argument = text.partition(":")
    module: Any = importlib.import_module(f"{__name__}.{name}")
    drafter: Drafter = module.build(setup, argument)
    return drafter
