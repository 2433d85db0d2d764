"""Compiled decoder layers: a call computes all layers, one layer, or the part before or after a layer's attention.

Layers are split in two if the kernels cannot compute their attention.

`CompiledOps` computes in bfloat16 (`csrc/layer.c`), `BlockLayerOps` over a quantized file's blocks in float32
(`csrc/blocks/float_layer.c`). Data that all layers of a forward share is prepared once. The specification is
`fused_layer.LayerOps`, operator by operator; every layer is compared with it before it is used.

`LayerStack` computes all layers of a model in one call, between the model's own embedding and output layer: Python code
for each layer and around them takes a sixth to a fifth of a small model's time for one token. Its specification is the
model's own forward over its compiled layers; the logits are compared before it is used.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.compiled_recurrence import CompiledRecurrence, segment_structs
from slipstream.models.cpu.kernel_libraries import address, kernels
from slipstream.models.cpu.packed_linear import KernelLinear
from slipstream.models.cpu.structs import (
    LANES,
    LAYER_NUMBERS,
    LINEARS,
    MAX_HEAD_SIZE,
    MAX_SHARED_HEADS,
    NORMS,
    CacheStruct,
    FloatLayerStruct,
    LayerStruct,
    NormStruct,
    StackedLayerStruct,
)
from slipstream.models.decoder.around_layers import layer_inputs, layer_rotations
from slipstream.models.decoder.cache import SlotCache
from slipstream.models.decoder.fused_layer import FusedLayer, LayerOps, Norm, Rope, decoder_module
from slipstream.models.decoder.plan import ACTIVATIONS, DecoderPlan, LayerPlan, UnknownLayerError
from slipstream.models.decoder.recurrence import Projection
from slipstream.models.notices import warn_slower

ATTENDS_NOT = "the kernels do not attend with heads of this size and number"


@dataclass
class PreparedForward:
    """Shared by all layers of a forward: where its tokens are cached, its rotations and its scratch space."""

    struct: ctypes.Structure
    held: tuple[Any, ...]  # keeps alive the memory whose addresses the struct has
    scratch: Tensor
    rotations: dict[int, tuple[Rope, Rope]] = field(default_factory=dict)

    def rope(self, rope: Rope | None, hidden: Tensor) -> Rope | tuple[None, None]:
        """The result of `rotation`; two Nones for a layer without rotations."""
        if rope is None:
            return None, None
        converted = self.rotations.get(id(rope[1]))
        if converted is None:
            converted = self.rotations[id(rope[1])] = rope, rotation(rope, hidden)  # keeps the key's tensor alive
        return converted[1]

    def space(self, size: int) -> Tensor:
        """Scratch space of at least `size` numbers."""
        if len(self.scratch) < size:
            self.scratch = self.scratch.new_empty(size)
        return self.scratch


def rotation(rope: Rope, hidden: Tensor) -> Rope:
    """Cosines and sines in contiguous memory, one of each per hidden state [B, W, H]."""
    cosines, sines = (part.expand(*hidden.shape[:2], -1).contiguous() for part in rope)
    return cosines, sines


class LayerCalls:
    """Computes `LayerOps` with compiled code; see `Ops`. No token's bits depend on other tokens.

    attends: whether the kernels can compute whole layers. shape_independent: whether they have computed one.
    """

    cached_dtype: torch.dtype  # of keys and values in the cache

    def __init__(self, ops: LayerOps, library: Any, struct: type[ctypes.Structure]) -> None:
        """struct: of the layers of this library."""
        self.plan, self.heads, self.key_heads, self.size = ops.plan, ops.heads, ops.key_heads, ops.size
        linears = {name: linear for name in LINEARS if (linear := getattr(ops, name)) is not None}
        self.experts = ops.experts
        self.recurrence: CompiledRecurrence | None = ops.mixer.forward.compiled if ops.plan.recurrent else None
        mixer = None if self.recurrence is None else _mixer_of(ops, self.recurrence)
        sinks = None if ops.sinks is None else ops.sinks.float().contiguous()
        self._held: list[Any] = [linears, ops.experts, ops.latent, sinks, mixer]  # the struct has only their addresses
        self.library = library
        self._layer = struct(
            **{name: linear.weights for name, linear in linears.items()}, **self._norms_of(ops), **_numbers(ops)
        )
        self._layer.sinks = address(sinks)
        self._layer.experts = None if ops.experts is None else ctypes.addressof(ops.experts.struct)
        self._layer.mixer = None if mixer is None else ctypes.addressof(mixer)
        self._layer.latent = None if ops.latent is None else ctypes.addressof(ops.latent.struct)
        self.address = ctypes.addressof(self._layer)
        self.attends = _attends(ops)
        self.shape_independent = False

    def scratch(self, tokens: int, length: int = 0) -> int:
        """Scratch space that the kernels need, in floats. length: of the cache, if they compute attention."""
        needed: int = self.library.layer_scratch(self.address, tokens, length)
        return needed

    def norm(self, norm: Norm | None) -> ctypes.Structure:
        """The struct of a norm; valid while this object lives."""
        if norm is None:
            return NormStruct()
        bias = None if norm.bias is None else norm.bias.float().contiguous()
        self._held += [norm.factors, bias]
        return NormStruct(address(norm.factors), address(bias), norm.eps, norm.rounds_first, norm.is_centered)

    def _norms_of(self, ops: LayerOps) -> dict[str, ctypes.Structure]:
        """The structs of a layer's norms."""
        queries, keys = [*ops.head_norms, None, None][:2]
        of_heads = {"queries": queries, "keys": keys, "values": ops.values_norm}
        return {name: self.norm(of_heads[name] if name in of_heads else getattr(ops, name)) for name in NORMS}

    def project_qkv_rope(self, hidden: Tensor, rope: Rope) -> tuple[Tensor, Tensor]:
        batch, width = hidden.shape[:2]
        out = hidden.new_empty(batch, width, self.heads + 2 * self.key_heads, self.size)
        rows, tokens, scratch = self._inputs(hidden)
        cosines, sines = rotation(rope, hidden)
        pointers = [part.data_ptr() for part in (cosines, sines, out, scratch)]
        self.library.project_qkv_rope(self.address, rows.data_ptr(), tokens, *pointers)
        heads = out.transpose(1, 2)
        both = self.heads + self.key_heads
        return heads[:, :both], heads[:, both:]

    def residual_mlp(self, hidden: Tensor, attended: Tensor) -> Tensor:
        out = torch.empty_like(hidden, memory_format=torch.contiguous_format)
        rows, tokens, scratch = self._inputs(hidden)
        contiguous = attended.contiguous()
        pointers = out.data_ptr(), scratch.data_ptr()
        self.library.residual_mlp(self.address, rows.data_ptr(), contiguous.data_ptr(), tokens, *pointers)
        return out

    def whole_layer(
        self, hidden: Tensor, rope: Rope, cache: SlotCache, plan: LayerPlan, layer_input: Tensor | None
    ) -> Tensor | None:
        if not self.attends or cache.sees_ahead:
            return None
        kept = self.memory(cache, plan, hidden)
        if kept is None:
            return None
        forward = self.prepared(cache, hidden)
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        memory, (cosines, sines) = forward.struct, forward.rope(rope, hidden)
        memory.keys, memory.values, memory.length = *map(address, kept), cache.held[1]
        memory.window, memory.scaling = plan.window or 0, plan.scaling
        layer_input = None if layer_input is None else layer_input.contiguous()
        memory.inputs, memory.input_step = address(layer_input), plan.input_size
        out, scratch = torch.empty_like(rows), forward.space(self.scratch(tokens, cache.held[1]))
        pointers = map(address, (cosines, sines, out, scratch))
        self.library.whole_layer(self.address, ctypes.addressof(memory), rows.data_ptr(), tokens, *pointers)
        self.shape_independent = True
        return out

    def memory(self, cache: SlotCache, plan: LayerPlan, hidden: Tensor) -> tuple[Tensor, Tensor] | None:
        """The layer's keys and values, allocated if needed; None if they have another type.

        For a recurrent layer, its latest inputs and its states.
        """
        if self.recurrence is None:
            index = plan.index if plan.keys_of is None else plan.keys_of
            sizes = (self.size, self.size) if plan.latent is None else (plan.latent.rank, plan.rotated)
            keys, values = cache.of_layer(index, *(hidden.new_empty(0, self.key_heads, 0, size) for size in sizes))
            return (keys, values) if keys.dtype == self.cached_dtype else None
        if cache.states is None:
            return None
        memory = cache.states.memory(plan.index)
        self.recurrence.use(memory)
        return memory.inputs, memory.states

    def prepared(self, cache: SlotCache, hidden: Tensor) -> PreparedForward:
        """Data that all layers of the next forward share."""
        forward: PreparedForward | None = cache.prepared
        if forward is None:
            forward = cache.prepared = self._prepare(cache, hidden)
        return forward

    def _prepare(self, cache: SlotCache, hidden: Tensor) -> PreparedForward:
        slots, positions = cache.destinations()
        tensors: tuple[Any, ...] = (slots, positions, positions)
        if cache.tree is not None:
            tensors = slots, positions, cache.tree.into[1], cache.tree.forks, cache.tree.begins, cache.tree.paths
        names = ("slots", "positions", "places", "forks", "begins", "paths")  # the last three are of trees only
        struct = CacheStruct(**dict(zip(names, map(address, tensors), strict=False)))
        if cache.states is not None:
            segments = segment_structs(cache.states.segments)
            struct.segments, struct.rows = ctypes.addressof(segments), len(segments)
            tensors = *tensors, segments
        return PreparedForward(struct, tensors, hidden.new_empty(0))

    def _inputs(self, hidden: Tensor) -> tuple[Tensor, int, Tensor]:
        """The hidden states in contiguous memory, the number of tokens, and scratch space."""
        rows = hidden.contiguous()
        tokens = rows.numel() // rows.shape[-1]
        return rows, tokens, rows.new_empty(self.scratch(tokens))


