"""Slipstream's KV cache and grouped attention as transformers knows them."""

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
    """A slot cache for transformers' models, which take no others."""

    layer_class_to_replicate = None
    offloading = False
