"""What the beginning of a GGUF file says: its architecture, and where which tensor is. Nothing of it is trusted.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Versions 2 and 3, little endian.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.block_structs import FORMATS, BlockFormat

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
FLOATS = {0: ("F32", 4), 1: ("F16", 2), 30: ("BF16", 2)}  # number: name, bytes
BLOCKS = {block.number: block for block in FORMATS}
MOST_DIMENSIONS, MOST_STRING = 4, 1 << 26
INSTALL = "pip install 'slipstream-lm[gguf]'"


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of the file. kind: its type's number; shape: rows first; start: its first byte in the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    start: int

    @property
    def block(self) -> BlockFormat | None:
        """Its block type, if the kernels compute with it."""
        return BLOCKS.get(self.kind)

    @property
    def kind_name(self) -> str:
        """The type as people write it."""
        return self.block.name if self.block else FLOATS[self.kind][0] if self.kind in FLOATS else type_name(self.kind)

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row; None where the type is not known here."""
        if self.block is not None:
            return self.shape[-1] // self.block.size * self.block.bytes
        return self.shape[-1] * FLOATS[self.kind][1] if self.kind in FLOATS else None


@dataclass(frozen=True)
class GGUFHeader:
    """architecture: as the file has it; digest, size: of all that stands before the tensors' data, in bytes.

    scaling: the metadata `rope.scaling.*` of the architecture.
    """

    file: Path
    architecture: str
    tensors: dict[str, TensorEntry]
    digest: str
    size: int
    scaling: dict[str, Any]

    def check(self) -> None:
        """Refuse unknown types, rows that are not whole blocks, and tensors that overlap or that the file lacks."""
        size = self.file.stat().st_size
        before: tuple[int, str] | None = None  # where the tensor before it ends, and its name
        for entry in sorted(self.tensors.values(), key=lambda entry: entry.start):
            self._check_type(entry)
            if 0 in entry.shape:
                continue  # it has no bytes
            if before is not None and entry.start < before[0]:
                raise self._wrong(entry, f"begins within tensor {before[1]!r}; allowed: tensors that do not overlap")
            if entry.row_bytes is not None:
                before = self._end(entry, entry.row_bytes, size), entry.name

    def _check_type(self, entry: TensorEntry) -> None:
        if entry.row_bytes is None and entry.kind not in (names := _type_names()):
            known = ", ".join([*(name for name, _ in FLOATS.values()), *(block.name for block in FORMATS)])
            other = "others that the gguf package names" if names else f"others after {INSTALL}"
            raise self._wrong(entry, f"is of the unknown {entry.kind_name}; allowed: {known}, and {other}")
        if entry.block is not None and entry.shape[-1] % entry.block.size:
            has = f"has rows of {entry.shape[-1]} numbers in {entry.block.name}"
            raise self._wrong(entry, f"{has}; allowed: multiples of {entry.block.size}")

    def _end(self, entry: TensorEntry, row_bytes: int, size: int) -> int:
        """The byte after a tensor; refuses one that a file of `size` bytes does not hold whole."""
        end = entry.start + prod(entry.shape[:-1]) * row_bytes
        if end > size:
            raise SlipstreamError(
                f"model {str(self.file)!r} is truncated: the file ends before its last tensor: tensor "
                f"{entry.name!r} ends at byte {end:,}, the file at {size:,}"
            )
        return end

    def _wrong(self, entry: TensorEntry, what: str) -> SlipstreamError:
        return SlipstreamError(f"model {str(self.file)!r}: tensor {entry.name!r} {what}")


def type_name(number: int) -> str:
    """What the gguf package calls a tensor's type."""
    return _type_names().get(number, f"type {number}")


def _type_names() -> dict[int, str]:
    """The gguf package's types by number; none where it is not installed."""
    try:
        from gguf import GGMLQuantizationType
    except ImportError:
        return {}
    return {kind.value: kind.name for kind in GGMLQuantizationType}


