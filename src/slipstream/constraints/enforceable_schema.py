"""Rewrites a JSON schema so that llguidance enforces all of it.

Every text of the rewritten schema satisfies the original. Keywords that exclude nothing are dropped; where llguidance
would allow too much, or reads a value inexactly, the rewritten schema is equal or slightly narrower. What cannot be
rewritten is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from typing import Any

from slipstream.errors import UsageError

# keywords of JSON schemas by what their values hold; what other keywords hold is read as schemas
NAMED_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
ANNOTATIONS = {"default", "examples", "example", "title", "description", "$comment"}
VALUES = {"enum", "const"}
SIZES = {"minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties"}
EXACT = 1 << 53  # llguidance reads numbers as floats, in which whole numbers are exact up to here
LARGEST = (1 << 63) - 1024  # the largest float that fits llguidance's 64-bit whole numbers
REFERENCES = 8  # that are followed one after the other, as they may form a circle
DIGITS = 15  # a float read from text is exact up to this many digits
DECIMALS = 22  # and this many of them after the point

DATE_TIME = {
    "year": r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])",
    "leap_year": r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)",
    "month_and_day": r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))",
    "time": r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])",
}
DATE = "(?:{year}-{month_and_day}|{leap_year}-02-29)".format_map(DATE_TIME)
DAYS = "(?:[0-9]{1,6}Y(?:[0-9]{1,6}M(?:[0-9]{1,8}D)?)?|[0-9]{1,6}M(?:[0-9]{1,8}D)?|[0-9]{1,8}D)"
HOURS = "(?:[0-9]{1,9}H(?:[0-9]{1,9}M(?:[0-9]{1,9}S)?)?|[0-9]{1,9}M(?:[0-9]{1,9}S)?|[0-9]{1,9}S)"
BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
HEX = "[0-9a-fA-F]"
POINTER = "(?:/(?:[^~/]|~[01])*)*"
# without "--" as third and fourth character, which begin another encoding
LABEL = "[a-zA-Z0-9](?:_{0,2}[a-zA-Z0-9]|_(?:[a-zA-Z0-9]_|-[a-zA-Z0-9])_{0,58}[a-zA-Z0-9])?".replace(
    "_", "[a-zA-Z0-9-]"
)
LITERAL = (
    r"(?:[^\\()\[\]{}*+?|^$.\x00-\x1f]|\\[dDwWsS.\\()\[\]{}*+?|^$/]|\.|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ ,:;])+\])"
    r"(?:[*+?]|\{[0-9]{1,2}\})?"
)
PATTERN_OF_FORMAT = {
    "date": DATE,
    "duration": f"P(?:{DAYS}(?:T{HOURS})?|T{HOURS}|[0-9]{{1,8}}W)",  # numbers that fit Python's timedelta
    "time": DATE_TIME["time"],
    "date-time": f"{DATE}T{DATE_TIME['time']}",
    "hostname": rf"{LABEL}(?:\.{LABEL})*",
    "json-pointer": POINTER,
    "relative-json-pointer": f"[0-9](?:#|{POINTER})",
    "regex": rf"\^?(?:{LITERAL}|\((?:\?:)?(?:{LITERAL})+(?:\|(?:{LITERAL})+)*\))*\$?",
    "byte": "(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/][AQgw]==|[A-Za-z0-9+/]{2}[AEIMQUYcgkosw048]=)?",
    "base64url": "(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-][AQgw]==|[A-Za-z0-9_-]{2}[AEIMQUYcgkosw048]=)?",
    "ipv4interface": rf"(?:{BYTE}\.){{3}}{BYTE}/(?:[12]?[0-9]|3[0-2])",
    "ipv4network": rf"(?:{BYTE}\.){{3}}{BYTE}/32|(?:{BYTE}\.){{3}}0/24|(?:{BYTE}\.){{2}}0\.0/16|{BYTE}\.0\.0\.0/8",
    "uuid": f"{HEX}{{8}}-(?:{HEX}{{4}}-){{3}}{HEX}{{12}}",
    **{f"uuid{n}": f"{HEX}{{8}}-{HEX}{{4}}-{n}{HEX}{{3}}-[89abAB]{HEX}{{3}}-{HEX}{{12}}" for n in range(1, 9)},
}
NARROWER_FORMAT = {
    **dict.fromkeys(("iri", "uri-reference", "iri-reference", "uri-template", "url", "multi-host-uri"), "uri"),
    **dict.fromkeys(("ipvanyinterface", "cidrv4"), "ipv4interface"),
    **dict.fromkeys(("ipv6network", "ipv6interface"), "ipv6"),
    "ipvanyaddress": "ipv4",
    "idn-email": "email",
    "idn-hostname": "hostname",
    "ipvanynetwork": "ipv4network",
    "base64": "byte",
    "guid": "uuid",
}
ENFORCED_FORMATS = {"email", "ipv4", "ipv6", "uri"}  # by llguidance
RANGE_OF_FORMAT = {
    **{f"int{bits}": (-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": (0, (1 << bits) - 1) for bits in (8, 16, 32, 64)},
}
# values of keywords that llguidance refuses although they exclude nothing
EXCLUDES_NOTHING: dict[str, list[Any]] = {
    "uniqueItems": [False],
    "propertyNames": [True, {}, {"type": "string"}],
    "unevaluatedProperties": [True, {}],
    "unevaluatedItems": [True, {}],
    "not": [False],
    "dependentRequired": [{}],
    "dependentSchemas": [{}],
    "dependencies": [{}],
}


def enforceable(schema: Any) -> Any:
    """A schema that llguidance enforces and that allows no text which the given one excludes. UsageError otherwise."""
    rewritten = _rewritten(schema, schema)
    steps = [part["multipleOf"] for part in schemas_in(rewritten) if "multipleOf" in part]
    _check_common_multiple(steps)
    return rewritten


def schemas_in(schema: Any) -> Iterator[Mapping[str, Any]]:
    """A schema and all schemas in it."""
    if isinstance(schema, list):
        for part in schema:
            yield from schemas_in(part)
    if not isinstance(schema, dict):
        return
    yield schema
    for keyword, value in schema.items():
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            for part in value.values():
                yield from schemas_in(part)
        elif keyword not in VALUES | ANNOTATIONS and not keyword.startswith("x-"):
            yield from schemas_in(value)


def _rewritten(schema: Any, root: Any) -> Any:
    if isinstance(schema, list):
        return [_rewritten(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = dict[str, Any]()
    for keyword, value in schema.items():
        if value is None and keyword not in ("const", "type"):  # written by serializers for an absent keyword
            continue
        if keyword in NAMED_SCHEMAS and isinstance(value, dict):
            is_pattern = keyword == "patternProperties"
            value = {rust_pattern(name) if is_pattern else name: _rewritten(part, root) for name, part in value.items()}
        elif keyword in VALUES:
            _check_exact(keyword, value)
        elif keyword == "pattern" and isinstance(value, str):
            value = rust_pattern(value)
        elif keyword in SIZES and isinstance(value, float) and value.is_integer():
            value = int(value)
        elif keyword not in ANNOTATIONS and not keyword.startswith("x-"):
            value = _rewritten(value, root)
        result[keyword] = value
    _drop_what_excludes_nothing(result)
    if "propertyNames" in result and not (result.get("properties") or result.get("patternProperties")):
        pattern = _pattern_of_names(result["propertyNames"], root)
        if pattern is not None:
            del result["propertyNames"]
            result["patternProperties"] = {pattern: result.get("additionalProperties", True)}
            result["additionalProperties"] = False
    _check_property_count(result)
    _rewrite_bounds(result)
    _rewrite_format(result)
    return result


def _drop_what_excludes_nothing(schema: dict[str, Any]) -> None:
    """Drop keywords that llguidance refuses although they exclude nothing here."""
    if schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1):
        del schema["uniqueItems"]
    if "contains" not in schema:
        for keyword in ("minContains", "maxContains"):
            schema.pop(keyword, None)
    if "if" not in schema or not ("then" in schema or "else" in schema):
        for keyword in ("if", "then", "else"):
            schema.pop(keyword, None)
    for keyword, values in EXCLUDES_NOTHING.items():
        value = schema.get(keyword)
        if isinstance(value, dict):
            value = {key: part for key, part in value.items() if key not in ANNOTATIONS}
        if value in values:
            del schema[keyword]


def _pattern_of_names(names: Any, root: Any) -> str | None:
    """A pattern of the strings that a rewritten schema allows; None if it has other or several keywords."""
    for _ in range(REFERENCES):
        reference = names.get("$ref") if isinstance(names, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        names = root
        for part in reference[2:].split("/"):
            names = names.get(part) if isinstance(names, dict) else None
        names = _rewritten(names, root=None)  # names of properties in it, which may refer back, do not matter here
    if not isinstance(names, dict):
        return None
    match {key: value for key, value in names.items() if key not in ANNOTATIONS and (key, value) != ("type", "string")}:
        case {"pattern": str(pattern), **others} if not others:
            return pattern
        case {"enum": [*values], **others} if not others and all(isinstance(value, str) for value in values):
            return f"^(?:{'|'.join(map(re.escape, values))})$"
        case {"const": str(value), **others} if not others:
            return f"^{re.escape(value)}$"
        case lengths if lengths and lengths.keys() <= {"minLength", "maxLength"}:
            return f"^(?s:.){{{lengths.get('minLength', 0)},{lengths.get('maxLength', '')}}}$"
    return None


def _check_property_count(schema: Mapping[str, Any]) -> None:
    least, names = schema.get("minProperties"), schema.get("required")
    num_required = len(set(map(str, names))) if isinstance(names, list) else 0
    if isinstance(least, int) and least > num_required + 1:
        raise UsageError(
            f"constraint: json_schema: minProperties {least} with {num_required} required names cannot be ensured, "
            f"as a key may be written twice; allowed: at most {num_required + 1}, or more names in required"
        )


def _rewrite_format(schema: dict[str, Any]) -> None:
    """Express a format by keywords that llguidance enforces. Those that are not listed here exclude nothing."""
    name, kinds = schema.get("format"), _types(schema)
    if not isinstance(name, str):
        return
    name = NARROWER_FORMAT.get(name, name)
    if name not in ENFORCED_FORMATS or "string" not in kinds:
        del schema["format"]
    else:
        schema["format"] = name
    if name in PATTERN_OF_FORMAT and "string" in kinds:
        pattern = f"^(?:{PATTERN_OF_FORMAT[name]})$"
        if "pattern" in schema:
            _add_condition(schema, {"pattern": pattern})
        else:
            schema["pattern"] = pattern
        if name == "hostname":
            _add_condition(schema, {"maxLength": 253})


def _add_condition(schema: dict[str, Any], condition: dict[str, Any]) -> None:
    if isinstance(conditions := schema.get("allOf", []), list):  # else llguidance refuses it
        schema["allOf"] = [*conditions, condition]


def _types(schema: Mapping[str, Any]) -> set[str]:
    """The types that a schema names; all if it names none."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return {kinds}
    all_kinds = ("string", "number", "integer", "object", "array", "boolean", "null")
    return set(map(str, kinds if isinstance(kinds, list) else all_kinds))


