"""Python's mirror of the structs and constants in the kernels' headers, and a check that both sides agree."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

from slipstream.errors import SlipstreamError

LANES = 16  # numbers that the kernels take at a time
PANEL, BLOCK, QUAD = 32, 128, 192  # of weights in 12 bits: outputs and inputs of a block, bytes of 4 inputs of a panel
SPACE = 3  # bfloat16 numbers of scratch space per input of a product
TWELVE_BITS = -1  # `format` of a matrix in 12 bits, which is in no block format
MAX_HEAD_SIZE, MAX_SHARED_HEADS = 256, 64  # of attention: numbers in a head, query heads of a key head
MAX_STATE, MAX_TAPS = 65536, 8  # of recurrences: numbers in a head's state, tokens that a channel sees
INPUTS = 32  # of a token, which share the scale of its activations; rows of blocks have a multiple of this
GROUPED = {"INT4": 16, "INT4_MINIMA": 17, "BFLOAT16": 18, "FLOAT16": 19, "FLOAT32": 20}  # enum grouped
KINDS = 64


class LinearStruct(ctypes.Structure):
    """`struct linear`: a bfloat16 layer's matrix, in 12 bits a weight or in blocks."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("data", "tables", "offsets", "exceptions", "bias")),
    ]


class NormStruct(ctypes.Structure):
    """`struct norm`: a root mean square norm for bfloat16 layers; without a weight there is no norm."""

    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_float), ("rounds_first", ctypes.c_int)]


class LayerStruct(ctypes.Structure):
    """`struct layer`: a whole bfloat16 decoder layer: its matrices, norms, sizes and activation."""

    _fields_ = [
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, NormStruct) for name in ("before_attention", "queries", "keys", "after_attention")),
        *((name, NormStruct) for name in ("before_feed_forward", "after_feed_forward")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "key_heads", "size")),
        *((name, ctypes.c_float) for name in ("slope", "cubic")),
    ]


class CacheStruct(ctypes.Structure):
    """`struct kv_cache`, `struct float_cache`: a layer's keys and values, and where those of a forward's tokens go."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("length", "window")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "places", "forks", "begins", "paths")),
    ]


class StackedLayerStruct(ctypes.Structure):
    """`struct stacked_layer`: one of several layers computed in one call, with its part of the cache."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("layer", "keys", "values", "entering")),
        *((name, ctypes.c_int64) for name in ("length", "window", "rotation")),
        ("scaling", ctypes.c_float),
    ]


class RecurrenceStruct(ctypes.Structure):
    """`struct recurrence`: a recurrent layer between its projections."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias", "rate", "shift", "skip")),
        *((name, ctypes.c_int64) for name in ("channels", "taps", "inputs", "heads", "key_heads", "key_size")),
        *((name, ctypes.c_int64) for name in ("value_size", "queries", "keys", "values", "ring")),
        *((name, ctypes.c_int32) for name in ("corrects", "normalised", "is_float")),
    ]


class SegmentStruct(ctypes.Structure):
    """`struct segment`: successive tokens of a row, and which of their states are kept."""

    _fields_ = [(name, ctypes.c_int64) for name in ("slot", "start", "count", "known", "keep")]


@dataclass(frozen=True)
class BlockFormat:
    """A block format. code: its number in the kernels; number: its type in GGUF files, -1 if they have none like it;
    size, bytes: values and bytes of a block."""

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


class PartStruct(ctypes.Structure):
    """`struct block_part`: outputs of a linear layer that share a block format."""

    _fields_ = [("format", ctypes.c_int64), ("outputs", ctypes.c_int64), ("data", ctypes.c_void_p)]


class FilePieceStruct(ctypes.Structure):
    """`struct file_piece`: rows of blocks in a file, and where their panels go."""

    _fields_ = [*((name, ctypes.c_int64) for name in ("format", "rows", "inputs", "start")), ("to", ctypes.c_void_p)]


class BlockLinearStruct(ctypes.Structure):
    """`struct block_linear`: a linear layer made of parts, each in a block format of its own."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("inputs", "outputs", "num_parts")),
        *((name, ctypes.c_void_p) for name in ("parts", "bias")),
    ]


class ExpertMatrixStruct(ctypes.Structure):
    """`struct expert_matrix`: a matrix of each expert of a layer."""

    _fields_ = [("format", ctypes.c_int64), ("data", ctypes.c_void_p), ("bias", ctypes.c_void_p)]