class _Reader:
    """Reads numbers and strings in order; raises struct.error or EOFError past the end."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.at)
        self.at += struct.calcsize(f"<{form}")
        return value

    def string(self) -> str:
        length = self.number("Q")
        if length > MOST_STRING or self.at + length > len(self.data):
            raise EOFError(f"a text of {length} bytes")
        self.at += length
        return self.data[self.at - length : self.at].decode(errors="replace")

    def _skip_strings(self, count: int) -> None:
        """As `string` so often; a vocabulary has hundreds of thousands."""
        at, end, length_at = self.at, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_at(self.data, at)
            at += 8 + length
            if length > MOST_STRING or at > end:
                raise EOFError(f"a text of {length} bytes")
        self.at = at

    def value(self, kind: int) -> Any:
        """A value of the metadata; of an array only that it is there."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            self.at += count * struct.calcsize(f"<{SCALARS[inner]}")
            if self.at > len(self.data):
                raise EOFError(f"an array of {count} numbers")
        elif inner == STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self.value(inner)
        return None


def read_header(file: Path) -> GGUFHeader:
    """The header of a file. Raises `UsageError` for what is no GGUF file, `SlipstreamError` for one that is damaged."""
    if not file.is_file():
        raise UsageError(f"model {str(file)!r} does not exist; allowed: a readable .gguf file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"model {str(file)!r} is not a GGUF file (its first four bytes are not 'GGUF')")
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(file, _Reader(data))
            except (struct.error, EOFError, KeyError, RecursionError) as error:
                if isinstance(error, KeyError | RecursionError):
                    reason = f"could not be read as GGUF: a value of unknown type {error}"
                else:
                    reason = "is truncated: the file ends before its last tensor: it ends in its header"
                raise SlipstreamError(f"model {str(file)!r} {reason}") from error


def _parse(file: Path, reader: _Reader) -> GGUFHeader:
    reader.at = 4
    version = reader.number("I")
    if version not in (2, 3):
        raise SlipstreamError(f"model {str(file)!r} could not be read as GGUF: version {version}; allowed: 2, 3")
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    values = dict[str, Any]()
    for _ in range(num_values):
        name = reader.string()
        values[name] = reader.value(reader.number("I"))
    found = dict[str, tuple[int, tuple[int, ...], int]]()
    for _ in range(num_tensors):
        name, dimensions = reader.string(), reader.number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise SlipstreamError(f"model {str(file)!r}: tensor {name!r} has {dimensions} dimensions; allowed: 1 to 4")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        if name in found:
            raise SlipstreamError(f"model {str(file)!r}: two tensors are called {name!r}; allowed: a name for each")
        found[name] = reader.number("I"), shape, reader.number("Q")
    alignment = values.get("general.alignment") or 32
    if not isinstance(alignment, int) or alignment < 1:
        raise SlipstreamError(
            f"model {str(file)!r}: general.alignment is {alignment!r}; allowed: a whole number from 1"
        )
    for name, (_, _, offset) in found.items():
        if offset % alignment:
            begins = f"tensor {name!r} begins at byte {offset:,} of the data"
            raise SlipstreamError(f"model {str(file)!r}: {begins}; allowed: multiples of {alignment}")
    data = -(-reader.at // alignment) * alignment
    digest = hashlib.sha256(reader.data[: reader.at]).hexdigest()[:16]
    tensors = {name: TensorEntry(name, kind, shape, data + offset) for name, (kind, shape, offset) in found.items()}
    architecture = str(values.get("general.architecture", ""))
    scaling = {name: value for key, value in values.items() if (name := _after(key, f"{architecture}.rope.scaling."))}
    if (linear := values.get(f"{architecture}.rope.scale_linear")) is not None:  # as it was written once
        scaling = {"factor": linear} | scaling
    return GGUFHeader(file, architecture, tensors, digest, reader.at, scaling)


def _after(text: str, beginning: str) -> str:
    return text.removeprefix(beginning) if text.startswith(beginning) else ""
