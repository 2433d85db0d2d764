"""JSON files, safetensors files and templates damaged in one place."""

from __future__ import annotations

import copy
import json
import re
import struct
from collections.abc import Iterator
from random import Random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(0, 1, -1, 2, 7, 256, 65_536, 1 << 31, 1 << 63, -(1 << 63), 0.0, 0.5, -1.5, 1e-30, 1e30, 1e999),
    *(float("nan"), True, False, None, "", "x" * 300, "int8", "linear", [], {}, [1], [[]], {"type": "x"}),
)
TYPES = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64", "I32", "I16", "I8", "U8", "BOOL", "F4", "")
SIZES = (0, 1, 2, 7, 65_536, 1 << 31, 1 << 63, -1)
NUMBERS = {"F32": (4, "<f"), "F16": (2, "<e"), "F64": (8, "<d")}  # how numbers of a type are packed
FLOATS = (float("nan"), float("inf"), float("-inf"), -0.0, 6e4)
PIECES = (
    "{%",
    "%}",
    "{{",
    "}}",
    " and ",
    " - ",
    "[0]",
    "[-1]",
    ".x",
    " | tojson",
    " | length",
    "{% endif %}",
    "0",
    "''",
)


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Each container in a value, with each of its keys."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield value, key
        if isinstance(item, dict | list):
            yield from _places(item)


def change_json(random: Random, value: Any) -> Any:
    """A value without, with another or with a misnamed item; items that are exchanged, or a list of another length."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return random.choice(VALUES)
    container, key = random.choice(places)
    other, other_key = random.choice(places)
    action = random.random()
    if action < 0.15:
        del container[key]
    elif action < 0.25 and isinstance(container, dict):
        container[f"{key}x" if random.random() < 0.5 else str(other_key)] = container.pop(key)
    elif action < 0.4:
        container[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(container[key])
    elif action < 0.55 and isinstance(container, list):
        container.insert(random.randrange(len(container)), copy.deepcopy(container[key]))
    elif action < 0.65 and isinstance(container, list):
        del container[random.randrange(len(container)) :]
    elif action < 0.8 and isinstance(container[key], int | float):
        number = container[key]
        container[key] = random.choice((number + 1, number - 1, 2 * number, -number, number / 2, str(number)))
    else:
        container[key] = random.choice(VALUES)
    return value


def change_json_text(random: Random, text: bytes) -> bytes:
    """A JSON file whose value is another or, less often, whose bytes are."""
    if random.random() < 0.8:
        return json.dumps(change_json(random, json.loads(text))).encode()
    return change_bytes(random, text)


def change_bytes(random: Random, content: bytes) -> bytes:
    """Bits that are others, a part that is missing or there twice, or no end."""
    changed, place = bytearray(content), random.randrange(len(content))
    match random.randrange(4):
        case 0:
            del changed[place:]
        case 1:
            del changed[place : place + random.choice((1, 4, 64))]
        case 2:
            changed[place:place] = changed[place : place + random.choice((1, 4, 64))]
        case _:
            for _ in range(random.choice((1, 8))):
                changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def change_safetensors(random: Random, content: bytes) -> bytes:
    """A file whose header or numbers are others."""
    length = int.from_bytes(content[:8], "little")
    header, data = json.loads(content[8 : 8 + length]), bytearray(content[8 + length :])
    names = [name for name in header if name != "__metadata__"]
    name, other = random.choice(names), random.choice(names)
    entry = header[name]
    match random.randrange(12):
        case 0:
            return change_bytes(random, content)
        case 1:
            damaged = bytearray(content)
            damaged[random.randrange(8 + length)] ^= 1 << random.randrange(8)
            return bytes(damaged)
        case 2:
            header = change_json(random, header)
        case 3:
            header[name], header[other] = header[other], header[name]
        case 4:
            entry["dtype"] = random.choice(TYPES)
        case 5:
            entry["shape"] = entry["shape"][::-1]
        case 6:
            entry["shape"] = [*entry["shape"], random.choice(SIZES)] if random.random() < 0.5 else entry["shape"][:-1]
        case 7:
            if entry["shape"]:
                entry["shape"][random.randrange(len(entry["shape"]))] = random.choice(SIZES)
        case 8:
            entry["data_offsets"][random.randrange(2)] += random.choice((-1, 1, 4, 1 << 20, 1 << 63))
        case 9:
            begin, end = entry["data_offsets"]
            if end > begin:
                data[begin:end] = random.randbytes(end - begin)
        case _:
            size, form = NUMBERS.get(entry["dtype"], (2, ""))
            begin, end = entry["data_offsets"]
            if end > begin:
                place = begin + size * random.randrange((end - begin) // size) if end - begin >= size else begin
                number = random.choice(FLOATS)
                if form == "<e" and abs(number) > 60000:
                    number = 0.0
                data[place : place + size] = struct.pack(form, number) if form else struct.pack("<f", number)[2:]
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    return len(written).to_bytes(8, "little") + written + bytes(data)


def change_template(random: Random, template: str) -> str:
    """A template with a part that is missing, moved, there twice or another."""
    parts = re.split(r"(\{%.*?%\}|\{\{.*?\}\}|\W)", template, flags=re.DOTALL)
    for _ in range(random.choice((1, 1, 2, 4))):
        place, other = random.randrange(len(parts)), random.randrange(len(parts))
        match random.randrange(5):
            case 0:
                parts[place] = ""
            case 1:
                parts[place], parts[other] = parts[other], parts[place]
            case 2:
                parts[place] += parts[other]
            case 3:
                parts[place] = random.choice(PIECES)
            case _:
                piece = parts[place]
                if piece:
                    at = random.randrange(len(piece))
                    parts[place] = piece[:at] + piece[at + 1 :]
    return "".join(parts)
