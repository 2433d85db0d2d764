"""GGUF files taken apart, damaged in one place and put together again."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from random import Random

from slipstream.models.weights.gguf_file import ALIGNMENT, ARRAY, SCALARS, STRING, TYPES, read_header

EXTREMES = (0, 1, 2, 3, 7, 255, 256, 65_535, 65_536, (1 << 31) - 1, 1 << 31, (1 << 32) - 1)
HUGE = (1 << 40, (1 << 63) - 1, (1 << 64) - 1)
WIDE = (0, 1, -1, 65_536, 1 << 31, (1 << 63) - 1)  # numbers of 64 bits
FLOATS = (0.0, -0.0, -1.0, 1e-30, 1e30, float("nan"), float("inf"), float("-inf"))
TEXTS = (b"", b"\xff\xfe", b"x" * 300, b" ", b"\n", b"<|im_end|>")
F32 = 0
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

    def copy(self) -> Parts:
        tensors = [replace(tensor, shape=list(tensor.shape)) for tensor in self.tensors]
        return Parts([list(value) for value in self.values], tensors, bytearray(self.data))

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
    for _ in range(random.choice((1, 1, 2, 8)) if size > 4 else 0):
        content[random.randrange(4, size)] ^= 1 << random.randrange(8)
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
    elif action < 0.3:
        others = [i for i, (_, other) in enumerate(parts.values) if other[:4] == value[:4]]
        other_place = random.choice(others)
        parts.values[place][1], parts.values[other_place][1] = parts.values[other_place][1], value
    elif action < 0.4 and kind in SCALARS:
        signed = random.choice((10, 11))
        parts.values[place][1] = struct.pack("<IQ", signed, random.choice(WIDE) % (1 << 64))
    elif action < 0.5:
        other = random.choice(list(SCALARS))
        parts.values[place][1] = struct.pack("<I", other) + random.randbytes(struct.calcsize(f"<{SCALARS[other]}"))
    elif kind in SCALARS and SCALARS[kind] in "fd":
        parts.values[place][1] = value[:4] + struct.pack(f"<{SCALARS[kind]}", random.choice(FLOATS))
    elif kind in SCALARS:
        size = struct.calcsize(f"<{SCALARS[kind]}")
        number = random.choice(EXTREMES) % (1 << 8 * size)
        parts.values[place][1] = value[:4] + (number % 2 if kind == 7 else number).to_bytes(size, "little")
    elif kind == STRING:
        text = random.choice((*TEXTS, bytes(value[12:])[::-1]))
        parts.values[place][1] = value[:4] + struct.pack("<Q", len(text)) + text
    else:
        parts.values[place][1] = changed_array(random, value)
    return parts.written()


def changed_array(random: Random, value: bytes) -> bytes:
    """An array with other items, fewer or more of them, or with a bit that is another."""
    inner, count = struct.unpack_from("<IQ", value, 4)
    if (inner not in SCALARS and inner != STRING) or random.random() < 0.2:
        changed = bytearray(value)
        changed[random.randrange(4, len(changed))] ^= 1 << random.randrange(8)
        return bytes(changed)
    items, place = list[bytes](), 16
    for _ in range(count):
        size = 8 + struct.unpack_from("<Q", value, place)[0] if inner == STRING else struct.calcsize(SCALARS[inner])
        items.append(value[place : place + size])
        place += size
    chosen = [random.randrange(count) for _ in range(2)] if count else []
    match random.randrange(6) if chosen else 6:
        case 0:
            items = items[: random.choice((0, 1, count // 2, count - 1))]
        case 1:
            items[chosen[0]], items[chosen[1]] = items[chosen[1]], items[chosen[0]]
        case 2:
            items[chosen[0]] = items[chosen[1]]
        case 3:
            items.insert(chosen[0], items[chosen[1]])
        case 4 | 5:
            items[chosen[0]] = _other_item(random, inner)
        case _:
            items.append(_other_item(random, inner))
    return struct.pack("<IIQ", ARRAY, inner, len(items)) + b"".join(items)


def _other_item(random: Random, kind: int) -> bytes:
    if kind == STRING:
        text = random.choice((*TEXTS, random.randbytes(3), random.choice("ab Ġ▁é").encode()))
        return struct.pack("<Q", len(text)) + text
    if SCALARS[kind] in "fd":
        return struct.pack(f"<{SCALARS[kind]}", random.choice(FLOATS))
    size = struct.calcsize(f"<{SCALARS[kind]}")
    return (random.choice(EXTREMES) % (1 << 8 * size)).to_bytes(size, "little")


def change_tensor(random: Random, parts: Parts, ending: bytes = b"") -> bytearray:
    """A tensor has other sizes, another type, place or name, or is absent."""
    tensor = random.choice([tensor for tensor in parts.tensors if ending in tensor.name])
    other = random.choice(parts.tensors)
    match random.randrange(11):
        case 0:
            parts.tensors.remove(tensor)
        case 8:
            tensor.name, other.name = other.name, tensor.name
        case 9:
            tensor.kind, other.kind = other.kind, tensor.kind
        case 10:
            parts.tensors.append(replace(tensor, name=random.choice((tensor.name, tensor.name[:-1]))))
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
    if random.random() < 0.3:  # a number of a vector or a router
        tensor = random.choice([tensor for tensor in parts.tensors if tensor.kind == F32] or parts.tensors)
        place = tensor.offset + 4 * random.randrange(prod(tensor.shape))
        parts.data[place : place + 4] = struct.pack("<f", random.choice(FLOATS))
        return parts.written()
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