class CompiledOps(LayerCalls):
    """A layer in bfloat16."""

    cached_dtype = torch.bfloat16

    def __init__(self, ops: LayerOps, library: Any) -> None:
        super().__init__(ops, library, LayerStruct)


class BlockLayerOps(LayerCalls):
    """A layer over a quantized file's blocks, in float32."""

    cached_dtype = torch.float16

    def __init__(self, ops: LayerOps) -> None:
        """ops: a layer whose products are `BlockLinear`s."""
        super().__init__(ops, ops.qkv.parts[0].library, FloatLayerStruct)
        self._layer.planes = ops.qkv.planes


def compiled_ops(ops: LayerOps) -> CompiledOps | BlockLayerOps | None:
    """The compiled ops of a layer; None if the kernels cannot compute it.

    A warning tells why if they can compute the layer's products but not the layer.
    """
    linears = [linear for name in LINEARS if (linear := getattr(ops, name)) is not None]
    in_blocks = all(isinstance(linear, BlockLinear) for linear in linears)
    in_bfloat16 = all(isinstance(linear, KernelLinear) and linear.dtype == torch.bfloat16 for linear in linears)
    library = kernels() if in_bfloat16 else None
    if not in_blocks and library is None:
        return None  # packing the weights has warned already
    if (reason := why_not_compiled(ops)) is not None:
        warn_slower(f"layers are not compiled: {reason}")
        return None
    return BlockLayerOps(ops) if in_blocks else CompiledOps(ops, library)


