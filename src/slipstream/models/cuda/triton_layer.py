"""Decoder layers on a GPU by Triton kernels, and a model's whole forward by them.

`TritonOps` computes a layer; its specification is `fused_layer.LayerOps`, operator by operator, with which every layer
is compared before it is used. `TritonStack` computes all layers, the norm after them and the output layer; its
specification is the model's own forward. No bit of a token depends on the shape of the forward: see `triton_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.models.cuda.indexed_cache import IndexedCache, IndexedForward
from slipstream.models.decoder.around_layers import check_nothing_between, layer_rotations
from slipstream.models.decoder.cache import SlotCache
from slipstream.models.decoder.fused_layer import FusedLayer, LayerOps, Norm, Rope, decoder_module
from slipstream.models.decoder.fused_linear import is_plain
from slipstream.models.decoder.plan import ACTIVATIONS, DecoderPlan, LayerPlan, UnknownLayerError

CHUNK = 128  # positions per program: fixed, so that bits do not depend on the length read
STEP = 64  # positions of a chunk in one product
ROWS = 16  # queries per program: fixed, so that bits do not depend on the width
TOGETHER = 16  # chunks that are combined at a time
PARTIAL_BYTES = 1 << 27  # memory limit for the chunks' sums; beyond it, columns attend in turns
LARGEST_HEAD = 256
GATE_BLOCK = 1024
COLUMNS = 64  # outputs of one program
STEP_BYTES = 256  # bytes of each output's weights that are read at a time
PROGRAMS = 256  # enough to keep a GPU's memory busy; products with fewer are split along their inputs
MAX_SPLITS, LEAST_STEPS = 8, 4  # most splits of a product, fewest steps of a split
Factors = tuple[Tensor, float]  # of a norm, float32, and its epsilon


@dataclass(frozen=True)
class Tile:
    """The part of a product that one program computes; it changes no bit, see `triton_kernels.product`."""

    tiles: int
    rows: int
    columns: int
    num_warps: int
    num_stages: int


TILES = {  # by the largest number of tokens
    16: Tile(1, 16, COLUMNS, 4, 4),
    32: Tile(1, 32, COLUMNS, 4, 4),
    64: Tile(2, 32, COLUMNS, 4, 3),
}
LARGEST_TILE = Tile(4, 32, 2 * COLUMNS, 8, 2)


def tile_for(tokens: int) -> Tile:
    """The tile for a product of this many tokens."""
    return next((tile for max_tokens, tile in TILES.items() if tokens <= max_tokens), LARGEST_TILE)


def splits_for(inner: int, outputs: int, step: int) -> int:
    """The number of parts into which a product is split along its inputs.

    It depends only on the layer's sizes, since bits depend on it.
    """
    splits, programs, steps = 1, -(-outputs // COLUMNS), -(-inner // step)
    while splits < MAX_SPLITS and splits * programs < PROGRAMS and steps >= 2 * splits * LEAST_STEPS:
        splits *= 2
    return splits


class Product:
    """A linear layer by the kernel if it is an ordinary one (`has_kernel`), else by its own operators."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.has_kernel = is_plain(module) and module.weight.is_contiguous()

    def __call__(self, x: Tensor, *, is_whole: bool = False) -> Tensor:
        """x: [T, inputs] -> [T, outputs], or parts of it [splits, T, outputs] in float32 unless `is_whole`."""
        if not self.has_kernel:
            out: Tensor = self.module(x)
            return out
        linear: Any = self.module
        (tokens, inner), outputs = x.shape, linear.weight.shape[0]
        if not tokens:
            return x.new_empty(0, outputs)
        step, tile = STEP_BYTES // x.element_size(), tile_for(tokens)
        splits = 1 if is_whole else splits_for(inner, outputs, step)
        out = x.new_empty(tokens, outputs) if splits == 1 else x.new_empty(splits, tokens, outputs, dtype=torch.float32)
        grid = -(-tokens // (tile.tiles * tile.rows)), -(-outputs // tile.columns), splits
        _kernels().product[grid](
            x.contiguous(),
            linear.weight,
            x if linear.bias is None else linear.bias,
            out,
            tokens,
            inner,
            outputs,
            has_bias=linear.bias is not None,
            is_even=inner % step == 0 and outputs % tile.columns == 0,
            splits=splits,
            tiles=tile.tiles,
            rows=tile.rows,
            columns=tile.columns,
            step=step,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        return out


def _splits(product: Tensor) -> int:
    return 1 if product.dim() == 2 else len(product)


def _stride(product: Tensor) -> int:
    """The distance from one part of a product to the next, in numbers."""
    return product.shape[-2] * product.shape[-1]


class TritonOps:
    """A layer computed by Triton kernels in an `IndexedForward`, and by plain operators in all other forwards."""

    def __init__(self, ops: LayerOps) -> None:
        """ops: ops for which `why_no_kernels` returns None; Triton must be installed."""
        self._plain = ops
        self.heads, self.key_heads, self.size = ops.heads, ops.key_heads, ops.size
        self._activation = ACTIVATIONS[ops.plan.activation]
        self._qkv, self._out, self._gate_up, self._down = self.products = tuple(
            Product(module) for module in (ops.qkv, ops.out, ops.gate_up, ops.down)
        )
        norms = (ops.before_attention, ops.after_attention, ops.before_feed_forward, ops.after_feed_forward)
        before, self._after_attention, self._before_feed_forward, self._after_feed_forward = map(_factors, norms)
        assert before is not None
        self.before_attention = before
        self.rounds_first = ops.plan.norm.rounds_first
        heads = [norm.factors for norm in ops.head_norms]
        self._head_norms = (torch.stack(heads), ops.head_norms[0].eps) if heads else None

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return self._plain.project_qkv_rope(hidden, rope)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return self._plain.residual_mlp(hidden, attended)

    def whole_layer(
        self, hidden: Tensor, rope: Rope, cache: SlotCache, plan: LayerPlan, layer_input: Tensor | None
    ) -> Tensor | None:
        forward = cache.forward if isinstance(cache, IndexedCache) else None
        if forward is None:
            return None
        assert isinstance(cache, IndexedCache)
        x = hidden.reshape(-1, hidden.shape[-1])
        normalized = self.normalized(x, self.before_attention)
        return self.layer(x, normalized, rope, cache, plan)[0].view_as(hidden)

    def normalized(self, x: Tensor, norm: Factors) -> Tensor:
        """x [T, H] after a norm."""
        return self._add_norm(x, following=norm)[1]

    def layer(
        self,
        x: Tensor,
        normalized: Tensor,
        rope: Rope,
        cache: IndexedCache,
        plan: LayerPlan,
        following: Factors | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [T, H], and the same after the `following` norm.

        x: the layer's input; normalized: the same after the layer's first norm.
        """
        if rope[0].shape[-1] != self.size:
            raise SlipstreamError(f"rotations of {rope[0].shape[-1]} numbers in a head of {self.size}")
        queries = x.new_empty(len(x), self.heads, self.size)
        attended = self._attend(self._qkv(normalized), queries, rope, cache, plan)
        out = self._out(attended.flatten(1))
        x, normalized = self._add_norm(out, x, self._after_attention, self._before_feed_forward)
        down = self._down(self._gate(self._gate_up(normalized), x.dtype))
        return self._add_norm(down, x, self._after_feed_forward, following)

    def _add_norm(
        self, x: Tensor, residual: Tensor | None = None, after: Factors | None = None, following: Factors | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], after the norm `after` if given, plus the residual; and the `following` norm of that sum.

        x: may be parts of a product, if there is a residual.
        """
        (tokens, size), like = x.shape[-2:], x if residual is None else residual
        summed = x if residual is None else torch.empty_like(residual)
        out = like if following is None else torch.empty_like(like)
        after_weight, after_eps = (x, 0.0) if after is None else after
        next_weight, next_eps = (x, 0.0) if following is None else following
        _kernels().add_norm[(tokens,)](
            x,
            like,
            after_weight,
            next_weight,
            summed,
            out,
            size,
            _stride(x),
            after_eps,
            next_eps,
            splits=_splits(x),
            has_after=after is not None,
            has_residual=residual is not None,
            has_next=following is not None,
            rounds_first=self.rounds_first,
            block=_power_of_two(size),
        )
        return summed, out

    def _gate(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, inner = gate_up.shape[-2], gate_up.shape[-1] // 2
        out = gate_up.new_empty(tokens, inner, dtype=dtype)
        _kernels().gate[(tokens, -(-inner // GATE_BLOCK))](
            gate_up, out, inner, _stride(gate_up), *self._activation, splits=_splits(gate_up), block=GATE_BLOCK
        )
        return out

    def _attend(self, qkv: Tensor, queries: Tensor, rope: Rope, cache: IndexedCache, plan: LayerPlan) -> Tensor:
        """Attention [T, heads, D] from the joint product qkv, whose keys and values are cached.

        qkv: [T, (heads + 2 key heads) * D], or parts of it. queries: [T, heads, D], first filled with the queries and
        then overwritten with the result.
        """
        forward = cache.forward
        assert forward is not None
        rows, width = forward.columns.shape
        cosines, sines = (part.expand(rows, width, self.size).contiguous() for part in rope)
        keys, values = cache.of_layer(plan.index, queries.new_empty(0, self.key_heads, 0, self.size))
        norms, eps = (queries, 0.0) if self._head_norms is None else self._head_norms
        _kernels().rotate_and_cache[(rows * width, self.heads + 2 * self.key_heads)](
            qkv,
            cosines,
            sines,
            norms,
            forward.slots,
            forward.columns,
            queries,
            keys,
            values,
            eps,
            self.heads,
            self.key_heads,
            keys.stride(0),
            keys.stride(1),
            width,
            _stride(qkv),
            splits=_splits(qkv),
            has_norms=self._head_norms is not None,
            rounds_first=self.rounds_first,
            half=self.size // 2,
        )
        chunks = -(-forward.attended // CHUNK)
        count = max(1, min(width, PARTIAL_BYTES // (4 * rows * self.heads * chunks * self.size)))
        partial = queries.new_empty(rows * count, self.heads, chunks, self.size, dtype=torch.float32)
        leading, totals = queries.new_empty(2, rows * count, self.heads, chunks, dtype=torch.float32)
        for first in range(0, width, count):
            sums = partial, leading, totals
            self._attend_columns(queries, (keys, values), forward, plan, sums, first, min(count, width - first))
        return queries

    def _attend_columns(
        self,
        queries: Tensor,
        cached: tuple[Tensor, Tensor],
        forward: IndexedForward,
        plan: LayerPlan,
        sums: tuple[Tensor, Tensor, Tensor],
        first: int,
        count: int,
    ) -> None:
        """Replace `count` columns of the queries, from `first` on, by their attention."""
        rows, width = forward.columns.shape
        group, chunks, is_tree = self.heads // self.key_heads, sums[0].shape[2], forward.ancestors is not None
        calls = [((-(-count * group // ROWS), chunks), is_tree, False)]
        if is_tree:  # a second call for the trees' own tokens, one program each
            calls.append(((count * -(-group // ROWS), -(-width // CHUNK) + 1), False, True))
        for (blocks, chunks_read), before_own, is_branch in calls:
            _kernels().attend_chunk[(rows * self.key_heads, blocks, chunks_read)](
                queries,
                *cached,
                forward.slots,
                forward.starts,
                forward.positions,
                forward.slots if forward.ancestors is None else forward.ancestors,
                *sums,
                plan.scaling,
                plan.window or 0,
                self.heads,
                self.key_heads,
                cached[0].stride(0),
                cached[0].stride(1),
                width,
                first,
                count,
                chunks,
                before_own=before_own,
                is_branch=is_branch,
                has_window=plan.window is not None,
                size=self.size,
                chunk=CHUNK,
                rows=ROWS,
                step=STEP,
            )
        _kernels().combine_chunks[(rows * count, self.heads)](
            *sums,
            forward.starts,
            queries,
            self.heads,
            width,
            first,
            count,
            chunks,
            chunk=CHUNK,
            together=TOGETHER,
            size=self.size,
        )


class TritonStack:
    """A model's forward entirely by kernels, except its embedding and rotations, which treat each token by itself."""

    def __init__(self, model: Any, plan: DecoderPlan, layers: Sequence[FusedLayer]) -> None:
        """layers: all of the model's, with `TritonOps`. Raises `UnknownLayerError` if the kernels do not suffice."""
        ops = [layer.ops for layer in layers if isinstance(layer.ops, TritonOps)]
        output = Product(model.get_output_embeddings())
        products = [product for layer_ops in ops for product in layer_ops.products]
        inner = decoder_module(model, plan)
        if not all(product.has_kernel for product in (*products, output)):
            raise UnknownLayerError("not all of its products are ordinary linear layers")
        norm = Norm(inner.get_submodule(plan.last_norm), plan.norm)
        self._model, self._ops, self._plan = model, ops, plan
        self._norm, self._output = (norm.factors, norm.eps), output
        self._rotations, self._which = layer_rotations(model, inner, plan)

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: IndexedCache,
        forward: IndexedForward,
        columns: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, W, V] of tokens [B, W], or [B, C, V] of `columns` [C], which may be empty.

        positions: [B, W], as the model's rotations take them.
        """
        with torch.cuda.device_of(tokens):  # Triton launches on the current device
            hidden = self._plan.enter(self._model.get_input_embeddings()(tokens))
            cache.index(forward)
            ropes = self._rotations.computed(hidden, positions)
            x = hidden.reshape(-1, hidden.shape[-1])
            normalized = self._ops[0].normalized(x, self._ops[0].before_attention)
            norms = [*(ops.before_attention for ops in self._ops[1:]), self._norm]
            for i, (ops, norm) in enumerate(zip(self._ops, norms, strict=True)):
                if i in cache.hidden:
                    cache.keep_hidden(i, x.view_as(hidden))
                x, normalized = ops.layer(x, normalized, ropes[self._which[i]], cache, self._plan.layers[i], norm)
            if len(self._ops) in cache.hidden:
                cache.keep_hidden(len(self._ops), x.view_as(hidden))
            normalized = normalized.view_as(hidden)
            if columns is not None:
                normalized = normalized[:, columns]
            logits = self._output(normalized.flatten(0, 1), is_whole=True)
            return self._plan.finish(logits.unflatten(0, normalized.shape[:2]))


def stack_of(model: Any, plan: DecoderPlan, modules: Sequence[nn.Module]) -> TritonStack:
    """The forward of a model whose layers are all fused. Raises `UnknownLayerError` if the kernels do not suffice."""
    check_nothing_between(model, modules, plan)
    return TritonStack(model, plan, [module.__dict__["forward"] for module in modules])


def uses_kernels(model: Any) -> bool:
    """True if the kernels compute a model's layers, all of them or none."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    fused = [forward for forward in forwards if isinstance(forward, FusedLayer)]
    return bool(fused) and all(isinstance(forward.ops, TritonOps) for forward in fused)


def has_kernels() -> bool:
    """True if Triton is installed, as it is with PyTorch for CUDA on Linux."""
    return find_spec("triton") is not None


def _kernels() -> Any:
    """The module of kernels, which imports Triton. Layers do not store it, since models may be copied."""
    from slipstream.models.cuda import triton_kernels

    return triton_kernels


def why_no_kernels(ops: LayerOps) -> str | None:
    """The reason the kernels cannot compute a layer; None if they can."""
    if ops.size != _power_of_two(ops.size) or not ROWS <= ops.size <= LARGEST_HEAD:
        return f"{ops.size} numbers in a head; allowed: a power of two from {ROWS} to {LARGEST_HEAD}"
    plan = ops.plan
    usual = {part.name: part.default for part in fields(plan) if part.default is not MISSING}
    computed = replace(plan, **usual, rotated=plan.size, norm=replace(plan.norm, is_centered=False))
    if plan != computed or plan.before_attention is None or plan.before_feed_forward is None:
        return f"they compute no layers of {'LayerNorm' if plan.norm.is_centered else 'this structure'}"
    return None


def _factors(norm: Norm | None) -> Factors | None:
    return None if norm is None else (norm.factors, norm.eps)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
