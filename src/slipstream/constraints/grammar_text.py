"""A request's constraint as a grammar of llguidance, and llguidance's refusals in plain words.

llguidance (MIT, github.com/guidance-ai/llguidance) is imported here only, and only when a constraint needs it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slipstream.constraints.enforceable_schema import enforceable, schemas_in
from slipstream.errors import UsageError

WHITESPACE: dict[str, dict[str, Any]] = {
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "spaced": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    # bounded: models that may write any amount of whitespace sometimes write nothing else
    "flexible": {"item_separator": ",", "key_separator": ":", "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"},
}
SECONDS, MEGABYTES = 2, 256  # of processor time and memory to compile one grammar
TIMED_OUT = "ended while it was compiled"
TOO_EXPENSIVE = "its expressions take too much computation"
SHOWN = 240  # characters of llguidance's reason
DEEPEST = 1000  # llguidance reads grammars recursively; on a stack of 8 MiB it fails beyond 1,500 or more
DEEPEST_JSON = 120  # llguidance reads JSON of at most 128 levels, a few of which hold the schema
PARTS = '{"grammars"'  # the beginning of a grammar in parts, as JSON
# strings, comments, expressions, tokens
LARK_PART = re.compile(r'"(?:\\.|[^"\\])*"|//[^\n]*|/(?:\\.|[^/\\\n])+/|<[^<>"\s]+>')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
REFERENCE = re.compile(r'"\$(?:dynamic|recursive)?[Rr]ef": ?("(?:[^"\\]|\\.)*")')
ESCAPES = '"\\bfnrt'  # all but \u, by which a key could be written in a second way


@dataclass(frozen=True)
class Limits:
    """The most that an output may cost llguidance, in llguidance's units."""

    lexer_cost: int = 10_000_000  # of everything that a row's lexer has built: about a second and 60 MB
    lexer_states: int = 50_000  # that a row's lexer has built
    step_cost: int = 100_000  # of one mask of a shared lexer
    row_items: int = 10_000  # of the parser, in one place
    step_items: int = 100_000  # of the parser, in one step

    def parser_limits(self, step_cost: int) -> Any:
        """The limits in the form that llguidance takes."""
        return load_llguidance().LLParserLimits(
            max_items_in_row=self.row_items,
            step_max_items=self.step_items,
            step_lexer_fuel=step_cost,
            max_lexer_states=self.lexer_states,
        )


LIMITS = Limits()


def load_llguidance() -> Any:
    """The library; UsageError where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "constraint: llguidance is not installed; allowed: requests without a constraint, or pip install llguidance"
        ) from None
    return llguidance


def json_grammar(schema: str, whitespace: str) -> str:
    """The grammar of a JSON schema, given as `json.dumps` writes it. whitespace: between the parts, in WHITESPACE."""
    if nesting(schema) > DEEPEST_JSON:
        raise UsageError(f"constraint: json_schema is nested {nesting(schema)} deep; allowed: at most {DEEPEST_JSON}")
    depth = nesting(schema) * (1 + len(set(REFERENCE.findall(schema))))
    if depth > DEEPEST:
        raise UsageError(f"constraint: json_schema is nested up to {depth} deep by its references; {_AT_MOST}")
    library, options, rewritten = load_llguidance(), WHITESPACE[whitespace], enforceable(json.loads(schema))
    # else a declared key could be written in a second way, as a further key; schemas that need \u keep it
    if "\\u00" not in schema and any(map(_allows_further_keys, schemas_in(rewritten))):
        options = {**options, "json_allowed_escapes": ESCAPES}
    try:
        return str(library.LLMatcher.grammar_from_json_schema(json.dumps(rewritten), overrides=options))
    except ValueError as error:
        raise UsageError(
            f"constraint: json_schema: {one_line(str(error))}; allowed: {ALLOWED['json_schema']}"
        ) from None


def _allows_further_keys(schema: Mapping[str, Any]) -> bool:
    """True if some of an object's keys are declared, and others allowed as well."""
    declared = any(schema.get(keyword) for keyword in ("properties", "patternProperties", "required"))
    return declared and schema.get("additionalProperties") is not False


def nesting(schema: str) -> int:
    """Nesting depth of the brackets of JSON text."""
    deepest = depth = 0
    for character in STRING.sub("", schema):
        depth += (character in "{[") - (character in "}]")
        deepest = max(deepest, depth)
    return deepest


def regex_grammar(regex: str) -> str:
    """The grammar of a regular expression that the whole text matches."""
    return str(load_llguidance().LLMatcher.grammar_from_regex(regex))


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of a text that is one of these. They form a single lexeme, which has room for thousands."""
    lines = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return str(load_llguidance().LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {lines}"))


def lark_grammar(text: str, schemas: Mapping[str, str], whitespace: str) -> str:
    """The grammar of a text in llguidance's variant of Lark. schemas: JSON schemas that it names as @name."""
    depth = sum(text.count(character) for character in "\n([{")
    if depth > DEEPEST:
        raise UsageError(f"constraint: grammar has {depth} lines and opening brackets together; {_AT_MOST}")
    if not schemas:
        return str(load_llguidance().LLMatcher.grammar_from_lark(text))
    named = [
        json.loads(json_grammar(schema, whitespace))["grammars"][0] | {"name": name} for name, schema in schemas.items()
    ]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]})


