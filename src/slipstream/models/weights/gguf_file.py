"""Reads a GGUF file, or the parts of a split one: metadata and locations of tensors. Nothing in it is trusted.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little endian. A model may be split
into files named `NAME-00001-of-00003.gguf` and so on: the first has the metadata, each has tensors.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import re
import struct
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from math import prod
from pathlib import Path
from typing import Any

from slipstream.checks import is_whole
from slipstream.errors import SlipstreamError, UsageError, one_line, os_reason
from slipstream.models.cpu.structs import TYPES, BlockFormat
from slipstream.models.weights.model_files import MAGIC, refuse_pointers

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
BLOCKS = {block.number: block for block in TYPES if block.number >= 0}
VERSIONS = (2, 3)
MAX_DIMENSIONS, MAX_STRING, MAX_NAME, MAX_PARTS = 4, 1 << 26, 1 << 10, 1 << 16
INSTALL = "pip install gguf"
PART = re.compile(r"^(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<ending>\.[^.]*)?$", re.DOTALL)
# metadata of the architecture that determine tensor sizes, with their minimum values
SIZES = dict.fromkeys(("vocab_size", "embedding_length", "attention.head_count", "block_count"), 1) | dict.fromkeys(
    (
        *("feed_forward_length", "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_count"),
        *("expert_used_count", "attention.head_count_kv", "attention.key_length", "attention.value_length"),
        *("rope.dimension_count", "ssm.conv_kernel", "ssm.state_size", "ssm.inner_size", "ssm.time_step_rank"),
        *("ssm.group_count", "shortconv.l_cache"),
    ),
    0,
)
OTHER_KINDS = {
    "adapter": "changes to another model",
    "mmproj": "the image or audio part of another model",
    "imatrix": "statistics to quantize another model with",
}
PIECE = 1 << 22  # bytes of the file that a thread packs at a time
ALIGNMENT = 32  # bytes; the default alignment


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file."""

    name: str
    kind: int  # the number of its type
    shape: tuple[int, ...]  # rows first
    start: int  # its first byte in its file
    file: Path

    @property
    def block(self) -> BlockFormat | None:
        """Its block type, if the kernels compute with it."""
        return BLOCKS.get(self.kind)

    @property
    def kind_name(self) -> str:
        return type_name(self.kind) if self.block is None else self.block.name

    @property
    def matrix(self) -> tuple[int, int]:
        """Rows and columns of a matrix, or of a layer's concatenated experts."""
        return prod(self.shape[:-1]), self.shape[-1]

    @property
    def row_bytes(self) -> int | None:
        """Bytes of a row; None if the type is unknown."""
        return None if self.block is None else self.block.row_bytes(self.shape[-1])

    @property
    def packed_block(self) -> BlockFormat:
        """Its block type, which must be one that the kernels compute with."""
        assert self.block is not None
        return self.block

    def packed_size(self, library: Any) -> int:
        """Bytes of the panels of a matrix that has such a type."""
        return self.packed_block.panels_size(self.matrix, library)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, whose type must be a known one."""
        if self.row_bytes is not None:
            return self.matrix[0] * self.row_bytes
        _, numbers, num_bytes = _other_types()[self.kind]
        return prod(self.shape) // numbers * num_bytes


@dataclass(frozen=True)
class GGUFHeader:
    """The header of a file, or of all parts of a split model. The layout of the tensors has been checked."""

    file: Path  # the first part
    values: dict[str, Any]  # metadata; None for arrays
    spans: dict[str, tuple[int, int]] = field(repr=False)  # bytes of each value in `file`, with its name and type
    tensors: dict[str, TensorEntry] = field(repr=False)
    digest: str  # of the bytes before the tensors' data, of all parts
    size: int  # of those bytes in the first part
    parts: tuple[Path, ...]
    states: tuple[tuple[int, ...], ...] = ()  # of the parts when they were read; see `_state`

    @property
    def architecture(self) -> str:
        return str(self.values.get("general.architecture", ""))

    @property
    def stem(self) -> str:
        """The file's name without its extension and part number."""
        named = PART.match(self.file.name)
        return named["stem"] if named and len(self.parts) > 1 else self.file.stem

    @property
    def num_weights(self) -> int:
        """Numbers in all tensors."""
        return sum(prod(entry.shape) for entry in self.tensors.values())

    @property
    def scaling(self) -> dict[str, Any]:
        """The metadata `rope.scaling.*` of the architecture."""
        beginning = f"{self.architecture}.rope.scaling."
        scaling = {key.removeprefix(beginning): self.values[key] for key in self.values if key.startswith(beginning)}
        linear = self.values.get(f"{self.architecture}.rope.scale_linear")  # the key of older files
        return scaling if linear is None else {"factor": linear} | scaling

    def wrong(self, what: str, allowed: str) -> SlipstreamError:
        """The error `wrong_file` for this file."""
        return wrong_file(self.file, what, allowed)

    def array(self, name: str) -> list[Any]:
        """An array of the metadata; empty where there is none of this name."""
        if name not in self.spans or self.values[name] is not None:
            return []
        with self.file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            reader = _Reader(data, self.spans[name][0])
            reader.string()
            reader.number("I")
            if (kind := reader.number("I")) != STRING and kind not in SCALARS:
                raise self.wrong(f"{name} is an array of arrays", "an array of numbers or of texts")
            return reader.array(kind)

    def text(self, name: str) -> str | None:
        """A text of the metadata; None where there is none of this name, or an empty one."""
        value = self.values.get(name, "")
        if not isinstance(value, str):
            raise self.wrong(f"{name} is {'an array' if value is None else repr(value)}", "a text")
        return value or None

    def check_unchanged(self) -> None:
        """Refuse a file that another has replaced since its header was read: the model would be a mixture of both."""
        try:
            states = tuple(map(_state, self.parts))
        except OSError:
            states = ()
        if states != self.states:
            raise self.wrong("it was changed while it was read", "a file that does not change")

    def check_model(self) -> None:
        """Refuse a file that is not a model, or whose metadata claim larger tensors than it has.

        Models are built from these metadata, so false numbers could request any amount of memory.
        """
        kind = self.values.get("general.type", "model")
        if self.architecture == "clip":  # such files did not always have general.type
            kind = "mmproj"
        if kind != "model":
            what = OTHER_KINDS.get(kind, "")
            raise self.wrong(f"general.type is {str(kind)[:60]!r}{what and f', {what}'}", "'model'")
        if not self.tensors:
            raise SlipstreamError(
                f"model {str(self.file)!r} holds a vocabulary and no tensors; allowed: a file with the model's weights"
            )
        layers = {name.split(".")[1] for name in self.tensors if name.startswith("blk.")}
        largest = max(max(entry.shape) for entry in self.tensors.values())
        for name, least in SIZES.items():
            value = self.values.get(f"{self.architecture}.{name}")
            largest_allowed = len(layers) if name == "block_count" else largest
            if isinstance(value, int) and not least <= value <= largest_allowed:
                allowed = f"{least} to {largest_allowed:,}, by the file's tensors"
                raise self.wrong(f"{self.architecture}.{name} is {value:,}", allowed)