class ExpertSetStruct(ctypes.Structure):
    """`struct expert_set`: the matrices of experts of equal size."""

    _fields_ = [("inner", ctypes.c_int64), *((name, ExpertMatrixStruct) for name in ("gate", "up", "down"))]


class ExpertsStruct(ctypes.Structure):
    """`struct experts`: the feed-forward part of a mixture's layer."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("hidden", "count", "used", "planes")),
        ("router", PartStruct),
        *((name, ctypes.c_void_p) for name in ("router_bias", "choice_bias", "shared_gate")),
        *((name, ExpertSetStruct) for name in ("routed", "shared")),
        *((name, ctypes.c_int32) for name in ("is_sigmoid", "normalises")),
        *((name, ctypes.c_float) for name in ("floor", "factor", "slope", "cubic", "limit", "shift")),
        ("reads", ctypes.c_void_p),
    ]


class FloatNormStruct(ctypes.Structure):
    """`struct float_norm`: `struct norm` for layers that compute in float32."""

    _fields_ = [("weight", ctypes.c_void_p), ("eps", ctypes.c_float)]


class FloatLayerStruct(ctypes.Structure):
    """`struct float_layer`: `struct layer` with matrices in blocks, computed in float32."""

    _fields_ = [
        *((name, BlockLinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *((name, FloatNormStruct) for name in ("before_attention", "queries", "keys", "after_attention")),
        *((name, FloatNormStruct) for name in ("before_feed_forward", "after_feed_forward")),
        *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "key_heads", "size", "planes")),
        *((name, ctypes.c_float) for name in ("slope", "cubic")),
    ]


MIRRORS: Mapping[str, type[ctypes.Structure]] = {
    "linear": LinearStruct,
    "norm": NormStruct,
    "layer": LayerStruct,
    "kv_cache": CacheStruct,
    "stacked_layer": StackedLayerStruct,
    "recurrence": RecurrenceStruct,
    "segment": SegmentStruct,
    "block_part": PartStruct,
    "file_piece": FilePieceStruct,
    "block_linear": BlockLinearStruct,
    "expert_matrix": ExpertMatrixStruct,
    "expert_set": ExpertSetStruct,
    "experts": ExpertsStruct,
    "float_norm": FloatNormStruct,
    "float_layer": FloatLayerStruct,
    "float_cache": CacheStruct,
}
CONSTANTS: Mapping[str, int] = {
    "LANES": LANES,
    "PANEL": PANEL,
    "BLOCK": BLOCK,
    "QUAD": QUAD,
    "GROUP": INPUTS,
    "TWELVE_BITS": TWELVE_BITS,
    "SPACE": SPACE,
    "MAX_HEAD_SIZE": MAX_HEAD_SIZE,
    "MAX_SHARED_HEADS": MAX_SHARED_HEADS,
    "MAX_STATE": MAX_STATE,
    "MAX_TAPS": MAX_TAPS,
    **{block.name: block.code for block in FORMATS},
    "FORMATS": len(FORMATS),
    **GROUPED,
    "KINDS": KINDS,
}


class _Entry(ctypes.Structure):
    """`struct entry` of layout.c."""

    _fields_ = [("name", ctypes.c_char_p), ("value", ctypes.c_int64)]


def check_layout(library: ctypes.CDLL, mirrors: Mapping[str, type[ctypes.Structure]] = MIRRORS) -> None:
    """Compare every size, offset and constant with the compiled ones; raises `SlipstreamError` at a difference."""
    compiled, mirrored = _compiled(library), dict(CONSTANTS)
    for name, mirror in mirrors.items():
        mirrored[f"sizeof {name}"] = ctypes.sizeof(mirror)
        for field in mirror._fields_:
            mirrored[f"{name}.{field[0]}"] = getattr(mirror, field[0]).offset
    for name in [*compiled, *mirrored]:
        if compiled.get(name) != mirrored.get(name):
            raise SlipstreamError(
                f"the compiled kernels and their mirror in Python disagree: {name} is "
                f"{compiled.get(name, 'unknown')} in C and {mirrored.get(name, 'unknown')} in Python"
            )


def _compiled(library: ctypes.CDLL) -> dict[str, int]:
    """Sizes, offsets and constants by name, as layout.c exports them."""
    entries = ctypes.cast(ctypes.addressof(_Entry.in_dll(library, "layout")), ctypes.POINTER(_Entry))
    values, index = dict[str, int](), 0
    while entries[index].name is not None:
        values[entries[index].name.decode()] = entries[index].value
        index += 1
    return values
