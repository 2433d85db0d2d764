"""What a request's constraint says, as a grammar of llguidance, and whether llguidance can read it.

llguidance (MIT, github.com/guidance-ai/llguidance) is optional and is imported here and in `compiled_grammars` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.errors import UsageError

WHITESPACE = {
    "compact": {"item_separator": ",", "key_separator": ":", "whitespace_flexible": False},
    "spaced": {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False},
    # bounded: models that may write any amount of whitespace sometimes write nothing else
    "flexible": {"item_separator": ",", "key_separator": ":", "whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,24}"},
}
SHOWN = 240  # characters of llguidance's reason
DEEPEST = 1000  # llguidance reads grammars recursively; on a stack of 8 MiB it fails beyond 1,500 or more
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
REFERENCE = re.compile(r'"\$(?:dynamic|recursive)?[Rr]ef": ?("(?:[^"\\]|\\.)*")')


def load_llguidance() -> Any:
    """The library; UsageError names the extra where it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise UsageError(
            "constraint: llguidance is not installed; allowed: requests without a constraint, or "
            "pip install 'slipstream-lm[structured]'"
        ) from None
    return llguidance


def json_grammar(schema: str, whitespace: str) -> str:
    """The grammar of a JSON schema, given as `json.dumps` writes it. whitespace: between the parts, in WHITESPACE."""
    depth = nesting(schema) * (1 + len(set(REFERENCE.findall(schema))))
    if depth > DEEPEST:
        raise UsageError(f"constraint: json_schema is nested up to {depth} deep by its references; {_AT_MOST}")
    library = load_llguidance()
    try:
        return str(library.LLMatcher.grammar_from_json_schema(schema, overrides=WHITESPACE[whitespace]))
    except ValueError as error:
        raise UsageError(
            f"constraint: json_schema: {one_line(str(error))}; allowed: {_ALLOWED['json_schema']}"
        ) from None


def nesting(schema: str) -> int:
    """How deep the brackets of JSON text are nested."""
    deepest = depth = 0
    for sign in STRING.sub("", schema):
        depth += (sign in "{[") - (sign in "}]")
        deepest = max(deepest, depth)
    return deepest


def regex_grammar(regex: str) -> str:
    """The grammar of a regular expression that the whole text matches."""
    return str(load_llguidance().LLMatcher.grammar_from_regex(regex))


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of a text that is one of these."""
    lines = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return str(load_llguidance().LLMatcher.grammar_from_lark(f"start: {lines}"))


def lark_grammar(text: str, schemas: Mapping[str, str], whitespace: str) -> str:
    """The grammar of a text in llguidance's variant of Lark. schemas: JSON schemas that it names as @name."""
    depth = sum(text.count(sign) for sign in "\n([{")
    if depth > DEEPEST:
        raise UsageError(f"constraint: grammar has {depth} lines and brackets; {_AT_MOST}")
    if not schemas:
        return str(load_llguidance().LLMatcher.grammar_from_lark(text))
    named = [
        json.loads(json_grammar(schema, whitespace))["grammars"][0] | {"name": name} for name, schema in schemas.items()
    ]
    return json.dumps({"grammars": [{"lark_grammar": text}, *named]})


def check_grammar(field: str, grammar: str) -> None:
    """Refuse what llguidance cannot read, with its reason. field: of the constraint, for the message."""
    library = load_llguidance()
    failed, messages = library.LLMatcher.validate_grammar_with_warnings(grammar)
    if failed:
        raise UsageError(f"constraint: {field}: {one_line(messages[0])}; allowed: {_ALLOWED[field]}")


def one_line(message: str) -> str:
    """A message of llguidance without its line breaks, cut where it is long."""
    line = " ".join(message.split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."


_AT_MOST = f"allowed: at most {DEEPEST}"
_ALLOWED = {
    "json_schema": "a JSON schema whose keywords llguidance supports",
    "json_object": "True or False",
    "regex": "a regular expression without look-around and back-references",
    "choice": "a list of texts",
    "grammar": "a grammar in llguidance's Lark syntax",
}
