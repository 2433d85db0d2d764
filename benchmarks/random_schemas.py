"""Random JSON schemas: small, so that a text of one ends soon, and together with all the usual keywords."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
NAMES = ("name", "id", "city", "total", "items", "status", "created", "email", "tags", "price", "owner", "notes")
WORDS = ("open", "closed", "red", "dark blue", "celsius", "pending", "yes", "no")


def random_schema(seed: int) -> Schema:
    """An object or array at the top, up to three levels deep."""
    rng = random.Random(seed)
    schema = _object(rng, 0) if rng.random() < 0.85 else _array(rng, 0)
    if rng.random() < 0.2:
        defined = _object(rng, 2)
        schema = {"$defs": {"shared": defined}} | schema
        if "properties" in schema:
            schema["properties"]["shared"] = {"$ref": "#/$defs/shared"}
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(NAMES, rng.randint(1, 4))
    required = [name for name in names if rng.random() < 0.8] or names[:1]
    properties = {name: _value(rng, depth + 1) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _array(rng: random.Random, depth: int) -> Schema:
    if rng.random() < 0.25:
        items = [_value(rng, depth + 1) for _ in range(rng.randint(1, 2))]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
    return {
        "type": "array",
        "items": _value(rng, depth + 1),
        "minItems": rng.randint(0, 1),
        "maxItems": rng.randint(1, 3),
    }


def _value(rng: random.Random, depth: int) -> Schema:
    kinds: list[Callable[[random.Random], Schema]] = [_text, _text, _integer, _number, _choice, _boolean, _union]
    if depth < 3 and rng.random() < 0.3:
        return (_object if rng.random() < 0.6 else _array)(rng, depth)
    return rng.choice(kinds)(rng)


def _text(rng: random.Random) -> Schema:
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(3, 24)},
            {"type": "string", "minLength": 2, "maxLength": rng.randint(3, 12)},
            {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{2,4}$"},
            {"type": "string", "pattern": "^[a-z]{1,12}$"},
            {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])},
        ]
    )


def _integer(rng: random.Random) -> Schema:
    low = rng.randint(-20, 20)
    return rng.choice(
        [
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(1, 5000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + rng.randint(3, 90)},
            {"type": "integer", "multipleOf": rng.choice([2, 5]), "minimum": 0, "maximum": 1000},
            {"allOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 99}]},
        ]
    )


def _number(rng: random.Random) -> Schema:
    return {"type": "number", "minimum": 0, "maximum": rng.randint(1, 500)}


def _boolean(rng: random.Random) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def _choice(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"const": rng.choice([*WORDS, 7, None, {"version": 2}])}
    return {"enum": rng.sample(WORDS, rng.randint(2, 4))}


def _union(rng: random.Random) -> Schema:
    if rng.random() < 0.3:
        return {"type": ["integer", "null"], "minimum": 0, "maximum": 99}
    if rng.random() < 0.5:
        return {"anyOf": [_text(rng), _boolean(rng)]}
    tagged = [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "size": _integer(rng)},
            "required": ["kind", "size"],
            "additionalProperties": False,
        }
        for kind in ("circle", "box")
    ]
    return {"oneOf": tagged}