def _rewrite_bounds(schema: dict[str, Any]) -> None:
    """Replace bounds by inclusive ones that llguidance reads exactly; they lie inside the given ones."""
    kinds, bounds = _types(schema), {"minimum": list[int | float](), "maximum": list[int | float]()}
    if (range_of_format := RANGE_OF_FORMAT.get(str(schema.get("format")))) and kinds & {"integer", "number"}:
        for (keyword, inclusive), limit in zip(bounds.items(), range_of_format, strict=True):
            inclusive += _inside(keyword, limit, is_strict=False, is_whole=True)
        if "type" in schema:
            schema["type"] = sorted(kinds - {"number"} | {"integer"})
            kinds = _types(schema)
    for keyword, inclusive in bounds.items():
        exclusive = f"exclusive{keyword.capitalize()}"
        value, strict = schema.pop(keyword, None), schema.pop(exclusive, None)
        is_whole = "number" not in kinds
        if value is not None:  # JSON Schema 4 writes a boolean next to it
            inclusive += _inside(keyword, value, is_strict=strict is True, is_whole=is_whole)
        if strict is not None and not isinstance(strict, bool):
            inclusive += _inside(exclusive, strict, is_strict=True, is_whole=is_whole)
    low, high = max(bounds["minimum"], default=None), min(bounds["maximum"], default=None)
    # llguidance cannot write larger ranges that are open on one side
    if low is not None and low >= 10**17 and high is None:
        high = LARGEST
    if high is not None and high <= -(10**17) and low is None:
        low = -LARGEST
    limits = {keyword: bound for keyword, bound in (("minimum", low), ("maximum", high)) if bound is not None}
    if "number" in kinds and (shorter := _shorter_numbers(low, high)):
        _add_condition(schema, {"anyOf": [limits, {"enum": shorter}]})
    else:
        schema |= limits


