"""Attention for few queries: the query heads that share a key head become rows of one product.

Transformers repeats keys and values for every query head, which at decoding widths moves more memory than the
attention itself reads. The specification is transformers' own "sdpa" attention. Rows come in multiples of `ROWS`,
because CPU kernels, which cut them into blocks of 32 or more, treat one, two or three rows differently and would round
differently.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slipstream.types import SlipstreamError

NAME = "slipstream_grouped"
ROWS = 4
_UNKNOWN = ("softcap", "s_aux", "sinks", "position_bias")  # options of other attentions


def group_mask(allowed: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """Additive mask for the grouped rows. allowed: [B, 1, W, S] bool -> [B, 1, repeats * W or a little more, S]."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    mask = mask.repeat(1, 1, repeats, 1)
    return pad(mask, (0, 0, 0, -mask.shape[2] % ROWS))


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query: [B, heads, W, D]; key, value: [B, key heads, S, D]; attention_mask: as `group_mask` makes it.

    Returns [B, W, heads, D]. A call with another mask, as transformers itself makes it, is left to transformers.
    """
    if any(options.get(name) is not None for name in _UNKNOWN):
        raise SlipstreamError(f"attention options {options.keys() & set(_UNKNOWN)} cannot be grouped")
    batch, heads, width, size = query.shape
    real = heads // key.shape[1] * width
    if attention_mask is None or attention_mask.shape[2] != real + -real % ROWS:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    rows = query.reshape(batch, key.shape[1], real, size)
    if attention_mask.shape[2] > real:
        rows = pad(rows, (0, 0, 0, attention_mask.shape[2] - real))
    out = scaled_dot_product_attention(rows, key, value, attn_mask=attention_mask, scale=scaling)
    return out[:, :, :real].reshape(batch, heads, width, size).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls by transformers itself


def repeats_of(config: Any) -> int | None:
    """How many query heads share a key head, or None where heads are not laid out that way."""
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        return None
    return heads // key_heads
