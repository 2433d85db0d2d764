"""Python's mirror of the structs and constants in the kernels' headers, and a check that both sides agree."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slipstream.errors import SlipstreamError

LANES = 16  # numbers that the kernels take at a time
PANEL, BLOCK, QUAD = 32, 128, 192  # of weights in 12 bits: outputs and inputs of a block, bytes of 4 inputs of a panel
SPACE = 3  # bfloat16 numbers of scratch space per input of a product
TWELVE_BITS = -1  # `format` of a matrix in 12 bits, which is in no block format
MAX_HEAD_SIZE, MAX_SHARED_HEADS = 256, 64  # of attention: numbers in a head, query heads of a key head
MAX_STATE, MAX_TAPS = 65536, 8  # of recurrences: numbers in a head's state, tokens that a channel sees
INPUTS = 32  # of a token, which share the scale of its activations; rows of blocks have a multiple of this
KINDS = 64  # `format` of a group of inputs with one scale is its type plus this times their number


class LinearStruct(ctypes.Structure):
    """`struct linear`: a bfloat16 layer's matrix, in 12 bits a weight or in blocks."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "inputs", "outputs")),
        *((name, ctypes.c_void_p) for name in ("data", "tables", "offsets", "exceptions", "bias")),
    ]


class NormStruct(ctypes.Structure):
    """`struct norm`: root mean square norm or LayerNorm; without a weight there is no norm."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("rounds_first", "is_centred")),
    ]


NORMS = [
    *((name, NormStruct) for name in ("before_attention", "queries", "keys", "after_attention")),
    *((name, NormStruct) for name in ("before_feed_forward", "after_feed_forward")),
]
MIXER = ("mixer", ctypes.c_void_p)
LAYER_NUMBERS: list[tuple[str, Any]] = [
    *((name, ctypes.c_int64) for name in ("hidden", "inner", "heads", "key_heads", "size", "rotated")),
    *((name, ctypes.c_float) for name in ("slope", "cubic", "residual", "soft_cap")),
    *((name, ctypes.c_int32) for name in ("rotates_pairs", "grows_queries", "norms_all_heads")),
    *((name, ctypes.c_int32) for name in ("is_gated", "is_parallel", "gates_queries")),
]


class LayerStruct(ctypes.Structure):
    """`struct layer`: a whole bfloat16 decoder layer: its matrices, norms, numbers and switches."""

    _fields_ = [
        *((name, LinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *NORMS,
        *((name, ctypes.c_void_p) for name in ("sinks", "experts")),
        MIXER,
        *LAYER_NUMBERS,
    ]


class CacheStruct(ctypes.Structure):
    """`struct kv_cache`: a layer's keys and values, and where those of a forward's tokens go."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("length", "window")),
        ("scaling", ctypes.c_float),
        *((name, ctypes.c_void_p) for name in ("slots", "positions", "places", "forks", "begins", "paths", "segments")),
        ("rows", ctypes.c_int64),
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


