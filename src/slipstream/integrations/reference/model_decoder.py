"""The decoder that the reference functions use for a pair of loaded models."""

from __future__ import annotations

from typing import Any

from torch.nn import Module

from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.integrations.decoder_cache import DecoderSettings, cached_settings, decoder_for

MAX_ROWS = 1024  # the caller chooses the batch; memory is reserved for the rows there are


def decoder_of(target: Module, drafter: Module | None, tokenizer: Any = None) -> SpeculativeDecoder:
    """The cached decoder over these models, with an empty KV cache.

    drafter: None takes the one of the last call, for requests that draft nothing. tokenizer: vouches for both models
    where their heads differ in size.
    """
    for name, model in (("target", target), ("drafter", drafter)):
        if not isinstance(model, Module) and (name == "target" or model is not None):
            raise UsageError(
                f"{name} is a {type(model).__name__}; allowed: a loaded Hugging Face causal language model"
            )
    last = cached_settings(target)
    if last is not None and last.max_batch_size == MAX_ROWS and drafter in (None, last.draft) and tokenizer is None:
        settings = last
    else:
        settings = DecoderSettings(
            draft=drafter,
            tokenizer=tokenizer,
            drafter="none" if drafter is None else "model",
            num_draft_tokens=0 if drafter is None else 1,  # requests say their own
            max_batch_size=MAX_ROWS,
        )
    decoder = decoder_for(target, settings)
    decoder.forget()
    return decoder