def _shorter_numbers(low: int | float | None, high: int | float | None) -> list[float]:
    """Numbers within bounds that llguidance does not allow: those whose digits begin a bound far from 0.

    With a maximum of 0.95 it allows 0.90 but not 0.9.
    """
    shorter = set[float]()
    for bound in (low if low is not None and low < 0 else 0, high if high is not None and high > 0 else 0):
        integer, _, decimals = f"{Decimal(repr(bound)):f}".partition(".")
        shorter |= {float(f"{integer}.{decimals[:count]}") for count in range(1, len(decimals))}
    return sorted(number for number in shorter if (low is None or low <= number) and (high is None or number <= high))


def _inside(keyword: str, value: Any, *, is_strict: bool, is_whole: bool) -> list[int | float]:
    """The nearest bound on the inner side that llguidance reads exactly; nothing for an infinite one.

    is_strict: the value itself is excluded. is_whole: only whole numbers are bounded.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:  # NaN
        raise UsageError(f"constraint: json_schema: {keyword} {value!s:.40}; allowed: a number")
    is_low, side = keyword.lower().endswith("minimum"), 1 if keyword.lower().endswith("minimum") else -1
    if abs(value) > LARGEST:
        if value * side > 0:
            raise UsageError(
                f"constraint: json_schema: {keyword} {value!s:.40} leaves only numbers of 19 digits and more; allowed: "
                f"{'at most ' if is_low else 'at least -'}{LARGEST}"
            )
        return [_whole_float(-LARGEST * side, side, 0 if is_whole else 1)]
    exact = Decimal(repr(value))
    # the fewest digits that identify a large float, which llguidance writes and schemas have, may lie on its outer side
    steps = 1 if abs(value) > EXACT and not (is_whole and isinstance(value, int)) else 0
    if is_whole:
        bound = math.ceil(exact) if is_low else math.floor(exact)
        return [_whole_float(bound + side * (is_strict and bound == exact), side, steps)]
    # the smallest number above 0 has `DECIMALS` digits after the point
    context = Context(DIGITS, ROUND_CEILING if is_low else ROUND_FLOOR, Emin=DIGITS - 1 - DECIMALS)
    number = exact if exact % 1 == 0 and abs(exact) <= EXACT else context.plus(exact)
    if is_strict and number == exact:
        number = context.next_plus(exact) if is_low else context.next_minus(exact)
    return [_whole_float(int(number), side, steps) if number % 1 == 0 else float(number)]


def _whole_float(bound: int, side: int, steps: int = 0) -> int:
    """The float nearest to a whole bound on its inner side, or `steps` further in. side: 1 for a minimum, else -1."""
    number = float(bound)
    for _ in range(steps + ((bound - int(number)) * side > 0)):
        number = math.nextafter(number, side * math.inf)
    return max(-LARGEST, min(LARGEST, int(number)))


def _check_exact(keyword: str, value: Any) -> None:
    """Refuse a constant with a number that llguidance would read as another one."""
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_exact(keyword, part)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    if not abs(value) <= EXACT or _inside("minimum", value, is_strict=False, is_whole=False) != [value]:
        raise UsageError(
            f"constraint: json_schema: {keyword} {value!s:.40} is not exact; allowed: whole numbers from -{EXACT} to "
            f"{EXACT} (2^53), and fractions of at most {DIGITS} digits, at most {DECIMALS} of them after the point"
        )


def _check_common_multiple(steps: Sequence[Any]) -> None:
    """Refuse values of multipleOf that llguidance reads as others, or whose common multiple overflows in it."""
    numbers = sorted({abs(step) for step in steps if isinstance(step, int | float) and not isinstance(step, bool)})
    read = [_step_read(number) for number in numbers]
    scale = max((exponent for _, exponent in read), default=0)
    scaled = [digits * 10 ** (scale - exponent) for digits, exponent in read if digits]
    if len(scaled) > 1 and math.lcm(*scaled) * max(scaled) >= 1 << 32:
        raise UsageError(
            f"constraint: json_schema: multipleOf {' and '.join(map(str, numbers)):.80} have no small common multiple; "
            "allowed: values whose common multiple times the largest, in units of the last decimal, is below 2^32"
        )


def _step_read(step: int | float) -> tuple[int, int]:
    """A value of multipleOf as llguidance reads it: a whole number, and how many of its digits are decimals."""
    number, exponent = step, 0
    while number % 1 and number < 1 << 32:
        number, exponent = number * 10, exponent + 1
    if not number < 1 << 32 or Decimal(int(number)).scaleb(-exponent) != Decimal(repr(step)):
        raise UsageError(
            f"constraint: json_schema: multipleOf {step} is not exact; allowed: whole numbers below 2^32, and "
            "fractions that floats multiply by 10 without error, such as 0.01"
        )
    return int(number), exponent


# Classes of characters by which patterns mean the same in ECMAScript, Python and Rust. Where these differ, a "narrow"
# class is what all of them match, and a "broad" one, for negated classes, is what any of them matches.
WORD = r"\p{L}\p{M}\p{N}\p{Pc}"
BLANK = r"\t-\r \u{a0}\u{1680}\u{2000}-\u{200a}\u{2028}\u{2029}\u{202f}\u{205f}\u{3000}"
OTHER_BLANK = r"\x1c-\x1f\u{85}\u{feff}"
NARROW = {"d": "[0-9]", "w": "[0-9A-Za-z_]", "s": f"[{BLANK}]"}
NARROW |= {"D": r"\P{Nd}", "W": f"[^{WORD}]", "S": f"[^{BLANK}{OTHER_BLANK}]"}
BROAD = {"d": r"\p{Nd}", "w": f"[{WORD}]", "s": f"[{BLANK}{OTHER_BLANK}]"}
BROAD |= {"D": "[^0-9]", "W": "[^0-9A-Za-z_]", "S": f"[^{BLANK}]"}
LINE_END = r"\n\r\u{2028}\u{2029}"
NUL = re.compile(r"\\x00|\\u0000|\\u\{0+\}|\x00")
TOKEN = re.compile(NUL.pattern + r"|\\[pP]\{[^}]*\}|\\(?:x\{|[pP])?.|\[\^?\]?|.", re.DOTALL)
READ_DIFFERENTLY = re.compile(r"\\[aAzU]|\\x\{.?|\\[pP][^{]|\[\^?\]", re.DOTALL)  # by ECMAScript, Python or Rust


def rust_pattern(pattern: str) -> str:
    """A `pattern` of JSON Schema, which is ECMAScript, in the syntax of Rust; Python matches all its texts, too.

    NUL matches nothing: llguidance 1.9.1 adds the quotation mark and the backslash to a class of all control characters
    when it writes a class as JSON, and alternatives such as `[^"]|\\x00` become one class.
    """
    result, class_table = list[str](), dict[str, str]()
    has_flag_s = re.search(r"\(\?[a-zA-Z]*s", pattern) is not None
    for token in TOKEN.findall(pattern):
        if READ_DIFFERENTLY.fullmatch(token):
            raise UsageError(
                f"constraint: json_schema: pattern {pattern!r:.80}: ECMAScript and Python read {token} differently; "
                r"allowed: what they agree on, such as ^ and $ for \A and \z, \x41 for \x{41}, \] in a class"
            )
        if NUL.fullmatch(token) and not class_table:
            token = r"[\x00--\x00]"
        elif token[0] == "\\" and len(token) == 2:
            token = (class_table or NARROW).get(token[1], token[1] if token[1] in "<>" else token)
        elif token[0] == "\\":
            token = token if class_table else rf"[{token}--\x00]"
        elif not class_table:
            if token[0] == "[":
                class_table = BROAD if token.startswith("[^") else NARROW
                token = f"[{token}"
            elif token == "." and not has_flag_s:
                token = f"[^{LINE_END}]"
        elif token == "]":
            class_table, token = {}, r"]--\x00]"
        elif token[0] in "[&~" or (token == "-" and result[-1] == "-"):  # operators in the classes of Rust
            token = "".join("\\" + character for character in token)
        result.append(token)
    return "".join(result)
