"""Grouped attention, in which the query heads that share a key head are rows of one product, and a model's masks.

Transformers repeats keys and values for every query head; for few tokens that moves more bytes than attention itself
reads. The specification is transformers' own "sdpa" attention. Rows come in multiples of `ROWS`, because CPU kernels
work in blocks of 32 or more, and round one, two or three rows differently.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from slipstream.errors import SlipstreamError

GROUPED = "slipstream_grouped"
ROWS = 4
LONG = 33  # a forward of at least this many columns is a prompt
BLOCK = 64  # columns of a prompt that attend together; a block reads the cache only up to its last column
_UNSUPPORTED = ("sinks", "position_bias")  # options that grouped attention does not implement
STATEFUL = frozenset(("linear_attention", "conv"))  # types of layers without a mask


def group_mask(allowed: Tensor, repeats: int, dtype: torch.dtype) -> Tensor:
    """The additive mask for grouped rows.

    allowed: [B, 1, W, S] bool -> [B, 1, repeats * W rounded up to a multiple of `ROWS`, S].
    """
    mask = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
    mask = mask.repeat(1, 1, repeats, 1)
    return pad(mask, (0, 0, 0, -mask.shape[2] % ROWS))


class UngroupableError(SlipstreamError):
    """The model's attention cannot be grouped; the message is the reason."""


@dataclass(frozen=True)
class Cut:
    """Successive tokens of one row that attend separately from other rows."""

    row: int  # of the keys that they attend to
    token: int  # index of the first token in the forward
    column: int  # their first column in the mask
    width: int  # columns in the mask; results beyond the first `count` are dropped
    count: int  # tokens
    start: int  # position of the first token


@dataclass(frozen=True)
class Block:
    """Tokens of a forward that attend together to one row of the keys."""

    row: int  # of the keys
    token: int  # index of the first token in the forward
    width: int  # tokens
    count: int  # results that are used, from the first on
    mask: Tensor  # grouped, [1, 1, rows, length], over the positions that they read


def cut_mask(mask: Tensor, cuts: Sequence[Cut], attended_lengths: Sequence[int]) -> list[Block]:
    """Divide the grouped mask [1, 1, rows, length] of all columns into the blocks of these cuts, its last columns.

    attended_lengths: ascending; a block reads the first of these lengths that covers it, or else the full length. If
    there are none, each cut is one block.
    """
    columns, full_length = cuts[-1].column + cuts[-1].width, mask.shape[3]
    repeats = mask.shape[2] // columns
    table = mask[:, :, : repeats * columns].unflatten(2, (repeats, columns))
    blocks = []
    for cut in cuts:
        step = BLOCK if attended_lengths else cut.width
        for first in range(0, cut.width, step):
            last = min(first + step, cut.width)
            length = next((length for length in attended_lengths if length >= cut.start + last), full_length)
            segment = table[:, :, :, cut.column + first : cut.column + last, :length].flatten(2, 3)
            segment = pad(segment, (0, 0, 0, -segment.shape[2] % ROWS))
            blocks.append(Block(cut.row, cut.token + first, last - first, min(last, cut.count) - first, segment))
    return blocks