class MixerStruct(ctypes.Structure):
    """`struct mixer`: a recurrence between the two products of a layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("recurrence", "norm", "places")),
        *((name, ctypes.c_int64) for name in ("channels", "factors", "gates", "rest", "group")),
        ("eps", ctypes.c_float),
        ("gates_first", ctypes.c_int32),
    ]


class SegmentStruct(ctypes.Structure):
    """`struct segment`: successive tokens of a row, and which of their states are kept."""

    _fields_ = [(name, ctypes.c_int64) for name in ("slot", "start", "count", "known", "keep")]


@dataclass(frozen=True)
class BlockFormat:
    """A type of weights. code: its number in the kernels; number: its type in GGUF files, -1 if they have none like it;
    size, bytes: values and bytes of a block."""

    name: str
    code: int
    number: int
    size: int
    bytes: int


# TYPES of structs.h. A block of the last five is a single number, or a group's head of so many bytes
TYPES = tuple(
    BlockFormat(name, code, *numbers)
    for code, (name, *numbers) in enumerate(
        (
            ("Q4_0", 2, 32, 18),
            ("Q4_1", 3, 32, 20),
            ("Q5_0", 6, 32, 22),
            ("Q5_1", 7, 32, 24),
            ("Q8_0", 8, 32, 34),
            ("Q2_K", 10, 256, 84),
            ("Q3_K", 11, 256, 110),
            ("Q4_K", 12, 256, 144),
            ("Q5_K", 13, 256, 176),
            ("Q6_K", 14, 256, 210),
            ("IQ3_XXS", 18, 256, 98),
            ("IQ4_NL", 20, 32, 18),
            ("IQ3_S", 21, 256, 110),
            ("IQ4_XS", 23, 256, 136),
            ("TQ1_0", 34, 256, 54),
            ("TQ2_0", 35, 256, 66),
            ("MXFP4", 39, 32, 17),
            ("NVFP4", 40, 64, 36),
            ("INT4", -1, 0, 4),
            ("INT4_MINIMA", -1, 0, 8),
            ("F32", 0, 1, 4),
            ("F16", 1, 1, 2),
            ("BF16", 30, 1, 2),
        )
    )
)
BY_NAME = {block.name: block for block in TYPES}
FORMATS = tuple(block for block in TYPES if block.size > 1)  # the quantised types of GGUF files


class PartStruct(ctypes.Structure):
    """`struct block_part`: outputs of a linear layer that share a block format."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ("format", "outputs")),
        *((name, ctypes.c_void_p) for name in ("data", "scale")),
    ]


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

    _fields_ = [("format", ctypes.c_int64), *((name, ctypes.c_void_p) for name in ("data", "bias", "scales"))]


class ExpertSetStruct(ctypes.Structure):
    """`struct expert_set`: the matrices of experts of equal size."""

    _fields_ = [("inner", ctypes.c_int64), *((name, ExpertMatrixStruct) for name in ("gate", "up", "down"))]


class ExpertRowsStruct(ctypes.Structure):
    """`struct expert_rows`: where a matrix of a layer's experts is in a file."""

    _fields_ = [(name, ctypes.c_int64) for name in ("file", "start", "step")]


class ExpertSlotStruct(ctypes.Structure):
    """`struct expert_slot`: an expert in memory."""

    _fields_ = [("owner", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("expert", "used"))]


class ExpertStoreStruct(ctypes.Structure):
    """`struct expert_store`: memory for the experts of a model that are in use."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("memory", "slots")),
        *((name, ctypes.c_int64) for name in ("bytes", "count", "forwards", "packed", "failed")),
    ]


class StoredExpertsStruct(ctypes.Structure):
    """`struct stored_experts`: the experts of a layer in a store."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("store", "places")),
        *((name, ExpertRowsStruct) for name in ("gate", "up", "down")),
    ]


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
        ("num_forced", ctypes.c_int64),
        ("forced", ctypes.c_void_p),
        ("stored", ctypes.c_void_p),
    ]


class FloatLayerStruct(ctypes.Structure):
    """`struct float_layer`: `struct layer` with matrices in blocks, computed in float32."""

    _fields_ = [
        *((name, BlockLinearStruct) for name in ("qkv", "out", "gate_up", "down")),
        *NORMS,
        *((name, ctypes.c_void_p) for name in ("sinks", "experts")),
        MIXER,
        ("planes", ctypes.c_int64),
        *LAYER_NUMBERS,
    ]


MIRRORS: Mapping[str, type[ctypes.Structure]] = {
    "linear": LinearStruct,
    "norm": NormStruct,
    "layer": LayerStruct,
    "kv_cache": CacheStruct,
    "stacked_layer": StackedLayerStruct,
    "recurrence": RecurrenceStruct,
    "mixer": MixerStruct,
    "segment": SegmentStruct,
    "block_part": PartStruct,
    "file_piece": FilePieceStruct,
    "block_linear": BlockLinearStruct,
    "expert_matrix": ExpertMatrixStruct,
    "expert_set": ExpertSetStruct,
    "experts": ExpertsStruct,
    "expert_rows": ExpertRowsStruct,
    "expert_slot": ExpertSlotStruct,
    "expert_store": ExpertStoreStruct,
    "stored_experts": StoredExpertsStruct,
    "float_layer": FloatLayerStruct,
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
    **{block.name: block.code for block in TYPES},
    **{f"{block.name}.{field}": getattr(block, field) for block in TYPES for field in ("number", "size", "bytes")},
    "FORMATS": len(TYPES),
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
