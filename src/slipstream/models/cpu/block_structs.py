"""The structs and constants of `csrc/blocks/block_structs.h` as Python has them, and the formats of GGUF blocks."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.models.cpu.c_structs import LANES, StackedLayerStruct

INPUTS, LARGEST_HEAD, MOST_REPEATS = 32, 256, 64  # GROUP, MAX_HEAD and MAX_REPEATS of the header


@dataclass(frozen=True)
class BlockFormat:
    """A block type. code: as in the kernels; number: as in GGUF files, -1 if in none; size, bytes: of a block, values
    and bytes."""

    name: str
    code: int
    number: int
    size: int
    bytes: int


FORMATS = (
    BlockFormat("Q4_0", 0, 2, 32, 18),
    BlockFormat("Q4_1", 1, 3, 32, 20),
    BlockFormat("Q5_0", 2, 6, 32, 22),
    BlockFormat("Q5_1", 3, 7, 32, 24),
    BlockFormat("Q8_0", 4, 8, 32, 34),
    BlockFormat("Q4_K", 5, 12, 256, 144),
    BlockFormat("Q5_K", 6, 13, 256, 176),
    BlockFormat("Q6_K", 7, 14, 256, 210),
)

GROUPED = {"INT4": 16, "INT4_MINIMA": 17, "BFLOAT16": 18, "FLOAT16": 19, "FLOAT32": 20}  # enum grouped
KINDS = 64


class PartStruct(ctypes.Structure):
    """`struct block_part`."""

    _fields_ = [("format", ctypes.c_int64), ("outputs", ctypes.c_int64), ("data", ctypes.c_void_p)]


class FilePieceStruct(ctypes.Structure):
    """`struct file_piece`."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("format", "rows", "inputs", "start")), ("to", ctypes.c_void_p)]


class BlockLinearStruct(ctypes.Structure):
    """`struct block_linear`."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "num_parts")),
        *((name, ctypes.c_void_p) for name in ("parts", "bias")),
    ]


class FloatNormStruct(ctypes.Structure):
    """`struct float_norm`."""

    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_float)]


class FloatLayerStruct(ctypes.Structure):
    """`struct float_layer`."""

    _fields_ = [
        *((name, BlockLinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, FloatNormStruct) for name in ("before_attention", "queries", "keys", "after_attention")),
        *((name, FloatNormStruct) for name in ("before_feed_forward", "after_feed_forward")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "key_heads", "size", "planes")),
        *((name, ctypes.c_float) for name in ("slope", "cubic")),
    ]


class FloatCacheStruct(ctypes.Structure):
    """`struct float_cache`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("length", "window")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "places", "forks", "begins", "paths")),
    ]


BLOCK_MIRRORS: Mapping[str, type[ctypes.Structure]] = {
    "block_part": PartStruct,
    "file_piece": FilePieceStruct,
    "block_linear": BlockLinearStruct,
    "float_norm": FloatNormStruct,
    "float_layer": FloatLayerStruct,
    "float_cache": FloatCacheStruct,
    "stacked_layer": StackedLayerStruct,
}
BLOCK_CONSTANTS: Mapping[str, int] = {
    "LANES": LANES,
    "GROUP": INPUTS,
    "MAX_HEAD": LARGEST_HEAD,
    "MAX_REPEATS": MOST_REPEATS,
    **{block.name: block.code for block in FORMATS},
    "FORMATS": len(FORMATS),
    **GROUPED,
    "KINDS": KINDS,
}