@dataclass(frozen=True)
class Scores:
    """How a layer turns the products of queries and keys into scores."""

    scaling: float | None = None  # None: 1 / sqrt(head size)
    soft_cap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # [heads], an extra score for each head, without a value


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, form: Scores) -> Tensor:
    """query: [B, heads, W, D]; key: [B, key heads, S, D]; value: [B, key heads, S, E]; mask: as `group_mask` makes it.

    Returns [B, heads, W, E].
    """
    batch, heads, width, size = query.shape
    key_heads, length = key.shape[1:3]
    real = heads // key_heads * width
    rows = query.reshape(batch, key_heads, real, size)
    if real % ROWS:
        rows = pad(rows, (0, 0, 0, -real % ROWS))
    if form.soft_cap or form.sinks is not None:
        dtype = rows.dtype if form.sinks is None else torch.float32  # sinks can be far from the other scores
        scores = rows.to(dtype) @ key.transpose(2, 3).to(dtype) * (size**-0.5 if form.scaling is None else form.scaling)
        if form.soft_cap:
            scores = torch.tanh(scores / form.soft_cap) * form.soft_cap
        scores = scores + mask
        if form.sinks is not None:
            sinks = form.sinks.to(scores.dtype).view(key_heads, -1, 1).expand(-1, -1, width).reshape(key_heads, real, 1)
            scores = torch.cat((scores, pad(sinks, (0, 0, 0, -real % ROWS)).expand(batch, -1, -1, -1)), -1)
        out = torch.softmax(scores, -1, dtype=torch.float32)[..., :length].to(query.dtype) @ value
    else:
        out = scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=form.scaling)
    if real % ROWS:
        out = out.narrow(2, 0, real)
    return out.reshape(batch, heads, width, -1)


def attend_in_blocks(query: Tensor, key: Tensor, value: Tensor, blocks: Sequence[Block], form: Scores) -> Tensor:
    """`attend` for a long forward, block by block. query: [1, heads, T, D] -> [1, heads, T, D]."""
    parts = []
    for block in blocks:
        length, row = block.mask.shape[3], slice(block.row, block.row + 1)
        columns = query.narrow(2, block.token, block.width)
        out = attend(columns, key[row, :, :length], value[row, :, :length], block.mask, form)
        parts.append(out.narrow(2, 0, block.count))
    return torch.cat(parts, 2)


@dataclass(frozen=True)
class Heads:
    """A layer's attention heads."""

    repeats: int  # query heads per key head
    key_heads: int
    size: int  # numbers in a head
    dtype: torch.dtype