def wrong_file(file: Path, what: str, allowed: str) -> SlipstreamError:
    """The error for a file that is or contains something unsupported."""
    return SlipstreamError(f"model {str(file)!r}: {what}; allowed: {allowed}")


def _check_layout(file: Path, tensors: dict[str, TensorEntry]) -> None:
    """Refuse unknown types, rows that are not whole blocks, and tensors that overlap or that the file lacks."""
    size = file.stat().st_size
    before: tuple[int, str] | None = None  # the end and name of the previous tensor
    for entry in sorted(tensors.values(), key=lambda entry: entry.start):
        _check_type(entry)
        if 0 in entry.shape:
            raise _wrong(entry, f"is {list(entry.shape)}", "dimensions of at least 1")
        if before is not None and entry.start < before[0]:
            raise _wrong(entry, f"begins within tensor {before[1]!r}", "tensors that do not overlap")
        end = entry.start + entry.num_bytes
        if end > size:
            raise SlipstreamError(
                f"model {str(file)!r} is truncated: the file ends before its last tensor: tensor "
                f"{entry.name!r} ends at byte {end:,}, the file at {size:,}"
            )
        before = end, entry.name


def _check_type(entry: TensorEntry) -> None:
    if entry.row_bytes is None and entry.kind not in (others := _other_types()):
        names = ", ".join(block.name for block in BLOCKS.values())
        other = "others that the gguf package names" if others else f"others after {INSTALL}"
        raise _wrong(entry, f"is of the unknown {entry.kind_name}", f"{names}, and {other}")
    if entry.block is not None and entry.shape[-1] % entry.block.size:
        rows = f"has rows of {entry.shape[-1]} numbers in {entry.block.name}"
        raise _wrong(entry, rows, f"multiples of {entry.block.size}")


