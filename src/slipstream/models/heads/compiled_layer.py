"""Runs a head's only layer, after its joint projection, in one call of the kernels; for bfloat16 on a CPU.

In a draft step, calling operators takes longer than their arithmetic. The specification is `HeadNetwork.layer`,
operator by operator.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from slipstream.models.cpu.kernel_libraries import address, kernels
from slipstream.models.cpu.packed_linear import KernelLinear
from slipstream.models.cpu.structs import LANES, MAX_HEAD_SIZE, MAX_SHARED_HEADS, CacheStruct, LayerStruct, NormStruct
from slipstream.models.decoder.plan import SILU
from slipstream.models.heads.network import HeadConfig, HeadNetwork

NO_NORM = NormStruct()


class CompiledLayer:
    """The kernels' struct of a network's layer. rope: as `HeadNetwork.rope`."""

    def __init__(self, network: HeadNetwork, products: list[KernelLinear], library: Any) -> None:
        """products: the network's qkv, out, gate_up and down."""
        config, weights = network.config, network.weights
        self.network, self.rope = network, network.rope
        self._products, self._norms = products, list[Tensor]()  # kept: the structs have only their addresses
        head_norms = [None] * 2 if weights.head_norms is None else [weights.head_norms[i, 0] for i in (0, -1)]
        queries, keys = (self._norm(norm, rounds_first=1) for norm in head_norms)
        self._layer = LayerStruct(
            *(product.weights for product in products),
            queries=queries,
            keys=keys,
            before_feed_forward=self._norm(weights.middle_norm),
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            heads=config.num_heads,
            key_heads=config.num_key_heads,
            size=config.head_dim,
            rotated=config.head_dim,
            slope=SILU[0],
            cubic=SILU[1],
            residual=1.0,
            scale=1.0,
            is_gated=True,
        )
        self._size, self._scaling = config.head_dim, config.head_dim**-0.5
        self._library = library

    def _norm(self, weight: Tensor | None, rounds_first: int = 0) -> ctypes.Structure:
        if weight is None:
            return NO_NORM
        self._norms.append(weight.float().contiguous())
        return NormStruct(address(self._norms[-1]), eps=self.network.config.eps, rounds_first=rounds_first)

    def __call__(
        self, residual: Tensor, heads: Tensor, rope: Tensor, where: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """The outputs [B, W, H] of rows with a residual [B, W, H] and projections `heads` [B, W, all heads * D].

        rope: [2, B * W, D], cosines and sines. where: [3, B * W], each token's slot, the last place that it sees in
        keys and values [slots, key heads, places, D], and the place to which it is written.
        """
        residual, heads, tokens = residual.contiguous(), heads.contiguous(), where.shape[1]
        length, layer = keys.stride(1) // self._size, ctypes.addressof(self._layer)
        scratch = residual.new_empty(self._library.layer_scratch(layer, tokens, length))
        out = torch.empty_like(residual)
        slots, seen, places = (part.data_ptr() for part in where)
        window = self.network.config.windows[0] or 0
        memory = CacheStruct(*map(address, (keys, values)), length, window, self._scaling, slots, seen, places)
        cosines, sines = rope
        inputs, pointers = map(address, (residual, heads)), map(address, (cosines, sines, out, scratch))
        self._library.finish_layer(layer, ctypes.addressof(memory), *inputs, tokens, *pointers)
        return out


def compiled_layer(network: HeadNetwork) -> CompiledLayer | None:
    """The compiled layer of a head; None if the kernels do not support its weights or sizes."""
    weights = network.weights
    library = kernels() if network.device.type == "cpu" and network.dtype == torch.bfloat16 else None
    linears = weights.qkv, weights.out, weights.gate_up, weights.down
    products = [linear for linear in linears if isinstance(linear, KernelLinear) and linear.dtype == torch.bfloat16]
    if library is None or len(products) < len(linears) or weights.further or not _fits(network.config):
        return None
    return CompiledLayer(network, products, library)


def _fits(config: HeadConfig) -> bool:
    wide = config.hidden_size % LANES == config.intermediate_size % LANES == config.head_dim % (2 * LANES) == 0
    return wide and config.head_dim <= MAX_HEAD_SIZE and config.num_heads <= MAX_SHARED_HEADS * config.num_key_heads