def why_not_compiled(ops: LayerOps) -> str | None:
    """The reason the kernels cannot compute this layer; None if they can."""
    plan = ops.plan
    if plan.recurrent and (ops.mixer.forward.compiled is None or ops.mixer.forward.form.projection is None):
        return f"the recurrence of {plan.recurrent} is not compiled"
    if plan.mixer and not _attends(ops):  # such a layer is not computed in two parts
        return ATTENDS_NOT
    sizes = {"hidden states": ops.qkv.in_features, "the feed-forward part": plan.inner}
    if ops.queries_up is not None:
        sizes["the latent of queries"] = ops.queries_up.in_features
    sizes["the second embedding"] = plan.input_size
    if odd := [name for name, size in sizes.items() if size % LANES]:
        return f"{sizes[odd[0]]} numbers in {odd[0]}, not a multiple of {LANES}"
    if plan.size % (2 * LANES) or plan.rotated % (2 * LANES):
        return f"{plan.size} numbers in a head, {plan.rotated} of them rotated, not multiples of {2 * LANES}"
    if plan.rotates_pairs and plan.rotated > MAX_HEAD_SIZE:
        return f"{plan.rotated} numbers rotated in pairs; allowed: up to {MAX_HEAD_SIZE}"
    return None


def _attends(ops: LayerOps) -> bool:
    shares = ops.heads <= MAX_SHARED_HEADS * ops.key_heads or ops.latent is not None  # threads divide a latent's heads
    return ops.size <= MAX_HEAD_SIZE and shares


