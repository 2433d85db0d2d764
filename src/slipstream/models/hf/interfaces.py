"""Registers Slipstream's KV cache and grouped attention with transformers."""

from __future__ import annotations

from transformers import AttentionInterface, AttentionMaskInterface, Cache
from transformers.cache_utils import CacheLayerMixin
from transformers.masking_utils import sdpa_mask

from slipstream.models.decoder.attention import GROUPED, grouped_attention
from slipstream.models.decoder.cache import SlotCache, SlotLayer

CacheLayerMixin.register(SlotLayer)
AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, sdpa_mask)  # for calls by transformers itself


class ModelCache(SlotCache, Cache):
    """A slot cache that transformers' models accept as a `Cache`."""

    layer_class_to_replicate = None
    offloading = False
