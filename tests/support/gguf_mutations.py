"""GGUF files taken apart, damaged in one place and put together again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from slipstream.models.weights.gguf_file import ALIGNMENT, SCALARS, STRING, TYPES, read_header

EXTREMES = (0, 1, 2, 3, 7, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
HUGE = (1 << 40, (1 << 63) - 1, (1 << 64) - 1)
FLOATS = (0.0, -0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
KIND_NUMBERS = (*(block.number for block in TYPES if block.number >= 0), 16, 17, 19, 24, 29, 41, 99, 1 << 31)


@dataclass
class Tensor:
    """An entry of the table. shape: as the file has it, columns first."""

    name: bytes
    shape: list[int]
    kind: int
    offset: int


@dataclass
class Parts:
    """A file: its metadata as [name, type and value], its tensors and their data."""

    values: list[list[bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    data: bytearray = field(default_factory=bytearray)

    @classmethod
    def of(cls, file: Path) -> Parts:
        header, content = read_header(file), file.read_bytes()
        values = [
            [name.encode(), content[start + 8 + len(name.encode()) : end]]
            for name, (start, end) in header.spans.items()
        ]
        data = -(-header.size // ALIGNMENT) * ALIGNMENT
        tensors = [
            Tensor(name.encode(), list(entry.shape[::-1]), entry.kind, entry.start - data)
            for name, entry in header.tensors.items()
        ]
        return cls(values, tensors, bytearray(content[data:]))

    def written(self) -> bytearray:
        table = [struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.values))]
        table += [struct.pack("<Q", len(name)) + name + value for name, value in self.values]
        for tensor in self.tensors:
            sizes = [size % (1 << 64) for size in tensor.shape]
            table.append(struct.pack(f"<Q{len(tensor.name)}sI", len(tensor.name), tensor.name, len(sizes)))
            table.append(struct.pack(f"<{len(sizes)}QIQ", *sizes, tensor.kind, tensor.offset % (1 << 64)))
        header = b"".join(table)
        return bytearray(header + bytes(-len(header) % ALIGNMENT)) + self.data


Mutation = Callable[[Random, Parts], bytearray]


def damage_header(random: Random, parts: Parts) -> bytearray:
    """Some bits of the header change, or the file is cut."""
    content = parts.written()
    if random.random() < 0.25:
        del content[random.randrange(4, len(content)) :]
    size = min(len(content), len(content) - len(parts.data) or len(content))
    for _ in range(random.choice((1, 1, 2, 8))):
        content[random.randrange(4, max(size, 5))] ^= 1 << random.randrange(8)
    return content


def change_value(random: Random, parts: Parts, beginning: bytes = b"") -> bytearray:
    """A value of the metadata is an extreme one, of another type, misnamed, absent or there twice."""
    place = random.choice([i for i, (name, _) in enumerate(parts.values) if beginning in name])
    name, value = parts.values[place]
    (kind,) = struct.unpack_from("<I", value)
    action = random.random()
    if action < 0.1:
        del parts.values[place]
    elif action < 0.2:
        parts.values[place][0] = name[:-1] + bytes([name[-1] ^ 1])
    elif action < 0.25:
        parts.values.insert(random.randrange(len(parts.values)), list(parts.values[place]))
    elif action < 0.4:
        other = random.choice(list(SCALARS))
        parts.values[place][1] = struct.pack("<I", other) + random.randbytes(struct.calcsize(f"<{SCALARS[other]}"))
    elif kind in SCALARS and SCALARS[kind] in "fd":
        parts.values[place][1] = value[:4] + struct.pack(f"<{SCALARS[kind]}", random.choice(FLOATS))
    elif kind in SCALARS:
        size = struct.calcsize(f"<{SCALARS[kind]}")
        number = random.choice(EXTREMES) % (1 << 8 * size)
        parts.values[place][1] = value[:4] + (number % 2 if kind == 7 else number).to_bytes(size, "little")
    elif kind == STRING:
        text = random.choice((b"", b"\xff\xfe", b"x" * 300, bytes(value[12:])[::-1]))
        parts.values[place][1] = value[:4] + struct.pack("<Q", len(text)) + text
    else:
        changed = bytearray(value)
        changed[random.randrange(4, len(changed))] ^= 1 << random.randrange(8)
        parts.values[place][1] = bytes(changed)
    return parts.written()


def change_tensor(random: Random, parts: Parts, ending: bytes = b"") -> bytearray:
    """A tensor has other sizes, another type, place or name, or is absent."""
    tensor = random.choice([tensor for tensor in parts.tensors if ending in tensor.name])
    match random.randrange(8):
        case 0:
            parts.tensors.remove(tensor)
        case 1:
            tensor.kind = random.choice(KIND_NUMBERS)
        case 2:
            tensor.offset += random.choice((-ALIGNMENT, ALIGNMENT, 1, 1 << 20, *HUGE))
        case 3:
            tensor.name = random.choice((b"", tensor.name + b"x", random.choice(parts.tensors).name))
        case 4:
            tensor.shape = tensor.shape[::-1]
        case 5:
            tensor.shape = random.choice((tensor.shape[:-1] or [1], [*tensor.shape, 1], [*tensor.shape, 2], []))
        case _:
            place = random.randrange(len(tensor.shape))
            size = tensor.shape[place]
            tensor.shape[place] = random.choice((size - 1, size + 1, size // 2, 2 * size, size + 32, *EXTREMES, *HUGE))
    return parts.written()


def change_experts(random: Random, parts: Parts) -> bytearray:
    """Numbers or tensors of experts are others."""
    return (
        change_value(random, parts, b".expert_") if random.random() < 0.5 else change_tensor(random, parts, b"_exps.")
    )


def change_numbers(random: Random, parts: Parts) -> bytearray:
    """Bytes of the tensors are random, or bits that stand for infinity and NaN."""
    for _ in range(random.choice((1, 4, 64))):
        size = random.choice((1, 2, 64, 1024))
        place = random.randrange(max(1, len(parts.data) - size))
        pattern = random.choice((b"\xff", b"\x7f", b"\x00\x7c", b"\x00\xfc", b"\x01\x7e", b"\x00\x00\xc0\x7f", b""))
        parts.data[place : place + size] = (pattern * size)[:size] if pattern else random.randbytes(size)
    return parts.written()


MUTATIONS: dict[str, Mutation] = {
    "header": damage_header,
    "metadata": change_value,
    "tensors": change_tensor,
    "experts": change_experts,
    "numbers": change_numbers,
}