def _mixer_of(ops: LayerOps, recurrence: CompiledRecurrence) -> ctypes.Structure:
    """The mixer of a recurrent layer. It writes its outputs in the order of the columns of the file's blocks."""
    projection: Projection = ops.mixer.forward.form.projection
    order = ops.out.parts[0].inputs_from if isinstance(ops.out, BlockLinear) else None
    places = None if order is None else torch.argsort(order[:: projection.group] // projection.group)
    return recurrence.mixer(projection, places)


def _numbers(ops: LayerOps) -> dict[str, float]:
    """The numbers and switches of a layer's struct."""
    slope, cubic = ACTIVATIONS[ops.plan.activation]
    others = {"hidden": ops.qkv.in_features, "slope": slope, "cubic": cubic, "scale": ops.scale}
    return others | {name: getattr(ops.plan, name) for name in LAYER_NUMBERS if name not in others}


class LayerStack:
    """A model's forward with all its decoder layers in one call."""

    def __init__(self, model: Any, plan: DecoderPlan, layers: Sequence[FusedLayer]) -> None:
        """layers: all of the model's. Raises `UnknownLayerError` with the reason if one call cannot compute them."""
        ops = [layer.ops for layer in layers if isinstance(layer.ops, LayerCalls)]
        if len(ops) < len(layers):
            raise UnknownLayerError("its layers are not all compiled")
        if not all(layer_ops.attends for layer_ops in ops):
            raise UnknownLayerError(ATTENDS_NOT)
        inner = decoder_module(model, plan)
        self._model, self._ops, self._plan = model, ops, plan
        self._library, self._norm = ops[0].library, ops[0].norm(Norm(inner.get_submodule(plan.last_norm), plan.norm))
        self._rotations, which = layer_rotations(model, inner, plan)
        self._storing = 1 + max(layer.index for layer in plan.layers if not layer.reuses_keys)
        self._inner, second = inner, plan.second_embedding
        self._norm_of_inputs = (
            None if second is None else ops[0].norm(Norm(inner.get_submodule(second.norm), plan.norm))
        )
        self._structs = (StackedLayerStruct * (len(layers) + 1))(  # the last one is for what leaves the layers
            *(
                StackedLayerStruct(layer_ops.address, None, None, None, 0, layer.window or 0, kind, layer.scaling)
                for layer_ops, layer, kind in zip(ops, plan.layers, which, strict=True)
            )
        )
        self._cached: tuple[ReferenceType[SlotCache], object] | None = None  # whose addresses the structs have
        self._scratch = dict[int, int]()  # by tokens

    def logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: SlotCache,
        keep: int | Tensor | None,
        hidden: Tensor | None = None,
    ) -> Tensor | None:
        """Logits [B, W', vocabulary] of tokens [B, W] at these positions; None if the cache has another type.

        keep: the columns whose logits are returned: indices, 0 for all, or 1 for the last. None returns no logits, and
        skips layers after the last one that has its own keys. hidden: [B, W, H] in place of the tokens' embeddings.
        """
        hidden = self._plan.enter(self._model.get_input_embeddings()(tokens) if hidden is None else hidden)
        if not self._update_addresses(cache, hidden):
            return None
        hidden, forward = hidden.contiguous(), self._ops[0].prepared(cache, hidden)
        inputs = self._inputs(tokens, hidden)
        forward.struct.inputs = address(inputs)
        forward.struct.input_step = 0 if inputs is None else inputs[0, 0].numel()
        count = self._storing if keep is None and not cache.hidden else len(self._ops)
        self._compute(hidden, positions, forward, cache, count)
        if keep is None:
            return hidden.new_empty(0)
        kept = hidden if isinstance(keep, int) else hidden[:, keep]
        return self._plan.finish(self._model.get_output_embeddings()(kept))

    def _inputs(self, tokens: Tensor, hidden: Tensor) -> Tensor | None:
        """The layers' numbers from a second embedding; None if there is none."""
        if self._norm_of_inputs is None:
            return None
        return layer_inputs(self._inner, self._plan, tokens, hidden, partial(self._normalized, self._norm_of_inputs))

    def _normalized(self, norm: ctypes.Structure, x: Tensor) -> Tensor:
        x = x.contiguous()
        normed, size = torch.empty_like(x), x.shape[-1]
        pointers = ctypes.addressof(norm), x.data_ptr()
        self._library.normalize_tokens(*pointers, x.numel() // size, size, normed.data_ptr())
        return normed

    def _update_addresses(self, cache: SlotCache, hidden: Tensor) -> bool:
        """Set the addresses of the cache's tensors in the structs; returns whether their type is right."""
        if self._cached is not None and self._cached[0]() is cache and self._cached[1] == cache.addresses:
            return True
        self._cached = None
        self._scratch.clear()
        for index, struct in enumerate(self._structs):
            struct.entering = address(cache.hidden_store(index, hidden)) if index in cache.hidden else None
            struct.length = cache.held[1]
        for layer_ops, layer, struct in zip(self._ops, self._plan.layers, self._structs, strict=False):
            memory = layer_ops.memory(cache, layer, hidden)
            if memory is None:
                return False
            struct.keys, struct.values = map(address, memory)
        self._cached = ref(cache), cache.addresses
        return True

    def _compute(
        self, hidden: Tensor, positions: Tensor, forward: PreparedForward, cache: SlotCache, count: int
    ) -> None:
        """Run the first `count` layers in place on hidden states [B, W, H], and after all layers the last norm."""
        tokens = hidden.numel() // hidden.shape[-1]
        ropes = self._rotations.ropes(positions, hidden, cache.shape[1])
        parts = [part.contiguous() for rope in ropes for part in rope]
        pointers = (ctypes.c_void_p * max(2, len(parts)))(*map(address, parts))
        if tokens not in self._scratch:
            pairs = zip(self._ops, self._structs, strict=False)
            self._scratch[tokens] = max(layer_ops.scratch(tokens, struct.length) for layer_ops, struct in pairs)
        for layer_ops in self._ops:
            if layer_ops.experts is not None:
                layer_ops.experts.check_forced(tokens)
        scratch = forward.space(self._scratch[tokens])
        self._library.all_layers(
            ctypes.addressof(self._structs),
            count,
            ctypes.addressof(forward.struct),
            hidden.data_ptr(),
            tokens,
            ctypes.addressof(pointers),
            ctypes.addressof(self._norm) if count == len(self._ops) else None,
            scratch.data_ptr(),
        )
