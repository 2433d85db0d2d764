"""No text of a constraint is refused by an independent validator, and keywords that exclude nothing are accepted."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream import Constraint, UsageError
from slipstream.constraints import grammar_text
from slipstream.constraints.grammar_text import load_llguidance
from slipstream.constraints.grammar_trial import byte_tokenizer
from tests.support.markers import subcases


@pytest.fixture
def schema_texts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark that draws schemas and texts."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import schema_texts

    return schema_texts


def allows(schema: dict[str, Any], text: str) -> bool:
    matcher = load_llguidance().LLMatcher(byte_tokenizer(), Constraint(json_schema=schema).text, log_level=0)
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.slow
def test_texts_of_random_schemas_satisfy_them(schema_texts: Any) -> None:
    findings = schema_texts.check(range(60), 2)
    assert findings.wrong == [] and findings.texts > 60 and findings.numbers > 300
    assert findings.control_wrong > 30


def test_the_check_notices_what_llguidance_itself_does_not_enforce(
    schema_texts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_text, "enforceable", lambda schema: schema)
    assert len(schema_texts.check(range(60), 2).wrong) > 2


ZERO = {"type": "number", "exclusiveMinimum": 0}
NUMBERS: list[tuple[dict[str, Any], str, str]] = [  # a schema, numbers that it allows, numbers that it does not
    (ZERO | {"maximum": 0.5}, "0.5 0.49 0.000001 0.499", "0 -0 0.0 0.51 0.5000000000000000000000001 5e-1"),
    (ZERO | {"exclusiveMaximum": 0.05}, "0.04 0.0499 0.001", "0 0.0 0.05 0.050 0.04999999999999999999999999"),
    (ZERO | {"exclusiveMaximum": 1}, "0.9 0.99 0.999 0.95", "1 1.0 0 0.99999999999999999999999999"),
    ({"type": "number", "exclusiveMinimum": 5, "exclusiveMaximum": 5.5}, "5.1 5.4 5.49", "5 5.0 5.5 6"),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, "-0.5 -0.25", "0 -0 -0.0 -0.51"),
    ({"type": "number", "exclusiveMinimum": 0.5}, "0.51 1", "0.5 0.500000000000000000000000001"),
    ({"type": "number", "maximum": 0.95}, "0.9 0.95 0.94 -3.25", "0.96 1"),
    ({"type": "number", "minimum": -0.577, "maximum": 45.66}, "-0.5 -0.57 -0.577 45.6 45.66 45", "-0.578 45.67"),
    ({"type": "number", "minimum": 0.30000000000000004, "maximum": 0.4}, "0.31 0.4", "0.3 0.30000000000000003"),
    ({"type": "number", "maximum": 1e308}, "1 -7.5 123456789012345678", ""),
    ({"type": "integer", "maximum": 2**63 - 1, "minimum": -(2**63)}, "0 9007199254740993", "9223372036854775808"),
    ({"type": "integer", "minimum": 2**53 + 1}, "9007199254740994", "9007199254740992"),
    ({"type": "number", "maximum": 1.00000000000001e18}, "1000000000000009000", "1000000000000010000"),
    ({"type": "integer", "minimum": 3, "exclusiveMinimum": True}, "4", "3"),
    ({"type": "integer", "exclusiveMinimum": 2.5, "exclusiveMaximum": 4}, "3", "2 4"),
    ({"type": "integer", "format": "int32"}, "2147483647 -2147483648", "2147483648 -2147483649"),
    ({"type": "integer", "format": "uint8", "minimum": 5}, "5 255", "4 256"),
    ({"type": "integer", "format": "int64"}, "9223372036854774784", "9223372036854775808"),
    ({"type": "number", "format": "double"}, "0.5 1e5", ""),
    ({"type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 0.55}, "null 0.5", "0 0.56"),
]


@pytest.mark.slow
@subcases("schema, inside, outside", NUMBERS)
def test_numbers_are_within_their_bounds(schema: dict[str, Any], inside: str, outside: str) -> None:
    assert [text for text in inside.split() if not allows(schema, text)] == []
    assert [text for text in outside.split() if allows(schema, text)] == []


STRINGS: list[tuple[str, str, str]] = [  # a format, strings that it allows, strings that it does not
    ("date", "2024-02-29 2000-02-29 0001-01-01 1999-12-31", "2023-02-29 1900-02-29 0000-01-01 2023-04-31"),
    ("date-time", "2024-02-29T23:59:59Z 1999-12-31T00:00:00.5+01:00", "2023-02-29T00:00:00Z 2024-01-01T00:00:60Z"),
    ("time", "23:59:59Z", "23:59:60Z 24:00:00Z 23:59:59"),
    ("duration", "P1Y2M3D PT5M P3W P1DT12H", "P PT P1H P99999999999Y"),
    ("uuid4", "0f8fad5b-d9cb-469f-a165-70867728950e", "0f8fad5b-d9cb-169f-a165-70867728950e"),
    ("byte", "QUJD QUI= QQ==", "QUJ QQ= QQ"),
    ("ipv4network", "10.0.0.0/8 192.168.1.0/24", "10.0.0.1/8 10.0.0.0/33"),
    ("json-pointer", "/a/b~0", "a /~2"),
    ("regex", "^a+(?:b|[a-z]*)$ \\d{2}", "( a** [ \\1"),
    ("idn-email", "a@b.c", "a"),
    ("multi-host-uri", "postgres://user@host/db", "host"),
    *((name, "anything", "") for name in ("path", "binary", "password", "cuid", "nanoid", "jwt", "no-such-format")),
]


@pytest.mark.slow
@subcases("name, allowed, excluded", STRINGS)
def test_formats_are_enforced_narrower_or_ignored(name: str, allowed: str, excluded: str) -> None:
    schema = {"type": "string", "format": name}
    assert all(allows(schema, json.dumps(text)) for text in allowed.split())
    assert not any(allows(schema, json.dumps(text)) for text in excluded.split())
    assert allows(schema | {"type": "integer"}, "7")  # of numbers these formats say nothing
    assert allows(schema | {"pattern": "[a-zA-Z0-9]"}, json.dumps(allowed.split()[0]))


NOTHING: list[dict[str, Any]] = [
    {"type": "object", "propertyNames": {"type": "string"}},
    {"type": "object", "propertyNames": True},
    {"type": "array", "uniqueItems": False},
    {"type": "array", "uniqueItems": True, "maxItems": 1},
    {"type": "object", "x-range": {"minimum": "low", "propertyNames": 5}},
    {"type": "array", "minContains": 2},
    {"type": "object", "required": None, "properties": {"a": {"minimum": None}}},
    {"type": "object", "unevaluatedProperties": True, "dependentRequired": {}, "if": {"required": ["a"]}},
    {"type": "object", "not": False, "minProperties": 0.0},
]


@subcases("schema", NOTHING)
def test_keywords_that_exclude_nothing_are_accepted(schema: dict[str, Any]) -> None:
    assert allows(schema, "{}" if schema["type"] == "object" else "[]")


NAMES: list[tuple[Any, str, str]] = [
    ({"pattern": "^[a-z]+$"}, "ab", "A"),
    ({"enum": ["a.b", "c d"]}, "c d", "aXb"),
    ({"const": "k"}, "k", "kk"),
    ({"$ref": "#/$defs/name"}, "red", "blue"),
    ({"format": "uuid"}, "0f8fad5b-d9cb-469f-a165-70867728950e", "x"),
    ({"maxLength": 2.0}, "ab", "abc"),
]


@subcases("names, allowed, excluded", NAMES)
def test_names_of_properties_are_enforced(names: Any, allowed: str, excluded: str) -> None:
    schema = {"$defs": {"name": {"enum": ["red"], "title": "Name"}}, "type": "object", "propertyNames": names}
    for value, is_allowed in (("1", True), ("null", False)):
        typed = schema | {"additionalProperties": {"type": "integer"}}
        assert allows(typed, f"{{{json.dumps(allowed)}:{value}}}") == is_allowed
        assert not allows(typed, f"{{{json.dumps(excluded)}:{value}}}")


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"type": "array", "uniqueItems": True}, "uniqueItems cannot be enforced; allowed: uniqueItems false"),
    (
        {"type": "object", "propertyNames": {"pattern": "a"}, "properties": {"a": {}}},
        "propertyNames cannot be enforced",
    ),
    (
        {"$defs": {"a": {"propertyNames": {"$ref": "#/$defs/a"}}}, "$ref": "#/$defs/a"},
        "propertyNames cannot be enforced",
    ),
    ({"not": {"type": "null"}}, "not cannot be enforced; allowed: not with false"),
    ({"if": {"type": "null"}, "then": {}}, "if, then cannot be enforced; allowed: if without then"),
    (
        {"type": "number", "minimum": 1e308},
        r"minimum 1e\+308 leaves only numbers of 19 digits .*; allowed: at most 9223",
    ),
    ({"type": "integer", "exclusiveMaximum": -(2**70)}, "exclusiveMaximum -1180591620717411303424 leaves only"),
    ({"type": "number", "minimum": "1"}, "minimum 1; allowed: a number"),
    ({"const": 0.30000000000000004}, "const 0.30000000000000004 is not exact; allowed: .*at most 15 digits"),
    ({"multipleOf": 0.07}, "multipleOf 0.07 is not exact; allowed: whole numbers below 2.32"),
    ({"allOf": [{"multipleOf": 65537}, {"multipleOf": 65539}]}, "multipleOf 65537 and 65539 have no small common"),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "Unsatisfiable schema: .*; allowed: one that some text"),
    ({"oneOf": [{"type": "integer"}, {"minimum": 5}]}, "the cases of oneOf may overlap; allowed: anyOf"),
    ({"type": "string", "pattern": r"\ba"}, r"'\\+ba': a boundary of words, .* cannot be enforced; allowed: a regular"),
]


@subcases("schema, message", REFUSED)
def test_what_cannot_be_enforced_is_refused_in_one_line(schema: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^constraint: json_schema: {message}") as refusal:
        Constraint(json_schema=schema)
    assert "\n" not in str(refusal.value)


def test_malformed_schemas_are_refused_in_one_line() -> None:
    rng = random.Random(0)
    keywords = (
        "type format minimum exclusiveMaximum multipleOf maxLength pattern enum items allOf propertyNames required"
    )
    values: list[Any] = [None, True, -1, 1.5, float("nan"), float("inf"), 10**400, "", "date", "(", [], {}, ["a"]]
    for _ in range(400):
        schema = {rng.choice(keywords.split()): rng.choice(values) for _ in range(rng.randint(1, 3))}
        try:
            Constraint(json_schema={"properties": {"a": schema}})
        except UsageError as error:
            assert "\n" not in str(error) and "allowed: " in str(error)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Possible:FutureWarning")
@subcases(
    "pattern",
    [
        *(
            r"^[[a]b]$",
            r"^[a&&b]$",
            r"^[+--]$",
            r"^[^\w]$",
            r"^\W$",
            r"^[\D]$",
            r"^\S$",
            r"a\<b",
            r"[^\s]",
            r"^[^\"]+$",
        ),
        *(r"^[^\\]$", r"^[^\\/:*?<>|]+$", '[^"\\\\]', r"^[\x00-\x21]$", r"^[^\n\"]$", r"^.$"),
        *(r'^([^"]|\x00)$', r"^(?:\u0000|[^\"\\])+$", '^([^"]|\x00)$', r'^([^"]|[\x00])$', r'^([^"]|\x00*a)$'),
    ],
)
def test_a_pattern_allows_no_text_that_python_does_not_match(pattern: str) -> None:
    allowed = 0
    for text in [*'a&+-,5 _"\\\n\t', "[b]", "ab]", "\u0665", "\u00e9", "\u00a0", "\x1c", "a<b", '"x', "x\\"]:
        is_allowed = allows({"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=text < " "))
        assert re.search(pattern, text) or not is_allowed, text
        allowed += is_allowed
    assert allowed


@subcases("pattern, text", [(r"^\p{Cc}$", '"'), (r"^\P{P}$", "\\"), ("^.$", "\r"), ("^a.$", "a\u2028")])
def test_a_pattern_allows_no_text_that_ecmascript_does_not_match(pattern: str, text: str) -> None:
    assert not allows({"type": "string", "pattern": pattern}, json.dumps(text, ensure_ascii=text == "\r"))


@subcases("pattern", [r"^\aa$", r"\Aa", r"^a\z", r"^\x{41}$", r"^\pL$", r"^\U00000041$", "^[]a]$", "^[^]a]$"])
def test_a_pattern_that_ecmascript_and_python_read_differently_is_refused(pattern: str) -> None:
    with pytest.raises(UsageError, match=r"ECMAScript and Python read .* differently; allowed: "):
        Constraint(json_schema={"type": "string", "pattern": pattern})
    with pytest.raises(UsageError, match="ECMAScript and Python read"):
        Constraint(json_schema={"type": "object", "patternProperties": {pattern: {"type": "null"}}})