def with_preamble(preamble: str, grammar: str) -> str:
    """A grammar whose text follows a `thought`, which rules of Lark describe."""
    # llguidance leaves Lark as it is
    parts = json.loads(grammar)["grammars"] if grammar.startswith(PARTS) else [{"lark_grammar": grammar}]
    head = {"lark_grammar": f"start: thought @constrained\n{preamble}"}
    return json.dumps({"grammars": [head, parts[0] | {"name": "constrained"}, *parts[1:]]})


def in_lark(grammar: str, named: Callable[[str], str]) -> str:
    """A grammar with its special tokens, such as <|end|> or <[5]>, in another form."""
    if "<" not in grammar:
        return grammar

    def rewritten(lark: str) -> str:
        return LARK_PART.sub(lambda part: named(part[0]) if part[0][0] == "<" else part[0], lark)

    if not grammar.startswith(PARTS):
        return rewritten(grammar)
    parts = json.loads(grammar)["grammars"]
    parts = [
        part | {"lark_grammar": rewritten(part["lark_grammar"])} if part.get("lark_grammar") else part for part in parts
    ]
    return json.dumps({"grammars": parts})


def reason(message: str) -> str:
    """A message of llguidance, as a sentence that follows the constraint's name."""
    if numbers := re.search(r"row has (\d+) items; max is (\d+)", message):
        return f"it has {numbers[1]} alternatives at one place, more than {numbers[2]}"
    if "ff_tokens" in message:
        return "it demands a text without an end, or a very long one"
    if "Too many items" in message:
        return "it has too many ways to read one token"
    if any(limit in message for limit in ("too many expressions", "too many states", "fuel", "precomputation")):
        return TOO_EXPENSIVE
    if message == TIMED_OUT:
        return f"it takes more than {SECONDS} seconds or {MEGABYTES} MB to compile"
    if keywords := re.search(r"Unimplemented keys: \[(.*)\]", message):
        return f"{keywords[1].replace(chr(34), '')} cannot be enforced"
    if "oneOf constraints are not supported" in message:
        return "the cases of oneOf may overlap"
    if anchor := re.search(r"lookarounds not supported yet; (\w+) in regex /(.*?)/(?: |$)", one_line(message)):
        return f"{anchor[2]!r}: a boundary of words, or of the text in its midst ({anchor[1]}), cannot be enforced"
    if "NoExtension" in message:
        return "no text satisfies it"
    if diagram := re.search(REGEX_ERROR, message):
        return f"{diagram[1]!r}: {diagram[3]} at character {len(diagram[2]) + 1}"
    return one_line(message)


def allowed(message: str, kind: str | None = None) -> str:
    """The alternatives to a constraint that llguidance refused with this message."""
    if "NoExtension" in message or "Unsatisfiable" in message:
        return "one that some text satisfies"
    if re.search(REGEX_ERROR, message) or "lookarounds not supported" in message:
        return ALLOWED["regex"]
    if "oneOf constraints are not supported" in message:
        return "anyOf, or cases of different types or with a required property that is a different constant in each"
    if "Unimplemented keys" in message:
        hints = [hint for keyword, hint in ENFORCEABLE.items() if f'"{keyword}"' in message]
        return "; ".join([*hints, "schemas without these keywords"][: len(hints) or 1])
    return SIMPLER if kind is None or reason(message) != one_line(message) else ALLOWED[kind]


def one_line(message: str) -> str:
    """A message of llguidance without its line breaks and the state of its parser, cut where it is long."""
    line = " ".join(re.split(r"<(?:state|non-verbose|backtrace)", message)[0].split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


# the expression, a line that points at the place, and what is wrong there
REGEX_ERROR = r"regex parse error:\n {4}(.*)\n {4}( *)\^+\nerror: (.+)"
SIMPLER = "a smaller or simpler one"
ENFORCEABLE = {  # what is allowed of keywords that are refused otherwise
    "uniqueItems": "uniqueItems false, or arrays of at most one item",
    "propertyNames": "propertyNames with one of pattern, format, enum, const or lengths, in objects without properties",
    "contains": "items, for all items",
    "if": "if without then and else; anyOf lists the cases",
    "not": "not with false",
    "dependentRequired": "dependentRequired {}; anyOf lists the cases",
    "unevaluatedProperties": "additionalProperties",
    "unevaluatedItems": "items",
}
_AT_MOST = f"allowed: at most {DEEPEST}"
ALLOWED = {
    "json_schema": "a JSON schema whose keywords llguidance supports",
    "json_object": "True or False",
    "regex": "a regular expression without look-around and back-references",
    "choice": "a list of texts",
    "grammar": "a grammar in llguidance's Lark syntax",
}
