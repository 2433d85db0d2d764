"""Constraints are checked when they are created; an error says in one line what is wrong."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from slipstream import Constraint, SamplingParams, UsageError
from tests.support.command_line import run
from tests.support.markers import subcases
from tests.support.structured_outputs import SCHEMAS

WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "nothing given; allowed: one of json_schema"),
    ({"regex": "a", "choice": ["b"]}, "regex and choice given; allowed: one of"),
    ({"json_schema": "{"}, "json_schema is not JSON"),
    ({"json_schema": "[1]"}, r"json_schema=\[1\]; allowed: a dictionary"),
    ({"json_schema": {"type": "strin"}}, "json_schema: Invalid type: strin; allowed"),
    ({"json_schema": {"type": "string", "pattern": "(?=a)b"}}, "json_schema: .*look-around.*; allowed"),
    ({"json_schema": {"x": object()}}, "json_schema is not JSON"),
    ({"json_object": 1}, "json_object=1; allowed: True or False"),
    ({"regex": "(a"}, "regex: .*unclosed group.*; allowed"),
    ({"regex": ""}, "regex=''; allowed: a text"),
    ({"regex": 5}, "regex=5; allowed: a text"),
    ({"choice": []}, r"choice=\[\]; allowed: a list"),
    ({"choice": "ab"}, "choice='ab'; allowed: a list"),
    ({"choice": ["a", ""]}, "choice has ''; allowed"),
    ({"grammar": "start: foo"}, 'grammar: .*unknown name: "foo".*; allowed'),
    ({"json_schema": {"enum": [5, 2**53 + 1]}}, "json_schema: enum 9007199254740993 is not exact; allowed: .*2.53"),
    ({"json_schema": {"const": [{"a": -(2**60)}]}}, "json_schema: const -1152921504606846976 is not exact"),
    (
        {"json_schema": {"minProperties": 2}},
        "json_schema: minProperties 2 with 0 required names .*; allowed: at most 1",
    ),
    (
        {"json_schema": {"allOf": [{"required": ["a"], "minProperties": 3}]}},
        "json_schema: minProperties 3 with 1 required names .*; allowed: at most 2",
    ),
    ({"regex": "a", "whitespace": "spaced"}, "whitespace='spaced' with regex; allowed"),
    ({"json_object": True, "whitespace": "much"}, "whitespace='much'; allowed: compact"),
]


@subcases("options, message", WRONG)
def test_an_invalid_constraint_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^constraint: {message}") as refusal:
        Constraint(**options)
    assert "\n" not in str(refusal.value) and "allowed: " in str(refusal.value)


def test_exact_numbers_and_properties_named_like_keywords_are_allowed() -> None:
    for schema in (
        {"enum": [2**53, -(2**53), 0.5]},
        {"properties": {"maximum": {"type": "integer", "default": 2**60}, "enum": {"type": "null"}}},
        {"type": "object", "required": ["a"], "properties": {"a": {}}, "minProperties": 2},
    ):
        assert Constraint(json_schema=schema).text


@subcases("name", SCHEMAS)
def test_a_schema_may_be_a_dictionary_or_text(name: str) -> None:
    assert Constraint(json_schema=SCHEMAS[name]).text == Constraint(json_schema=json.dumps(SCHEMAS[name])).text


def test_without_llguidance_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match=r"^constraint: llguidance is not installed; .*pip install llguidance$"):
        Constraint(regex="a")


def test_a_constraint_with_ignore_eos_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^ignore_eos=True with a constraint"):
        SamplingParams(constraint=Constraint(regex="a"), ignore_eos=True)


def test_params_with_a_constraint_are_json() -> None:
    params = SamplingParams(constraint=Constraint(json_schema={"type": "null"}, whitespace="spaced"))
    assert params.to_dict()["constraint"] == {"json_schema": {"type": "null"}, "whitespace": "spaced"}
    assert json.loads(json.dumps(SamplingParams().to_dict()))["constraint"] is None


def cli(capsys: Any, monkeypatch: Any, *arguments: str) -> tuple[int, str, str]:
    return run(capsys, monkeypatch, "generate", "--target", "toy", "--raw", "-p", "The heron", *arguments)


def test_command_line_flags_constrain_the_text(tmp_path: Any, capsys: Any, monkeypatch: Any) -> None:
    schema, lark = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"enum": ["ab", "cd"]}')
    lark.write_text('start: "x" "y"')
    for flags, texts in (
        (["--json-schema", str(schema)], ['"ab"', '"cd"']),
        (["--grammar", str(lark)], ["xy"]),
        (["--regex", "q{2}"], ["qq"]),
        (["--choice", "one", "--choice", "two"], ["one", "two"]),
    ):
        code, out, err = cli(capsys, monkeypatch, *flags)
        assert code == 0 and out.strip() in texts, err
