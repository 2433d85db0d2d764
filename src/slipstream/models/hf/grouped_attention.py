"""Attention for few queries: the query heads that share a key head become rows of one product.

Transformers repeats keys and values for every query head, which at decoding widths moves more memory than the
attention itself reads. The specification is transformers' own "sdpa" attention. Rows come in multiples of `ROWS`,
because CPU kernels, which cut them into blocks of 32 or more, treat one, two or three rows differently and would round
differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from slipstream.errors import SlipstreamError

NAME = "slipstream_grouped"
ROWS = 4
LONG = 33  # columns from which on a forward is a prompt's
BLOCK = 64  # columns of a prompt that attend together, each block reading as far as it has to
_UNKNOWN = ("softcap", "s_aux", "sinks", "position_bias")  # options of other attentions


def group_mask(allowed: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """Additive mask for the grouped rows. allowed: [B, 1, W, S] bool -> [B, 1, repeats * W or a little more, S]."""
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    mask = mask.repeat(1, 1, repeats, 1)
    return pad(mask, (0, 0, 0, -mask.shape[2] % ROWS))


@dataclass(frozen=True)
class Cut:
    """A row's tokens in a long forward, which attend without other rows'.

    They stand in the memory's row `row` from position `start` on and are `count` tokens of the forward from number
    `token` on. Columns `column` to `column` + `width` - 1 of the mask are theirs; what the columns behind the first
    `count` give is dropped.
    """

    row: int
    token: int
    column: int
    width: int
    count: int
    start: int


@dataclass(frozen=True)
class Block:
    """Tokens that attend together, from number `token` on; the first `count` results are kept.

    mask: [1, 1, rows, view], all of it they read.
    """

    row: int
    token: int
    width: int
    count: int
    mask: Tensor


def cut_mask(mask: Tensor, cuts: Sequence[Cut], reads: Sequence[int]) -> list[Block]:
    """Cut the mask [1, 1, rows, view] of all columns, of which the cuts' are the last, into those of their blocks.

    reads: what a block may read if it is enough, ascending; else it reads the whole view. Without any, a cut is one
    block.
    """
    columns, view = cuts[-1].column + cuts[-1].width, mask.shape[3]
    repeats = mask.shape[2] // columns
    table = mask[:, :, : repeats * columns].unflatten(2, (repeats, columns))
    blocks = []
    for cut in cuts:
        step = BLOCK if reads else cut.width
        for first in range(0, cut.width, step):
            last = min(first + step, cut.width)
            reach = next((read for read in reads if read >= cut.start + last), view)
            segment = table[:, :, :, cut.column + first : cut.column + last, :reach].flatten(2, 3)
            segment = pad(segment, (0, 0, 0, -segment.shape[2] % ROWS))
            blocks.append(Block(cut.row, cut.token + first, last - first, min(last, cut.count) - first, segment))
    return blocks


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None) -> Tensor:
    """query: [B, heads, W, D]; key, value: [B, key heads, S, D]; mask: as `group_mask` makes it -> [B, heads, W, D]."""
    batch, heads, width, size = query.shape
    real = heads // key.shape[1] * width
    rows = query.reshape(batch, key.shape[1], real, size)
    if real % ROWS:
        rows = pad(rows, (0, 0, 0, -real % ROWS))
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scaling)
    if real % ROWS:
        out = out.narrow(2, 0, real)
    return out.reshape(batch, heads, width, size)


def attend_in_blocks(
    query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], scaling: float | None
) -> Tensor:
    """The same for a long forward, block by block. query: [1, heads, T, D] -> [1, heads, T, D]."""
    parts = []
    for block in blocks:
        view, row = block.mask.shape[3], slice(block.row, block.row + 1)
        columns = query.narrow(2, block.token, block.width)
        out = attend(columns, key[row, :, :view], value[row, :, :view], block.mask, scaling)
        parts.append(out.narrow(2, 0, block.count))
    return torch.cat(parts, 2)


def attended_length_agrees(
    repeats: int, dtype: torch.dtype, read: int, whole: int, key_heads: int, size: int, width: int
) -> bool:
    """Whether `width` columns get the same bits from `read` positions as from `whole`, wherever before they end."""
    generator = torch.Generator().manual_seed(read + width)
    shapes = (key_heads * repeats, width), (key_heads, whole), (key_heads, whole)
    query, key, value = (torch.randn(1, heads, n, size, generator=generator).to(dtype) for heads, n in shapes)
    for end in {read, max(width, read - LONG)}:
        allowed = torch.arange(whole) <= torch.arange(end - width, end)[:, None]
        mask = group_mask(allowed[None, None], repeats, dtype)
        short = attend(query, key[:, :, :read], value[:, :, :read], mask[..., :read], None)
        if not torch.equal(short, attend(query, key, value, mask, None)):
            return False
    return True


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
    real = query.shape[1] // key.shape[1] * query.shape[2]
    if attention_mask is None or attention_mask.shape[2] != real + -real % ROWS:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    return attend(query, key, value, attention_mask, scaling).transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, grouped_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # for calls by transformers itself


def repeats_of(config: Any) -> int | None:
    """How many query heads share a key head, or None where heads are not laid out that way."""
    heads = getattr(config, "num_attention_heads", None)
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        return None
    return heads // key_heads
