"""A decoder layer on a GPU: PyTorch's matrix products, and Triton kernels for all that is between them.

The specification is `fused_layer.LayerOps`, operator by operator; every layer is compared with it before it is used.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cuda.indexed_cache import IndexedCache, IndexedForward
from slipstream.models.decoder.cache import RaggedCache
from slipstream.models.decoder.fused_layer import (
    AttentionSpec,
    FusedLayer,
    LayerOps,
    RootMeanSquare,
    Rope,
    recognise_activation,
)

CHUNK = 128  # positions that one program attends to: always as many, so that bits do not depend on the length read
STEP = 64  # of them, those in one product
ROWS = 16  # queries of one program: always as many, so that bits do not depend on the width
LARGEST_HEAD = 256
GATE_BLOCK = 1024
Norm = tuple[Tensor, float]  # factors, float32, and epsilon


class TritonOps:
    """Layers by Triton: whole ones in captured forwards, whose places are in tensors; else by the plain operators."""

    def __init__(self, ops: LayerOps) -> None:
        """ops: such that `why_no_kernels` finds nothing, on a machine that has the kernels."""
        self._plain = ops
        self.heads, self.key_heads, self.size = ops.heads, ops.key_heads, ops.size
        activation = recognise_activation(ops.act)
        assert not isinstance(activation, str)
        self._activation = activation
        self._before_attention, self._before_feed_forward = _norm(ops.before_attention), _norm(ops.before_feed_forward)
        self._after_attention, self._after_feed_forward = _norm(ops.after_attention), _norm(ops.after_feed_forward)
        self._rounds_first = ops.before_attention.weight[1]
        heads = [norm.weight[0] for norm in ops.head_norms]
        self._head_norms = (torch.stack(heads), ops.head_norms[0].eps) if heads else None

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        return self._plain.project_qkv_rope(hidden, rope)

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        return self._plain.residual_mlp(hidden, attended)

    def whole_layer(self, hidden: Tensor, rope: Rope, cache: RaggedCache, spec: AttentionSpec) -> Tensor | None:
        forward = cache.forward if isinstance(cache, IndexedCache) else None
        if forward is None:
            return None
        if rope[0].shape[-1] != self.size:
            raise SlipstreamError(f"rotations of {rope[0].shape[-1]} numbers in a head of {self.size}")
        x = hidden.reshape(-1, hidden.shape[-1])
        _, normalised = self._add_norm(x, following=self._before_attention)
        attended = self._attend(self._plain.qkv(normalised), rope, cache, forward, spec)
        out = self._plain.out(attended.flatten(1))
        x, normalised = self._add_norm(out, x, self._after_attention, self._before_feed_forward)
        down = self._plain.down(self._gate(self._plain.gate_up(normalised)))
        return self._add_norm(down, x, self._after_feed_forward)[0].view_as(hidden)

    def _add_norm(
        self, x: Tensor, residual: Tensor | None = None, after: Norm | None = None, following: Norm | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], normalised `after` it was made, plus the residual, and the norm of that for what is `following`."""
        size = x.shape[1]
        summed = x if residual is None else torch.empty_like(x)
        out = x if following is None else torch.empty_like(x)
        after_weight, after_eps = (x, 0.0) if after is None else after
        next_weight, next_eps = (x, 0.0) if following is None else following
        _kernels().add_norm[(len(x),)](
            x,
            x if residual is None else residual,
            after_weight,
            next_weight,
            summed,
            out,
            size,
            after_eps,
            next_eps,
            has_after=after is not None,
            has_residual=residual is not None,
            has_next=following is not None,
            rounds_first=self._rounds_first,
            block=_power_of_two(size),
        )
        return summed, out

    def _gate(self, gate_up: Tensor) -> Tensor:
        tokens, inner = len(gate_up), gate_up.shape[1] // 2
        out = gate_up.new_empty(tokens, inner)
        _kernels().gate[(tokens, -(-inner // GATE_BLOCK))](gate_up, out, inner, *self._activation, block=GATE_BLOCK)
        return out

    def _attend(
        self, qkv: Tensor, rope: Rope, cache: IndexedCache, forward: IndexedForward, spec: AttentionSpec
    ) -> Tensor:
        """[T, heads, D] out of the joint product [T, (heads + 2 key heads) * D], whose keys and values are cached."""
        layer = cache.layers[spec.index]
        keys, values = layer.keys, layer.values
        rows, width = forward.columns.shape
        tokens, chunks = rows * width, -(-forward.attended // CHUNK)
        queries = qkv.new_empty(tokens, self.heads, self.size)
        strides = keys.stride(0), keys.stride(1)
        norms, eps = (qkv, 0.0) if self._head_norms is None else self._head_norms
        _kernels().rotate_and_cache[(tokens, self.heads + 2 * self.key_heads)](
            qkv,
            rope[0].contiguous(),
            rope[1].contiguous(),
            norms,
            forward.slots,
            forward.columns,
            queries,
            keys,
            values,
            eps,
            self.heads,
            self.key_heads,
            *strides,
            width,
            has_norms=self._head_norms is not None,
            rounds_first=self._rounds_first,
            half=self.size // 2,
        )
        partial = qkv.new_empty(tokens, self.heads, chunks, self.size, dtype=torch.float32)
        leading, totals = qkv.new_empty(2, tokens, self.heads, chunks, dtype=torch.float32)
        is_tree = forward.visible is not None
        grid = rows * self.key_heads, -(-width * (self.heads // self.key_heads) // ROWS), chunks
        _kernels().attend_chunk[grid](
            queries,
            keys,
            values,
            forward.slots,
            forward.starts,
            forward.positions,
            forward.visible.view(torch.uint8) if forward.visible is not None else forward.slots,
            forward.depths if forward.depths is not None else forward.slots,
            partial,
            leading,
            totals,
            spec.scaling,
            spec.window or 0,
            self.heads,
            self.key_heads,
            *strides,
            width,
            chunks,
            is_tree=is_tree,
            has_window=spec.window is not None,
            size=self.size,
            chunk=CHUNK,
            rows=ROWS,
            step=STEP,
        )
        _kernels().combine_chunks[(tokens, self.heads)](
            partial,
            leading,
            totals,
            forward.starts,
            queries,
            self.heads,
            width,
            chunks,
            chunk=CHUNK,
            size=self.size,
        )
        return queries


def uses_kernels(model: Any) -> bool:
    """Whether a model's layers compute by the kernels; all of them do, or none."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    fused = [forward for forward in forwards if isinstance(forward, FusedLayer)]
    return bool(fused) and all(isinstance(forward.ops, TritonOps) for forward in fused)


def has_kernels() -> bool:
    """Whether there is Triton, which comes with PyTorch for CUDA on Linux."""
    return find_spec("triton") is not None


def _kernels() -> Any:
    """Their module, which imports Triton. Not kept by layers, which can be copied with their model."""
    from slipstream.models.cuda import triton_kernels

    return triton_kernels


def why_no_kernels(ops: LayerOps) -> str | None:
    """Why the kernels cannot compute a layer; None if they can."""
    if ops.size != _power_of_two(ops.size) or not ROWS <= ops.size <= LARGEST_HEAD:
        return f"{ops.size} numbers in a head; allowed: a power of two from {ROWS} to {LARGEST_HEAD}"
    norms = (ops.before_attention, ops.after_attention, ops.before_feed_forward, ops.after_feed_forward)
    if len({norm.weight[1] for norm in (*ops.head_norms, *norms) if norm is not None}) > 1:
        return "its norms round at different places"
    activation = recognise_activation(ops.act)
    return activation if isinstance(activation, str) else None


def _norm(norm: RootMeanSquare | None) -> Norm | None:
    return None if norm is None else (norm.weight[0], norm.eps)


def _power_of_two(size: int) -> int:
    return 1 << (size - 1).bit_length()
