"""Loading a draft model beside its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded, LoadOptions, is_loaded, is_toy
from slipstream.models.loading import load


def load_options_of(config: DecoderConfig) -> LoadOptions:
    """How the target is loaded."""
    own = {"activations": config.activations, "rounding": config.quantize}
    return LoadOptions(config.dtype, config.device, config.fast, config.load_options, **own)


def draft_options_of(config: DecoderConfig, beside: torch.device | None = None) -> LoadOptions:
    """How the draft model is loaded. beside: where the target is, if its load options have put it there."""
    options = load_options_of(config).for_draft(config.draft_dtype, config.draft_vocabulary)
    if "device_map" in config.load_options and options.device == "auto" and beside is not None:
        options = replace(options, device=str(beside))  # the map names the target's layers
    return options


def load_draft(
    draft: Any, config: DecoderConfig, tokenizer: Any = None, *, beside: torch.device | None = None
) -> Loaded | None:
    """The draft model in its own precision, or None if there is none.

    tokenizer: the draft model's; None where one lies beside it, or none is needed. beside: where the target
    is, if its load options have put it there.
    """
    dtype, vocabulary = config.draft_dtype, config.draft_vocabulary
    if dtype != "auto":
        allowed = None if draft is None or is_toy(draft) else ("int4", "int8") if is_loaded(draft) else (dtype,)
        if allowed is None or dtype not in allowed:
            loaded = "the toy model has no weights" if is_toy(draft) else "the draft model is loaded already"
            what = "there is no draft model" if draft is None else loaded
            raise UsageError(f"draft_dtype={dtype!r}, but {what}; allowed: {', '.join(('auto', *(allowed or ())))}")
    if vocabulary not in ("auto", "full") and (draft is None or is_toy(draft)):
        what = "there is no draft model" if draft is None else "the toy model has no output layer"
        raise UsageError(f"draft_vocabulary={vocabulary!r}, but {what}; allowed: 'auto' or 'full'")
    if draft is None:
        return None
    return load(draft, draft_options_of(config, beside), tokenizer)
