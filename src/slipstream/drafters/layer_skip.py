"""Drafts with the target's first layers, or a choice of layers, and its final norm and head: without further weights.

Skipping layers of the target to draft: Zhang et al. 2023, "Draft & Verify" (arXiv:2309.08168); leaving after the first
ones: Elhoushi et al. 2024, "LayerSkip" (arXiv:2404.16710).

Weights and KV cache are the target's: the chosen layers read its keys and values of the committed tokens. What they
write is overwritten by the verification of the same round, in every layer and before anything reads it, so the target's
forwards see only what the target itself wrote.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import copy

from torch import Tensor

from slipstream.core.interfaces import Backend, DraftScorer
from slipstream.core.session import Session
from slipstream.core.types import Row, Traits
from slipstream.drafters import Setup
from slipstream.drafters.model.model_drafter import ModelDrafter, stop_for
from slipstream.errors import UsageError
from slipstream.models.backend_capabilities import LayerSubsets

SHARE = 0.75  # of the layers
ARGUMENT = re.compile(r"(?:(\d+|\d+-\d+|\d+(?:-\d+)?(?:,\d+(?:-\d+)?)+)(?:\+p=(\d{1,2}))?|p=(\d{1,2}))?")
TRAITS = Traits(default_length=4)


class SharedCacheSession(DraftScorer):
    """Scores drafts with some layers of the target, which read the target's KV cache of the committed tokens.

    A draft begins with a call without draft tokens, which forgets what the last one wrote. Between two calls the target
    must score no other rows.
    """

    def __init__(self, target: Session, layers: Sequence[int]) -> None:
        """layers: numbers from 0 on, rising."""
        self._target, self._layers = target, Session(layered(target.backend).layer_subset(layers))
        self.backend = self._layers.backend
        self._layers.table.audit = target.table.audit  # one cache, one audit

    def score(self, rows: Sequence[Row], draft: Tensor, lengths: Sequence[int], keep: int | None = None) -> Tensor:
        if not draft.shape[1]:
            self._begin(rows)
        return self._layers.score(rows, draft, lengths, keep)

    def draft_greedy(self, rows: Sequence[Row], steps: int, vocab_size: int) -> Tensor | None:
        self._begin(rows)
        return self._layers.draft_greedy(rows, steps, vocab_size)

    def keep_drafts(self, lengths: Sequence[int]) -> None:
        self._layers.keep_drafts(lengths)

    def _begin(self, rows: Sequence[Row]) -> None:
        """A new draft begins where the target's cache ends."""
        self._target.prefill(rows)
        self._layers.slot_states[:] = map(copy, self._target.slot_states)


def parse_layers(text: str, count: int) -> tuple[int, ...]:
    """Numbers of some of `count` layers: "8" are the first 8, "0-7,12" the numbers 0 to 7 and 12."""
    if text.isdigit():
        if not 1 <= int(text) <= count:
            raise UsageError(f"drafter='layer_skip:{text}'; allowed: from 1 to {count} layers")
        return tuple(range(int(text)))
    layers: list[int] = []
    for first, _, last in (part.partition("-") for part in text.split(",")):
        span = range(int(first), int(last or first) + 1)
        if not span or span[-1] >= count or (layers and span[0] <= layers[-1]):
            raise UsageError(
                f"drafter='layer_skip:{text}'; allowed: layers from 0 to {count - 1}, each once, lower numbers first"
            )
        layers += span
    return tuple(layers)


def build(setup: Setup, argument: str) -> ModelDrafter:
    """ "layer_skip", "layer_skip:LAYERS" or "layer_skip:FIRST-LAST,..."; "+p=PERCENT" after them stops early.

    Without layers: the first three quarters. Drafts stop as those of `model` do.
    """
    match = ARGUMENT.fullmatch(argument)
    if match is None:
        raise UsageError(
            f"drafter='layer_skip:{argument}'; allowed: layer_skip, layer_skip:LAYERS (the first ones), "
            "a list like layer_skip:0-7,12, each with +p=PERCENT from 0 to 99, or layer_skip:p=PERCENT"
        )
    if setup.target is None:
        raise UsageError(
            "drafter='layer_skip' drafts with the target's layers; allowed: a setup with the target's session"
        )
    count = layered(setup.target.backend).num_layers
    first = range(max(1, min(count - 1, round(SHARE * count))))  # at least one and, of several, not all
    layers = tuple(first) if match[1] is None else parse_layers(match[1], count)
    percent = match[2] or match[3]
    session = SharedCacheSession(setup.target, layers)
    return ModelDrafter(session, setup.vocab_size, setup.coupled, stop_for(setup, int(percent) if percent else None))


def layered(backend: Backend) -> LayerSubsets:
    """A backend that can run with some of its layers; UsageError for others."""
    if not isinstance(backend, LayerSubsets):
        raise UsageError(
            f"drafter='layer_skip': {type(backend).__name__} cannot run with some of its layers; allowed: models whose "
            "KV cache is written by position, toy, or another drafter"
        )
    return backend
