"""The decoder over a loaded model, cached as an attribute of the model so that the next call finds it.

A decoder refers to its models, so a table elsewhere, weak or not, would keep them alive. On the target it lives exactly
as long as that model: when the last user drops it, Python's cycle collector frees both. A draft model is referred to
until another one takes its place or the target goes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.nn import Module

from slipstream.config import DecoderConfig
from slipstream.core.interfaces import Drafter
from slipstream.decoder import SpeculativeDecoder

ATTRIBUTE = "_slipstream_decoder"


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """Arguments of a decoder over loaded models; see `SpeculativeDecoder`. The models are used as they are."""

    draft: Any = None
    tokenizer: Any = None
    draft_tokenizer: Any = None
    drafter: str | Drafter = DecoderConfig.drafter
    num_draft_tokens: int | str = DecoderConfig.num_draft_tokens
    max_batch_size: int = DecoderConfig.max_batch_size


class _DecoderInsideGenerate(SpeculativeDecoder):
    _reads_model_settings = False  # `generate` has read them


@dataclass(frozen=True, eq=False)
class CachedDecoder:
    """A decoder and its settings; copies and pickles of a model do not contain it."""

    decoder: SpeculativeDecoder
    settings: DecoderSettings

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


def cached_settings(target: Module) -> DecoderSettings | None:
    """The settings of the decoder cached on the model, if there is one."""
    cached: CachedDecoder | None = vars(target).get(ATTRIBUTE)
    return None if cached is None else cached.settings


def decoder_for(target: Module, settings: DecoderSettings) -> SpeculativeDecoder:
    """The decoder cached on the model, over the models as they are now; a new one if the settings differ."""
    cached: CachedDecoder | None = vars(target).get(ATTRIBUTE)
    if cached is not None and cached.settings == settings:
        cached.decoder.renew()
        return cached.decoder
    vars(target)[ATTRIBUTE] = cached = None  # frees the old decoder's KV cache first
    decoder = _DecoderInsideGenerate(target, fast=False, reproducible=False, **vars(settings))
    vars(target)[ATTRIBUTE] = CachedDecoder(decoder, settings)
    return decoder
