"""The structs and constants of the kernels' header, `csrc/structs.h`, which documents them."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HEADER = Path(__file__).with_name("csrc") / "structs.h"
CONSTANT = re.compile(r"\b([A-Z]\w+) = (-?\d+)")
MACRO = re.compile(r"^#define (LAYER_\w+) (.*)", re.MULTILINE)
TYPE = re.compile(r"\bX\((\w+), (-?\d+), (\d+), (\d+), \w+\)")
STRUCT = re.compile(r"^struct (\w+) \{(.*?)^\};", re.MULTILINE | re.DOTALL)
FIELDS = re.compile(r"(?:const |struct |_Atomic )*(\w+) ([^;]+);")  # of one type; each field's last word is its name
NUMBERS = {"int64_t": ctypes.c_int64, "int32_t": ctypes.c_int32, "float": ctypes.c_float}


@dataclass(frozen=True)
class BlockFormat:
    """A type of weights."""

    name: str
    code: int  # in the kernels
    number: int  # in GGUF files; -1: they have no such type
    size: int  # values in a block
    bytes: int  # of a block

    def fits(self, inputs: int) -> bool:
        """True if rows of this many weights consist of whole blocks, and of whole groups of the kernels."""
        return inputs % self.size == 0 and inputs % INPUTS == 0

    def row_bytes(self, inputs: int) -> int:
        """Bytes of a row in the file."""
        return inputs // self.size * self.bytes

    def panels_size(self, shape: tuple[int, int], library: Any) -> int:
        """Bytes of the panels of a matrix [outputs, inputs]."""
        outputs, inputs = shape
        panel_bytes: int = library.panel_bytes(self.code, inputs)
        return -(-outputs // LANES) * panel_bytes

    def row_ranges(self, shape: tuple[int, int], max_bytes: int) -> list[tuple[int, int]]:
        """Ranges [first, last) of a matrix's rows, in order: as many whole panels as `max_bytes` of the file allow.

        Each has at least one panel.
        """
        outputs, inputs = shape
        step = max(max_bytes // self.row_bytes(inputs) // LANES, 1) * LANES
        return [(row, min(row + step, outputs)) for row in range(0, outputs, step)]


def _structs(text: str) -> dict[str, type[ctypes.Structure]]:
    """The structs of a header by name. Each field is a pointer, a number or an earlier struct."""
    macros, structs = dict(MACRO.findall(text)), dict[str, type[ctypes.Structure]]()
    for name, body in STRUCT.findall(text):
        expanded = re.sub(r"\bLAYER_\w+", lambda macro: macros[macro[0]], body)
        fields: list[tuple[str, Any]] = [
            (field.split()[-1].lstrip("*"), ctypes.c_void_p if "*" in field else NUMBERS.get(kind) or structs[kind])
            for kind, declared in FIELDS.findall(expanded)
            for field in declared.split(",")
        ]

        class Struct(ctypes.Structure):
            _fields_ = fields

        structs[name] = Struct
    return structs


_TEXT = re.sub(r"/\*.*?\*/", "", HEADER.read_text(encoding="utf-8").replace("\\\n", " "), flags=re.DOTALL)
STRUCTS = _structs(_TEXT)
BlockLinearStruct = STRUCTS["block_linear"]
CacheStruct = STRUCTS["kv_cache"]
ExpertMatrixStruct = STRUCTS["expert_matrix"]
ExpertRowsStruct = STRUCTS["expert_rows"]
ExpertSetStruct = STRUCTS["expert_set"]
ExpertSlotStruct = STRUCTS["expert_slot"]
ExpertStoreStruct = STRUCTS["expert_store"]
ExpertsStruct = STRUCTS["experts"]
FilePieceStruct = STRUCTS["file_piece"]
FloatLayerStruct = STRUCTS["float_layer"]
LatentStruct = STRUCTS["latent"]
LayerStruct = STRUCTS["layer"]
LinearStruct = STRUCTS["linear"]
MixerStruct = STRUCTS["mixer"]
NormStruct = STRUCTS["norm"]
PartStruct = STRUCTS["block_part"]
RecurrenceStruct = STRUCTS["recurrence"]
SegmentStruct = STRUCTS["segment"]
StackedLayerStruct = STRUCTS["stacked_layer"]
StoredExpertsStruct = STRUCTS["stored_experts"]

# fields of a layer: its products (all layers have the first two), its norms, its numbers and switches
LINEARS = [name for name, kind, *_ in LayerStruct._fields_ if kind is LinearStruct]
NORMS = [name for name, kind, *_ in LayerStruct._fields_ if kind is NormStruct]
LAYER_NUMBERS = [name for name, kind, *_ in LayerStruct._fields_ if kind in NUMBERS.values()]

CONSTANTS = {name: int(value) for name, value in CONSTANT.findall(_TEXT)}
LANES, PANEL, BLOCK, QUAD = (CONSTANTS[name] for name in ("LANES", "PANEL", "BLOCK", "QUAD"))
INPUTS, SPACE, KINDS, TWELVE_BITS = (CONSTANTS[name] for name in ("GROUP", "SPACE", "KINDS", "TWELVE_BITS"))
MAX_HEAD_SIZE, MAX_SHARED_HEADS = CONSTANTS["MAX_HEAD_SIZE"], CONSTANTS["MAX_SHARED_HEADS"]
MAX_GROUPS, MAX_STATE, MAX_TAPS = CONSTANTS["MAX_GROUPS"], CONSTANTS["MAX_STATE"], CONSTANTS["MAX_TAPS"]

TYPES = tuple(BlockFormat(name, code, *map(int, numbers)) for code, (name, *numbers) in enumerate(TYPE.findall(_TEXT)))
BY_NAME = {block.name: block for block in TYPES}
FORMATS = tuple(block for block in TYPES if block.size > 1)  # the quantized types of GGUF files
