"""How fast does the kernel of matrix products read its weights: with the tiles in use, with others, and in PyTorch?

Weights are bfloat16, or blocks of a GGUF file, which take fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.structs import BY_NAME
from slipstream.models.cuda import triton_layer
from slipstream.models.cuda.stored_weights import KINDS, StoredLinear, Weight
from slipstream.models.cuda.triton_layer import COLUMNS, Product, Tile

TOKENS = (1, 8, 16, 64, 256)
TOKENS_OF_BLOCKS = (1, 8)  # fewer, since each type of blocks is compiled for each tile
OTHER_TILES = {  # for up to 16 tokens; tiles do not change a product's bits
    "32 columns": Tile(1, 16, 32, 4, 4),
    "128 columns": Tile(1, 16, 128, 4, 3),
    "3 stages": Tile(1, 16, COLUMNS, 4, 3),
    "6 stages": Tile(1, 16, COLUMNS, 4, 6),
    "2 warps": Tile(1, 16, COLUMNS, 2, 4),
    "8 warps": Tile(1, 16, COLUMNS, 8, 4),
}
TURNING_BYTES = 1 << 28  # of weights that take turns, so that none stays in the GPU's cache


def compare_products(models: Sequence[Any], small: bool) -> dict[str, dict[str, float]]:
    """Gigabytes of weights per second, by layer shape and then by number of tokens and way; empty without a GPU."""
    if small or not torch.cuda.is_available():
        return {}
    speeds = {}
    for model in models:
        config = model.config
        heads = config.num_attention_heads + 2 * config.num_key_value_heads
        shapes = {
            "qkv": (config.hidden_size, heads * config.head_dim),
            "out": (config.num_attention_heads * config.head_dim, config.hidden_size),
            "gate, up": (config.hidden_size, 2 * config.intermediate_size),
            "down": (config.intermediate_size, config.hidden_size),
        }
        for name, (inner, outputs) in shapes.items():
            speeds[f"{name} {inner} to {outputs}"] = _speeds(inner, outputs)
    return speeds


def _speeds(inner: int, outputs: int) -> dict[str, float]:
    size = 2 * inner * outputs
    layers = [_layer(inner, outputs) for _ in range(max(2, -(-TURNING_BYTES // size)))]
    products, speeds = [Product([layer]) for layer in layers], {}
    for tokens in TOKENS:
        x = torch.randn(tokens, inner, dtype=torch.bfloat16, device="cuda")
        speeds[f"{tokens} libraries"] = _gigabytes(layers, x, size)
        speeds[f"{tokens} kernel"] = _gigabytes(products, x, size)
    for kind in KINDS:
        block = BY_NAME[kind]
        row_bytes = inner // block.size * block.bytes
        stored = [Product([_stored(kind, outputs, row_bytes, inner)]) for _ in layers]
        for tokens in TOKENS_OF_BLOCKS:
            x = torch.randn(tokens, inner, dtype=torch.bfloat16, device="cuda")
            speeds[f"{tokens} {kind}"] = _gigabytes(stored, x, outputs * row_bytes)
    x, tiles = torch.randn(1, inner, dtype=torch.bfloat16, device="cuda"), dict(triton_layer.TILES)
    for name, tile in OTHER_TILES.items():
        triton_layer.TILES[16] = tile
        try:
            speeds[f"1 {name}"] = _gigabytes(products, x, size)
        finally:
            triton_layer.TILES.update(tiles)
    return {name: round(speed) for name, speed in speeds.items()}


def _layer(inner: int, outputs: int) -> nn.Linear:
    layer = nn.Linear(inner, outputs, bias=False, dtype=torch.bfloat16, device="cuda")
    return layer.requires_grad_(False)


def _stored(kind: str, outputs: int, row_bytes: int, inner: int) -> StoredLinear:
    """Blocks of random bytes, low enough that their scales are finite."""
    data = torch.randint(0, 60, (outputs, row_bytes), dtype=torch.uint8, device="cuda")
    return StoredLinear([Weight(data, inner, kind)], None)


def _gigabytes(products: Sequence[Callable[[Tensor], Tensor]], x: Tensor, size: int) -> float:
    """Gigabytes per second of products with weights of `size` bytes, timed in a CUDA graph that runs each twice."""
    for product in products:
        product(x)
    torch.cuda.synchronize()
    graph, count = torch.cuda.CUDAGraph(), 2 * len(products)
    with torch.cuda.graph(graph):
        for product, _ in zip(cycle(products), range(count), strict=False):
            product(x)
    graph.replay()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(5):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 5 * count * size / begin.elapsed_time(end) / 1e6
