"""The decoder of a pair of loaded models, kept on the target model so that the next call finds it.

A decoder holds its models, so a table elsewhere, weak or not, would keep them alive. On the target it lives exactly as
long as that model: when the last user drops it, Python's cycle collector frees both. A drafter is held until another
one takes its place or the target goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from slipstream import drafters
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError

ATTRIBUTE = "_slipstream_held"
MAX_ROWS = 1024  # the caller chooses the batch; memory is reserved for the rows there are
State = tuple[torch.device, torch.dtype, torch.Size] | None


@dataclass(eq=False)
class Held:
    """A decoder and what it was built for; copies and pickles of the model go without it."""

    decoder: SpeculativeDecoder | None = None
    drafter: Module | None = None
    states: tuple[State, State] = (None, None)

    def __deepcopy__(self, slot_state: dict[int, Any]) -> Held:
        return Held()

    def __reduce__(self) -> tuple[type[Held], tuple[()]]:
        return Held, ()


def decoder_for(target: Module, drafter: Module | None, tokenizer: Any = None) -> SpeculativeDecoder:
    """The decoder over these models, with an empty memory; built anew if the models were moved, cast or resized.

    drafter: None takes any decoder of the target, for requests that draft nothing. tokenizer: vouches for both models
    where their heads differ in size.
    """
    for name, model in (("target", target), ("drafter", drafter)):
        if not isinstance(model, Module) and (name == "target" or model is not None):
            raise UsageError(
                f"{name} is a {type(model).__name__}; allowed: a loaded Hugging Face causal language model"
            )
    held: Held = vars(target).setdefault(ATTRIBUTE, Held())
    drafter = held.drafter if drafter is None else drafter
    states = _state(target), _state(drafter)
    if held.decoder is None or held.drafter is not drafter or held.states != states:
        held.decoder = None  # frees the old memory first
        held.decoder = SpeculativeDecoder(
            target,
            drafter,
            tokenizer=tokenizer,
            drafter="none" if drafter is None else "model",
            num_draft_tokens=0
            if drafter is None
            else drafters.traits("model").default_length,  # requests say their own
            fast=False,
            reproducible=False,
            max_batch_size=MAX_ROWS,
        )
        held.drafter, held.states = drafter, states
    held.decoder.forget()
    return held.decoder


def _state(model: Module | None) -> State:
    """Where the model is, in which precision, and the size of its first weight (the embedding)."""
    weight = None if model is None else next(model.parameters(), None)
    return None if weight is None else (weight.device, weight.dtype, weight.shape)
