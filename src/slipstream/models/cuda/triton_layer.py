"""A model's whole forward on a GPU by Triton kernels.

`TritonStack` computes all layers of a plan, the norm after them and the output layer; its specification is the model's
own forward, with which every layer is compared before it is used. No bit of a token depends on the shape of the
forward: see `triton_kernels`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, dataclass, fields, replace
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.models.cuda.indexed_cache import IndexedCache, IndexedForward
from slipstream.models.cuda.stored_weights import StoredLinear, Weight, kernels
from slipstream.models.decoder.around_layers import check_nothing_between, layer_rotations
from slipstream.models.decoder.fused_layer import (
    Norm,
    Rope,
    angles,
    check_modules,
    decoder_module,
    is_fused,
    layers_of,
)
from slipstream.models.decoder.fused_linear import FusedLinear, FusedOutput, is_plain
from slipstream.models.decoder.plan import ACTIVATIONS, DecoderPlan, LayerPlan, NormPlan, UnknownLayerError

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
    """A linear layer, or several with the same input as one product, by the kernel.

    Weights stay in place. Those of several ordinary layers take one launch if they follow one another in memory (see
    `join`), as do those of a file's blocks that have the same type.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        """Raises `UnknownLayerError` for layers that are neither ordinary nor stored in blocks."""
        self._parts = _parts_of(modules)
        self.inner, self.outputs = self._parts[0][0].inputs, sum(len(weight.data) for weight, _ in self._parts)

    def __call__(self, x: Tensor, *, is_whole: bool = False) -> Tensor:
        """x: [T, inputs] -> [T, outputs], or parts of it [splits, T, outputs] in float32 unless `is_whole`."""
        tokens = len(x)
        if not tokens:
            return x.new_empty(0, self.outputs)
        step = STEP_BYTES // x.element_size()
        splits = 1 if is_whole else splits_for(self.inner, self.outputs, step)
        size = tokens, self.outputs
        out = x.new_empty(size) if splits == 1 else x.new_empty(splits, *size, dtype=torch.float32)
        x, first = x.contiguous(), 0
        for weight, bias in self._parts:
            self._launch(x, weight, bias, out[..., first:], splits, step)
            first += len(weight.data)
        return out

    def _launch(self, x: Tensor, weight: Weight, bias: Tensor | None, out: Tensor, splits: int, step: int) -> None:
        tokens, outputs, tile = len(x), len(weight.data), tile_for(len(x))
        grid = -(-tokens // (tile.tiles * tile.rows)), -(-outputs // tile.columns), splits
        kernels().product[grid](
            x,
            weight.data,
            weight.halves,
            x if bias is None else bias,
            out,
            tokens,
            self.inner,
            outputs,
            self.outputs,
            weight.data.shape[1],
            kind=weight.kind,
            has_bias=bias is not None,
            is_even=self.inner % step == 0 and outputs % tile.columns == 0,
            splits=splits,
            tiles=tile.tiles,
            rows=tile.rows,
            columns=tile.columns,
            step=step,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )


def _parts_of(modules: Sequence[nn.Module]) -> list[tuple[Weight, Tensor | None]]:
    """The weights and biases of layers with the same input, in the order of their outputs."""
    sources = {module.source if isinstance(module, FusedOutput) else module for module in modules}
    if len(sources) == 1:
        (source,) = sources
        stored = source.joint if isinstance(source, FusedLinear) else source
        if isinstance(stored, StoredLinear):
            biases = (
                [None] * len(stored.weights)
                if stored.bias is None
                else stored.bias.split([len(weight.data) for weight in stored.weights])
            )
            return list(zip(stored.weights, biases, strict=True))
    linears = [module for module in modules if is_plain(module) and module.weight.is_contiguous()]
    if len(linears) < len(modules):
        raise UnknownLayerError("not all of its products are ordinary linear layers")
    weights: list[Tensor] = [linear.weight.detach() for linear in linears]
    biases = [None if linear.bias is None else linear.bias.detach() for linear in linears]
    inputs = weights[0].shape[1]
    if _are_joined(weights) and len({bias is None for bias in biases}) == 1:
        joint = weights[0].as_strided((sum(map(len, weights)), inputs), (inputs, 1))
        bias = None if biases[0] is None else torch.cat([bias for bias in biases if bias is not None])
        return [(Weight(joint, inputs), bias)]
    return [(Weight(weight, inputs), bias) for weight, bias in zip(weights, biases, strict=True)]


def join(modules: Sequence[nn.Module]) -> None:
    """Move the weights of ordinary linear layers with the same input together, so that they take one launch."""
    linears = [module for module in modules if is_plain(module)]
    weights = [linear.weight.detach() for linear in linears]
    if len(linears) < len(modules) or _are_joined(weights) or len({weight.dtype for weight in weights}) > 1:
        return
    for linear, part in zip(linears, torch.cat(weights).split([len(weight) for weight in weights]), strict=True):
        linear.weight = nn.Parameter(part, requires_grad=False)


def _are_joined(weights: Sequence[Tensor]) -> bool:
    """True if these matrices follow one another in one block of memory."""
    ends = [weight.data_ptr() + weight.nbytes for weight in weights]
    one_block = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    return one_block and ends[:-1] == [weight.data_ptr() for weight in weights[1:]]


def _splits(product: Tensor) -> int:
    return 1 if product.dim() == 2 else len(product)


def _stride(product: Tensor) -> int:
    """The distance from one part of a product to the next, in numbers."""
    return product.shape[-2] * product.shape[-1]


class TritonLayer:
    """A decoder layer computed by Triton kernels; its specification is the model's own layer."""

    def __init__(self, module: nn.Module, plan: LayerPlan) -> None:
        """plan: see `why_no_kernels`. Raises `UnknownLayerError` if the kernels cannot compute this layer."""
        check_modules(module, plan)
        self.module, self.plan = module, plan
        self._activation = ACTIVATIONS[plan.activation]
        paths, sizes = (plan.qkv, plan.gate_up), ((plan.heads + 2 * plan.key_heads) * plan.size, 2 * plan.inner)
        joint = [Product([module.get_submodule(path) for path in group]) for group in paths]
        for group, product, size in zip(paths, joint, sizes, strict=True):
            if product.outputs != size:
                raise UnknownLayerError(f"{', '.join(group)} have {product.outputs} outputs, not {size}")
        self._qkv, self._gate_up = joint
        self._out, self._down = (Product([module.get_submodule(str(path))]) for path in (plan.out, plan.down))
        norms = [None if path is None else norm_weight(module, path, plan.norm) for path in plan.norms]
        before, self._after_attention, self._before_feed_forward, self._after_feed_forward = norms
        assert before is not None
        self.before_attention = before
        self._head_norms = [norm_weight(module, path, plan.norm) for path in plan.head_norms or ()]

    def within_model(self, cache: IndexedCache) -> Callable[..., Tensor]:
        """A forward to try in place of the module's own, in an indexed forward over this cache."""

        def forward(hidden: Tensor, *_: Any, **options: Any) -> Tensor:
            rope = angles(options["position_embeddings"], options.get("position_ids"), hidden.dtype, self.plan)
            x = hidden.reshape(-1, hidden.shape[-1])
            return self(x, self.normalized(x, self.before_attention), rope, cache)[0].view_as(hidden)

        return forward

    def normalized(self, x: Tensor, norm: Tensor) -> Tensor:
        """x [T, H] after a norm."""
        return self._add_norm(x, following=norm)[1]

    def __call__(
        self, x: Tensor, normalized: Tensor, rope: Rope, cache: IndexedCache, following: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The layer's output [T, H], and the same after the `following` norm.

        x: the layer's input; normalized: the same after the layer's first norm.
        """
        if rope[0].shape[-1] != self.plan.size:
            raise SlipstreamError(f"rotations of {rope[0].shape[-1]} numbers in a head of {self.plan.size}")
        queries = x.new_empty(len(x), self.plan.heads, self.plan.size)
        attended = self._attend(self._qkv(normalized), queries, rope, cache)
        out = self._out(attended.flatten(1))
        x, normalized = self._add_norm(out, x, self._after_attention, self._before_feed_forward)
        down = self._down(self._gate(self._gate_up(normalized), x.dtype))
        return self._add_norm(down, x, self._after_feed_forward, following)

    def _add_norm(
        self, x: Tensor, residual: Tensor | None = None, after: Tensor | None = None, following: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], after the norm `after` if given, plus the residual; and the `following` norm of that sum.

        x: may be parts of a product, if there is a residual.
        """
        (tokens, size), like = x.shape[-2:], x if residual is None else residual
        summed = x if residual is None else torch.empty_like(residual)
        out = like if following is None else torch.empty_like(like)
        kernels().add_norm[(tokens,)](
            x,
            like,
            x if after is None else after,
            x if following is None else following,
            summed,
            out,
            size,
            _stride(x),
            self.plan.norm.eps,
            self.plan.norm.offset,
            splits=_splits(x),
            has_after=after is not None,
            has_residual=residual is not None,
            has_next=following is not None,
            rounds_first=self.plan.norm.rounds_first,
            block=_power_of_two(size),
        )
        return summed, out

    def _gate(self, gate_up: Tensor, dtype: torch.dtype) -> Tensor:
        tokens, inner = gate_up.shape[-2], gate_up.shape[-1] // 2
        out = gate_up.new_empty(tokens, inner, dtype=dtype)
        kernels().gate[(tokens, -(-inner // GATE_BLOCK))](
            gate_up, out, inner, _stride(gate_up), *self._activation, splits=_splits(gate_up), block=GATE_BLOCK
        )
        return out

    def _attend(self, qkv: Tensor, queries: Tensor, rope: Rope, cache: IndexedCache) -> Tensor:
        """Attention [T, heads, D] from the joint product qkv, whose keys and values are cached.

        qkv: [T, (heads + 2 key heads) * D], or parts of it. queries: [T, heads, D], first filled with the queries and
        then overwritten with the result.
        """
        forward, plan = cache.forward, self.plan
        assert forward is not None
        rows, width = forward.columns.shape
        cosines, sines = (part.expand(rows, width, plan.size).contiguous() for part in rope)
        keys, values = cache.of_layer(plan.index, queries.new_empty(0, plan.key_heads, 0, plan.size))
        queries_norm, keys_norm = self._head_norms or (queries, queries)
        kernels().rotate_and_cache[(rows * width, plan.heads + 2 * plan.key_heads)](
            qkv,
            cosines,
            sines,
            queries_norm,
            keys_norm,
            forward.slots,
            forward.columns,
            queries,
            keys,
            values,
            plan.norm.eps,
            plan.norm.offset,
            plan.heads,
            plan.key_heads,
            keys.stride(0),
            keys.stride(1),
            width,
            _stride(qkv),
            splits=_splits(qkv),
            has_norms=bool(self._head_norms),
            rounds_first=self.plan.norm.rounds_first,
            half=plan.size // 2,
        )
        chunks = -(-forward.attended // CHUNK)
        count = max(1, min(width, PARTIAL_BYTES // (4 * rows * plan.heads * chunks * plan.size)))
        partial = queries.new_empty(rows * count, plan.heads, chunks, plan.size, dtype=torch.float32)
        leading, totals = queries.new_empty(2, rows * count, plan.heads, chunks, dtype=torch.float32)
        for first in range(0, width, count):
            sums = partial, leading, totals
            self._attend_columns(queries, (keys, values), forward, sums, first, min(count, width - first))
        return queries

    def _attend_columns(
        self,
        queries: Tensor,
        cached: tuple[Tensor, Tensor],
        forward: IndexedForward,
        sums: tuple[Tensor, Tensor, Tensor],
        first: int,
        count: int,
    ) -> None:
        """Replace `count` columns of the queries, from `first` on, by their attention."""
        (rows, width), plan = forward.columns.shape, self.plan
        group, chunks, is_tree = plan.heads // plan.key_heads, sums[0].shape[2], forward.ancestors is not None
        calls = [((-(-count * group // ROWS), chunks), is_tree, False)]
        if is_tree:  # a second call for the trees' own tokens, one program each
            calls.append(((count * -(-group // ROWS), -(-width // CHUNK) + 1), False, True))
        for (blocks, chunks_read), before_own, is_branch in calls:
            kernels().attend_chunk[(rows * plan.key_heads, blocks, chunks_read)](
                queries,
                *cached,
                forward.slots,
                forward.starts,
                forward.positions,
                forward.slots if forward.ancestors is None else forward.ancestors,
                *sums,
                plan.scaling,
                plan.window or 0,
                plan.heads,
                plan.key_heads,
                cached[0].stride(0),
                cached[0].stride(1),
                width,
                first,
                count,
                chunks,
                before_own=before_own,
                is_branch=is_branch,
                has_window=plan.window is not None,
                size=plan.size,
                chunk=CHUNK,
                rows=ROWS,
                step=STEP,
            )
        kernels().combine_chunks[(rows * count, plan.heads)](
            *sums,
            forward.starts,
            queries,
            plan.heads,
            width,
            first,
            count,
            chunks,
            chunk=CHUNK,
            together=TOGETHER,
            size=plan.size,
        )


class TritonStack:
    """A model's forward entirely by kernels, except its embedding and rotations, which treat each token by itself."""

    def __init__(self, model: Any, plan: DecoderPlan, *, may_join: bool = False) -> None:
        """Raises `UnknownLayerError` if the kernels do not suffice. may_join: the weights may move in memory."""
        if (reason := why_not_computed(plan)) is not None:
            raise UnknownLayerError(reason)
        modules, inner = list(layers_of(model, plan)), decoder_module(model, plan)
        if any(map(_is_changed, inner.modules())):
            raise UnknownLayerError("its modules have hooks or another forward")
        if any(layer.norm != plan.norm for layer in plan.layers):
            raise UnknownLayerError("its norms differ")
        check_nothing_between(model, modules, plan)
        for layer, of in zip(modules, plan.layers, strict=True):
            for paths in (of.qkv, of.gate_up) if may_join else ():
                join([layer.get_submodule(path) for path in paths])
        self.layers = [TritonLayer(layer, of) for layer, of in zip(modules, plan.layers, strict=True)]
        self._model, self._plan = model, plan
        self._norm, self._output = (
            norm_weight(inner, plan.last_norm, plan.norm),
            Product([model.get_output_embeddings()]),
        )
        self._rotations, self._which = layer_rotations(model, inner, plan)

    def subset(self, layers: Sequence[int]) -> TritonStack:
        """The same forward with some of the layers only, on the same KV cache."""
        subset = copy(self)
        subset.layers, subset._which = [self.layers[i] for i in layers], [self._which[i] for i in layers]
        return subset

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
            normalized = self.layers[0].normalized(x, self.layers[0].before_attention)
            norms = [*(layer.before_attention for layer in self.layers[1:]), self._norm]
            for layer, which, norm in zip(self.layers, self._which, norms, strict=True):
                self._keep(cache, layer.plan.index, x.view_as(hidden))
                x, normalized = layer(x, normalized, ropes[which], cache, norm)
            self._keep(cache, len(self._plan.layers), x.view_as(hidden))
            normalized = normalized.view_as(hidden)
            if columns is not None:
                normalized = normalized[:, columns]
            logits = self._output(normalized.flatten(0, 1), is_whole=True)
            return self._plan.finish(logits.unflatten(0, normalized.shape[:2]))

    @staticmethod
    def _keep(cache: IndexedCache, index: int, entering: Tensor) -> None:
        if index in cache.hidden:
            cache.keep_hidden(index, entering)


def norm_weight(module: nn.Module, path: str, plan: NormPlan) -> Tensor:
    """The weight of the norm at this path. Raises `UnknownLayerError` if it is not the planned one."""
    norm = module.get_submodule(path)
    Norm(norm, plan)  # checks it
    weight: Tensor = norm.weight.detach()  # type: ignore[operator]
    return weight


def _is_changed(module: nn.Module) -> bool:
    """True if a module has another forward or hooks, except those by which transformers returns hidden states."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    others = [hook for hook in hooks if not str(hook.__module__).startswith("transformers.")]
    return bool(others) or ("forward" in vars(module) and not is_fused(module))


def has_kernels() -> bool:
    """True if Triton is installed, as it is with PyTorch for CUDA on Linux."""
    return find_spec("triton") is not None


def why_not_computed(plan: DecoderPlan) -> str | None:
    """The reason the kernels cannot compute a model; None if they can, unless its products or modules differ."""
    if not has_kernels():
        return "Triton is not installed"
    return next(filter(None, map(why_no_kernels, plan.layers)), None)


def why_no_kernels(plan: LayerPlan) -> str | None:
    """The reason the kernels cannot compute a layer; None if they can."""
    if plan.size != _power_of_two(plan.size) or not ROWS <= plan.size <= LARGEST_HEAD:
        return f"{plan.size} numbers in a head; allowed: a power of two from {ROWS} to {LARGEST_HEAD}"
    usual = {part.name: part.default for part in fields(plan) if part.default is not MISSING}
    computed = replace(plan, **usual, rotated=plan.size, norm=replace(plan.norm, is_centered=False))
    if plan != computed or plan.before_attention is None or plan.before_feed_forward is None:
        return f"they compute no layers of {'LayerNorm' if plan.norm.is_centered else 'this structure'}"
    return None


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
