"""The form that a request demands of its output: `Constraint`, checked when it is made. Needs no PyTorch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slipstream.checks import arguments_named, changed_repr, is_text
from slipstream.constraints.grammar_text import (
    WHITESPACE,
    choice_grammar,
    json_grammar,
    lark_grammar,
    regex_grammar,
    with_preamble,
)
from slipstream.constraints.grammar_trial import check_grammar
from slipstream.errors import UsageError

KINDS = ("json_schema", "json_object", "regex", "choice", "grammar")
OTHER_NAMES = {  # of other libraries, and what to write here
    **dict.fromkeys(("schema", "json", "guided_json"), "json_schema=..."),
    **dict.fromkeys(("pattern", "guided_regex"), "regex=..."),
    **dict.fromkeys(("choices", "options", "guided_choice"), "choice=[...]"),
    **dict.fromkeys(("lark", "ebnf", "gbnf", "guided_grammar"), "grammar=..."),
}


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """The form of a request's output, from its first token to its end; exactly one of the kinds.

    json_schema: JSON that is valid by this schema, a dictionary or JSON text.
    json_object: any JSON object.
    regex: a text that matches this regular expression from end to end (Rust's syntax, no look-around).
    choice: one of these texts.
    grammar: a text of this grammar, in llguidance's variant of Lark. schemas: JSON schemas of the parts that it names
    as @name.
    whitespace: of JSON, "compact" (none), "spaced" (a blank after commas and colons, as `json.dumps` writes it) or
    "flexible" (up to 24 characters of it wherever JSON allows any).

    UsageError says what llguidance cannot read, and why.
    """

    json_schema: Mapping[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    schemas: Mapping[str, Mapping[str, Any] | str] = field(default_factory=dict)
    whitespace: str = "compact"
    preamble: str = ""  # rules of Lark that describe, as `thought`, what precedes the text
    text: str = field(init=False, repr=False, compare=False)  # the constraint as a grammar of llguidance
    megabytes: int = field(init=False, repr=False, compare=False)  # memory of the compiled grammar; 0 if not measured

    def __post_init__(self) -> None:
        kinds = [name for name in KINDS if _is_given(getattr(self, name))]
        if len(kinds) != 1:
            raise UsageError(
                f"constraint: {' and '.join(kinds) or 'nothing'} given; allowed: one of {', '.join(KINDS)}"
            )
        if self.whitespace not in WHITESPACE:
            raise UsageError(f"constraint: whitespace={self.whitespace!r}; allowed: {', '.join(WHITESPACE)}")
        if not isinstance(self.schemas, Mapping):
            raise UsageError(f"constraint: schemas={self.schemas!r:.80}; allowed: a mapping of names to JSON schemas")
        if self.schemas and kinds != ["grammar"]:
            raise UsageError(f"constraint: schemas with {kinds[0]}; allowed: with a grammar that names them")
        if self.whitespace != "compact" and not (kinds[0].startswith("json") or self.schemas):
            raise UsageError(f"constraint: whitespace={self.whitespace!r} with {kinds[0]}; allowed: with JSON alone")
        text = self._grammar(kinds[0])
        object.__setattr__(self, "text", with_preamble(self.preamble, text) if self.preamble else text)
        # the schema as it was given, as the patterns of formats compile fast
        expression = self.regex if self.json_schema is None else _schema("json_schema", self.json_schema)
        trial = check_grammar(kinds[0], self.text, expression or self.text)
        object.__setattr__(self, "megabytes", trial.megabytes)

    def __repr__(self) -> str:
        return changed_repr(self)

    def _grammar(self, kind: str) -> str:
        if kind == "json_schema":
            return json_grammar(_schema("json_schema", self.json_schema), self.whitespace)
        if kind == "json_object":
            if self.json_object is not True:
                raise UsageError(f"constraint: json_object={self.json_object!r}; allowed: True or False")
            return json_grammar('{"type": "object"}', self.whitespace)
        if kind == "choice":
            return choice_grammar(self._choices())
        value = getattr(self, kind)
        if not is_text(value):
            raise UsageError(f"constraint: {kind}={value!r:.80}; allowed: a text of valid Unicode that is not empty")
        if kind == "regex":
            return regex_grammar(value)
        schemas = {name: _schema(f"schemas.{name}", schema) for name, schema in self.schemas.items()}
        return lark_grammar(value, schemas, self.whitespace)

    def _choices(self) -> list[str]:
        chosen = self.choice
        if isinstance(chosen, str) or not isinstance(chosen, Sequence) or not chosen:
            raise UsageError(f"constraint: choice={chosen!r}; allowed: a list of texts that is not empty")
        for text in chosen:
            if not is_text(text):
                raise UsageError(f"constraint: choice has {text!r:.80}; allowed: texts of valid Unicode, not empty")
        return list(chosen)

    def to_dict(self) -> dict[str, Any]:
        """The fields that were given, as JSON values."""
        kind = next(name for name in KINDS if _is_given(getattr(self, name)))
        value = getattr(self, kind)
        more: dict[str, Any] = {"schemas": dict(self.schemas)} if self.schemas else {}
        more |= {"whitespace": self.whitespace} if kind.startswith("json") or self.schemas else {}
        more |= {"preamble": self.preamble} if self.preamble else {}
        return {kind: list(value) if kind == "choice" else value} | more


Constraint.__init__ = arguments_named("Constraint", OTHER_NAMES)(Constraint.__init__)  # type: ignore[method-assign]


def _is_given(value: object) -> bool:
    return value is not None and value is not False


def _schema(name: str, schema: Any) -> str:
    """A schema as JSON text. name: the field that holds it."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise UsageError(f"constraint: {name} is not JSON ({error}); allowed: a JSON object") from None
    if not isinstance(schema, Mapping):
        raise UsageError(f"constraint: {name}={schema!r:.80}; allowed: a dictionary, or JSON text of an object")
    try:
        return json.dumps(dict(schema))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"constraint: {name} is not JSON ({error}); allowed: what JSON can write") from None
