"""Speculative decoding inside Hugging Face `generate`: `model.generate(..., custom_generate=slipstream.custom_generate)`.

`generate` (transformers 5.17 to 5.23) prepares inputs, processors and criteria as ever; only its loop is replaced.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary, proxy

import torch
from torch import Tensor
from transformers import GenerationMixin
from transformers.generation import GenerateDecoderOnlyOutput, MaxTimeCriteria, StopStringCriteria

from slipstream.acceptance import Rule
from slipstream.backends import Loaded
from slipstream.config import DecoderConfig
from slipstream.decoder import SpeculativeDecoder
from slipstream.drafters import Drafter
from slipstream.hf_options import Options, PaddedPrompt, refuse_options
from slipstream.stats import Stats
from slipstream.types import Row, UsageError

GENERATE = inspect.unwrap(GenerationMixin.generate).__code__
UNUSED = ("use_cache", "logits_to_keep", "attention_mask", "position_ids")  # read elsewhere or of no effect on the text


class Decoders:
    """One decoder per target and draft model, which are held weakly: a decoder goes when either of them goes."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Any, WeakKeyDictionary[Any, tuple[object, SpeculativeDecoder]]]
        self._kept = WeakKeyDictionary()

    def of(self, model: Any, settings: CustomGenerate) -> SpeculativeDecoder:
        """The decoder made before, unless a model has moved or changed its size or precision since."""
        draft = settings.draft
        models = [model, draft] if isinstance(draft, torch.nn.Module) else [model]
        for one in models:
            if one.training:
                raise UsageError(f"model {type(one).__name__} is in training mode; allowed: after model.eval()")
        key = (settings.max_batch_size, id(settings.tokenizer), models[1:] or draft, *map(_state, models))
        kept = self._kept.setdefault(model, WeakKeyDictionary())
        known, decoder = kept.get(models[-1], (None, None))
        if decoder is None or known != key:
            decoder = SpeculativeDecoder(
                model,
                draft,
                tokenizer=settings.tokenizer,
                fast=False,
                reproducible=False,
                max_batch_size=settings.max_batch_size,
            )
            for loaded in (decoder.target, decoder.draft)[: len(models)]:
                _hold_weakly(loaded)
            kept[models[-1]] = (key, decoder)
        return decoder
