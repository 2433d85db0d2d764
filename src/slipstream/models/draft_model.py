"""Loading a draft model beside its target."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.models.loaded import PLAN, Loaded, LoadOptions, is_loaded, is_toy
from slipstream.models.loading import load


def load_options_of(config: DecoderConfig) -> LoadOptions:
    """How the target is loaded."""
    own = {"activations": config.activations, "rounding": config.quantize}
    return LoadOptions(config.dtype, config.device, config.fast, config.load_options, **own)


def draft_options_of(config: DecoderConfig) -> LoadOptions:
    """How the draft model is loaded."""
    options = load_options_of(config).for_draft(config.draft_dtype, config.draft_vocabulary)
    return replace(options, extra={name: value for name, value in options.extra.items() if name != PLAN})


def load_draft(draft: Any, config: DecoderConfig, tokenizer: Any = None) -> Loaded | None:
    """The draft model in its own precision, or None if there is none.

    tokenizer: the draft model's, if it is a loaded model and the target's does not serve it.
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
    return load(draft, draft_options_of(config), tokenizer if is_loaded(draft) else None)