def attended_length_agrees(heads: Heads, width: int, length: int, full_length: int) -> bool:
    """True if `width` columns get the same bits from `length` as from `full_length` positions, wherever they end."""
    generator = torch.Generator().manual_seed(length + width)
    shapes = (heads.key_heads * heads.repeats, width), (heads.key_heads, full_length), (heads.key_heads, full_length)
    query, key, value = (
        torch.randn(1, count, n, heads.size, generator=generator).to(heads.dtype) for count, n in shapes
    )
    for end in {length, max(width, length - LONG)}:
        allowed = torch.arange(full_length) <= torch.arange(end - width, end)[:, None]
        mask = group_mask(allowed[None, None], heads.repeats, heads.dtype)
        short = attend(query, key[:, :, :length], value[:, :, :length], mask[..., :length], Scores())
        if not torch.equal(short, attend(query, key, value, mask, Scores())):
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
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """query: [B, heads, W, D]; key, value: [B, key heads, S, D]; attention_mask: as `group_mask` makes it.

    s_aux: the sinks, see `Scores`. Returns [B, W, heads, D]. A mask of another shape, such as transformers builds, goes
    to transformers' own attention, unless there is a cap or sinks, which that does not support.
    """
    if unsupported := [name for name in _UNSUPPORTED if options.get(name) is not None]:
        raise UngroupableError(f"its attention uses {unsupported[0]}")
    real = query.shape[1] // key.shape[1] * query.shape[2]
    if attention_mask is not None and attention_mask.shape[2] == real + -real % ROWS:
        mask = attention_mask
    elif softcap or s_aux is not None:
        width, length = query.shape[2], key.shape[2]
        allowed = torch.ones(width, length, dtype=torch.bool, device=query.device).tril(length - width)
        allowed = allowed[None, None] if attention_mask is None else attention_mask
        mask = group_mask(allowed, query.shape[1] // key.shape[1], query.dtype)
    else:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward  # its caller imported it

        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return plain
    form = Scores(scaling, softcap or 0.0, s_aux)
    return attend(query, key, value, mask, form).transpose(1, 2).contiguous(), None


def repeats_of(config: Any) -> int | None:
    """The number of query heads that share a key head; None if heads are arranged differently."""
    heads = getattr(config, "num_attention_heads", None)
    try:
        key_heads = getattr(config, "num_key_value_heads", None) or heads
    except RuntimeError:  # transformers raises it for a field that differs between layers
        return None
    if not isinstance(heads, int) or not isinstance(key_heads, int) or heads % key_heads:
        return None
    if getattr(config, "num_global_key_value_heads", None) not in (None, key_heads):  # of layers without a window
        return None
    return heads // key_heads


Masks = Tensor | dict[str, Tensor] | dict[str, Tensor | None] | None  # one for all layers, or one per type of layer


def unmasked_window(model: Any) -> int | None:
    """The sliding window of a model that applies it to its cache but not to its masks; else None.

    With such a model (Moshi), `generate` reads a prompt without a window, and the tokens after it with one.
    """
    config = model.config.get_text_config()
    window: int | None = getattr(config, "sliding_window", None)
    if not window or getattr(config, "layer_types", None):
        return None
    classes = {*type(model).__mro__, *type(model.base_model).__mro__}
    modules = {kind.__module__ for kind in classes if kind.__module__.startswith("transformers.models.")}
    is_masked = any("create_sliding_window_causal_mask" in vars(sys.modules[module]) for module in modules)
    return window if modules and not is_masked else None


class MaskBuilder:
    """Builds the masks that a model's layers expect.

    repeats: query heads per key head if attention is grouped, else None. windows: see `LayerPlan.window`, one per
    layer.
    """

    def __init__(self, model: Any) -> None:
        config = model.config.get_text_config()
        self._window: int | None = getattr(config, "sliding_window", None)
        default_kind = "sliding_attention" if self._window else "full_attention"
        kinds = getattr(config, "layer_types", None) or [default_kind] * config.num_hidden_layers
        self.windows = [self._window if kind == "sliding_attention" else None for kind in kinds]
        self._kinds = frozenset("full_attention" if kind == "hybrid" else kind for kind in kinds) - STATEFUL
        self._dtype: torch.dtype = model.dtype
        self._is_eager = config._attn_implementation == "eager"
        self.repeats = repeats_of(config) if config._attn_implementation == GROUPED else None

    def build(
        self, queries: Tensor, keys: Tensor, visible: Tensor | None = None, block: tuple[int, int] | None = None
    ) -> Tensor | dict[str, Tensor]:
        """The mask of queries at positions [B, W] over keys at positions [S], or [B, 1, 1, S] if rows differ.

        visible: [B, 1, W, S], the earlier keys that a query may see; None: all. block: first position and end of keys
        that all queries see. Returns [B, 1, W, S] (if grouped, as `group_mask`), or a dict with a mask per type of
        layer if they differ.
        """
        last = queries[:, None, :, None]
        causal = keys <= last if visible is None else (keys <= last) & visible
        near = causal if self._window is None else causal & (keys > last - self._window)
        if block is not None:
            ahead = (keys >= block[0]) & (keys < block[1])
            causal, near = causal | ahead, near | ahead
        masks = {"full_attention": self._form(causal)}
        if "sliding_attention" in self._kinds and self._window is not None:
            masks["sliding_attention"] = self._form(near)
        return masks if len(self._kinds) > 1 else masks[next(iter(self._kinds))]

    def build_hybrid(self, queries: Tensor, keys: Tensor) -> dict[str, Tensor | None] | None:
        """`build` for a model with recurrent layers, which take no mask; None if all layers are recurrent."""
        if not self._kinds:
            return None
        built = self.build(queries, keys)
        masks = built if isinstance(built, dict) else dict.fromkeys(self._kinds, built)
        return {**dict.fromkeys(STATEFUL), **masks}

    def _form(self, allowed: Tensor) -> Tensor:
        """A boolean mask, converted to what the model's attention takes."""
        if self.repeats is not None:
            return group_mask(allowed, self.repeats, self._dtype)
        if not self._is_eager:
            return allowed
        blocked = torch.finfo(self._dtype).min
        return torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device).masked_fill(~allowed, blocked)