def _wrong(entry: TensorEntry, what: str, allowed: str) -> SlipstreamError:
    return wrong_file(entry.file, f"tensor {entry.name!r} {what}", allowed)


def ends_within(entry: TensorEntry) -> SlipstreamError:
    """The error for a file that was truncated after its header was read."""
    return SlipstreamError(f"model {str(entry.file)!r} ends within tensor {entry.name!r}")


def not_finite(entry: TensorEntry) -> SlipstreamError:
    """The error for a tensor with infinite numbers or NaN, or blocks with such a scale."""
    return _wrong(entry, "holds numbers that are not finite", "finite numbers")


def type_name(number: int) -> str:
    """The gguf package's name of a tensor type."""
    return _other_types().get(number, (f"type {number}", 1, 1))[0]


def _other_types() -> dict[int, tuple[str, int, int]]:
    """The gguf package's types by number: name, numbers and bytes of a block; empty if it is not installed."""
    try:
        from gguf import GGML_QUANT_SIZES
    except ImportError:
        return {}
    return {kind.value: (kind.name, *size) for kind, size in GGML_QUANT_SIZES.items()}


class _Reader:
    """Reads numbers and strings in order; raises struct.error or EOFError past the end."""

    def __init__(self, data: mmap.mmap, start: int) -> None:
        self.data, self.position = data, start

    def number(self, form: str) -> Any:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.position)
        self.position += struct.calcsize(f"<{form}")
        return value

    def string(self, max_length: int = MAX_STRING) -> str:
        length = self.number("Q")
        if length > max_length or self.position + length > len(self.data):
            raise EOFError(f"a text of {length} bytes")
        self.position += length
        return self.data[self.position - length : self.position].decode(errors="replace")

    def _skip_strings(self, count: int) -> None:
        """Skip `count` strings, quickly: a vocabulary has hundreds of thousands."""
        offset, end, length_at = self.position, len(self.data), struct.Struct("<Q").unpack_from
        for _ in range(count):
            (length,) = length_at(self.data, offset)
            offset += 8 + length
            if length > MAX_STRING or offset > end:
                raise EOFError(f"a text of {length} bytes")
        self.position = offset

    def _strings(self, count: int) -> list[str]:
        start, offset, strings, length_at = self.position, 0, [], struct.Struct("<Q").unpack_from
        self._skip_strings(count)
        data = self.data[start : self.position]
        for _ in range(count):
            end = offset + 8 + length_at(data, offset)[0]
            strings.append(data[offset + 8 : end].decode(errors="replace"))
            offset = end
        return strings

    def array(self, inner: int) -> list[Any]:
        """The items of an array of strings or numbers of this type, whose size `value` has checked."""
        count = self.number("Q")
        if inner == STRING:
            return self._strings(count)
        items = struct.unpack_from(f"<{count}{SCALARS[inner]}", self.data, self.position)
        return list(items)

    def value(self, kind: int) -> Any:
        """A value of the metadata; None for an array, which is skipped."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        inner, count = self.number("I"), self.number("Q")
        if inner in SCALARS:
            self.position += count * struct.calcsize(f"<{SCALARS[inner]}")
            if self.position > len(self.data):
                raise EOFError(f"an array of {count} numbers")
        elif inner == STRING:
            self._skip_strings(count)
        else:
            for _ in range(count):
                self.value(inner)
        return None


def read_header(file: Path) -> GGUFHeader:
    """The header of a file, or of all parts if it is one of a split model.

    Raises `UsageError` if it is not a GGUF file, `SlipstreamError` if it is damaged.
    """
    part = _read_part(file)
    if "split.count" not in part.values:
        return part
    count = _part_number(part, "split.count", 1)
    if count == 1:
        return part
    files = _part_files(part, count)
    parts = [part if other == file else _read_part(other) for other in files]
    for number, other in enumerate(parts):
        if _part_number(other, "split.count", 1) != count or _part_number(other, "split.no", 0) != number:
            numbers = f"split.no {other.values.get('split.no')} and split.count {other.values.get('split.count')}"
            raise SlipstreamError(
                f"model {str(other.file)!r} has {numbers}; allowed: {number} and {count}, by its name"
            )
    tensors = dict[str, TensorEntry]()
    for other in parts:
        if twice := tensors.keys() & other.tensors.keys():
            raise _two_tensors(other.file, sorted(twice)[0])
        tensors |= other.tensors
    declared = parts[0].values.get("split.tensors.count", len(tensors))
    if declared != len(tensors):
        what = f"its {count} parts have {len(tensors)} tensors"
        raise parts[0].wrong(what, f"{declared}, as split.tensors.count says")
    digest = hashlib.sha256("".join(other.digest for other in parts).encode()).hexdigest()[:16]
    states = tuple(state for other in parts for state in other.states)
    return replace(parts[0], tensors=tensors, digest=digest, parts=tuple(files), states=states)


def _part_number(part: GGUFHeader, name: str, least: int) -> int:
    value = part.values.get(name)
    if not is_whole(value, least, MAX_PARTS):
        raise part.wrong(f"{name} is {value!r}", f"a whole number from {least} to {MAX_PARTS:,}")
    return value


def _part_files(part: GGUFHeader, count: int) -> list[Path]:
    """The files of a split model, by the name of one of them."""
    number = _part_number(part, "split.no", 0) + 1
    named = PART.match(part.file.name)
    if named is None or (int(named["number"]), int(named["count"])) != (number, count):
        raise SlipstreamError(
            f"model {str(part.file)!r} is part {number} of {count}, and by its name the others cannot be found; "
            f"allowed: a name that ends in -{number:05}-of-{count:05}.gguf"
        )
    names = [f"{named['stem']}-{other:05}-of-{count:05}{named['ending'] or ''}" for other in range(1, count + 1)]
    files = [part.file.with_name(name) for name in names]
    if absent := [other.name for other in files if not other.is_file()]:
        others = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        raise SlipstreamError(
            f"model {str(part.file)!r} is part {number} of {count}, and {absent[0]}{others} is not beside it; "
            "allowed: all parts in one folder"
        )
    return files


def _two_tensors(file: Path, name: str) -> SlipstreamError:
    return wrong_file(file, f"two tensors are called {name!r}", "a name for each")


def _state(file: Path | int) -> tuple[int, ...]:
    status = os.stat(file)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def gguf_names(folder: Path) -> list[str]:
    """The names of the GGUF files in a folder; none if it cannot be read."""
    try:
        return sorted(file.name for file in folder.iterdir() if file.suffix.lower() == ".gguf" and file.is_file())
    except OSError:
        return []


def _read_part(file: Path) -> GGUFHeader:
    if not file.is_file():
        if file.is_symlink():
            raise UsageError(f"model {str(file)!r} is a symbolic link to no file; allowed: a readable .gguf file")
        near = get_close_matches(file.name, gguf_names(file.parent), 1)
        hint = f"did you mean {near[0]}? " if near else ""
        owner, repository, *path = (*file.parts, "", "")
        hub = (
            f", or on the hub {owner}/{repository}:{'/'.join(path[:-2])}" if path[2:] and not file.is_absolute() else ""
        )
        raise UsageError(f"model {str(file)!r} does not exist; {hint}allowed: a readable .gguf file{hub}")
    try:
        with file.open("rb") as stream:
            if stream.read(4) != MAGIC:
                refuse_pointers(file)
                raise UsageError(f"model {str(file)!r} is not a GGUF file (its first four bytes are not 'GGUF')")
            with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                part = replace(_parse(file, _Reader(data, len(MAGIC))), states=(_state(stream.fileno()),))
    except (struct.error, EOFError) as error:
        raise SlipstreamError(
            f"model {str(file)!r} is truncated: the file ends before its last tensor: it ends in its header"
        ) from error
    except (KeyError, RecursionError) as error:
        raise SlipstreamError(
            f"model {str(file)!r} could not be read as GGUF: a value of unknown type {one_line(error)}"
        ) from error
    except OSError as error:
        raise SlipstreamError(f"model {str(file)!r} could not be read: {os_reason(error)}") from error
    _check_layout(file, part.tensors)
    return part


def _parse(file: Path, reader: _Reader) -> GGUFHeader:
    _check_version(file, reader.number("I"))
    num_tensors, num_values = reader.number("Q"), reader.number("Q")
    values, spans = dict[str, Any](), dict[str, tuple[int, int]]()
    for _ in range(num_values):
        start, name = reader.position, reader.string(MAX_NAME)
        values[name] = reader.value(reader.number("I"))
        spans[name] = start, reader.position
    places = dict[str, tuple[int, tuple[int, ...], int]]()
    for _ in range(num_tensors):
        name, dimensions = reader.string(MAX_NAME), reader.number("I")
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise wrong_file(file, f"tensor {name!r} has {dimensions} dimensions", f"1 to {MAX_DIMENSIONS}")
        shape = tuple(reader.number("Q") for _ in range(dimensions))[::-1]
        if name in places:
            raise _two_tensors(file, name)
        places[name] = reader.number("I"), shape, reader.number("Q")
    alignment = values.get("general.alignment") or ALIGNMENT
    if not is_whole(alignment, 1):
        raise wrong_file(file, f"general.alignment is {alignment!r}", "a whole number from 1")
    for name, (_, _, offset) in places.items():
        if offset % alignment:
            begins = f"tensor {name!r} begins at byte {offset:,} of the data"
            raise wrong_file(file, begins, f"multiples of {alignment}")
    data = -(-reader.position // alignment) * alignment
    with memoryview(reader.data) as view, view[: reader.position] as beginning:
        digest = hashlib.sha256(beginning).hexdigest()[:16]
    tensors = {
        name: TensorEntry(name, kind, shape, data + offset, file) for name, (kind, shape, offset) in places.items()
    }
    return GGUFHeader(file, values, spans, tensors, digest, reader.position, (file,))


def _check_version(file: Path, version: int) -> None:
    if version in VERSIONS:
        return
    if int.from_bytes(version.to_bytes(4, "little"), "big") in (1, *VERSIONS):
        what = (
            "is big-endian; allowed: little-endian, as `gguf-convert-endian FILE little` of the gguf package makes it"
        )
    else:
        what = f"could not be read as GGUF: version {version}; allowed: {', '.join(map(str, VERSIONS))}"
    raise SlipstreamError(f"model {str(file)!r} {what}")
