"""Drafters: anything that proposes tokens. A new one is one file in this folder.

The file name is the drafter's name. The file has a function `build(setup, argument)`, where `argument` is what the
user wrote after a colon ("ngram:5" gives "5"), and returns an object with the one method of `Drafter`.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from slipstream.control import Control
from slipstream.sampling import Sampler
from slipstream.session import Session
from slipstream.types import Draft, Row, UsageError, Verdict


@runtime_checkable
class Drafter(Protocol):
    """Proposes how the rows go on."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """Up to lengths[i] tokens for row i, as a `Draft` on the target's device.

        Fewer are always allowed. The target's output law rests on one promise: `Draft.probs` is the law the tokens
        were drawn from, or None if they were not drawn at all.
        """


@runtime_checkable
class Observer(Protocol):
    """What a drafter is besides if it wants to see what the target made of its drafts."""

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        """Called after every verdict, before its tokens are committed. logits: [B, K + 1, V], the target's.

        Position j of a row follows its first j draft tokens. Everything is still on the device: reading it waits.
        """


@runtime_checkable
class Continuation(Protocol):
    """What a drafter is besides if it can go on behind another one's draft."""

    def goes_on(self, row: Row, tokens: Sequence[int], length: int, hope: float) -> tuple[list[int], list[float]]:
        """Up to `length` tokens behind `tokens`, and the chances that all up to each come true.

        hope: the chance that `tokens` do. Asked in a round in which `propose` was asked before.
        """


@runtime_checkable
class Learner(Protocol):
    """What a drafter is besides if it keeps what it learned from earlier requests."""

    def forget(self) -> None:
        """Drop it."""


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
    control: Control | None = None
    confidence: float = 0.0
    hopes: bool = False
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
