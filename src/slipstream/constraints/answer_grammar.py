"""Grammars of tool calls and thoughts in the model's own form, so that the reader of answers finds them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from slipstream.constraints.enforceable_schema import enforceable
from slipstream.tokenization.answer_forms import CallForm, CallText, ThoughtForm
from slipstream.tokenization.answer_parser import schema_types

ANY_TEXT = "(?s:.*)"


def call_grammar(
    form: CallForm, text: CallText, tools: Sequence[Mapping[str, Any]], tokens: Mapping[str, int], *, several: bool
) -> tuple[list[str], dict[str, Any]]:
    """Rules of Lark for `calls`, and the JSON schemas that they name.

    tokens: special tokens, which stand in a grammar by their ids. several: more than one call may be written.
    """
    grammar = _CallGrammar(form, text, tokens)
    names = [grammar.add_call(number, tool["function"]) for number, tool in enumerate(tools)]
    between = grammar.literal(text.between_calls)
    more = f" ({between} call)*" if several else ""
    return [f"calls: call{more}", f"call: {' | '.join(names)}", *grammar.rules], grammar.schemas


def _text_pattern(schema: Mapping[str, Any]) -> str:
    """The expression of a string's text by its schema's pattern, or else its lengths."""
    schema = enforceable(dict(schema))
    pattern, shortest, longest = str(schema.get("pattern", "")), schema.get("minLength", 0), schema.get("maxLength", "")
    if not pattern:
        return f"(?s:.{{{shortest},{longest}}})" if shortest or longest != "" else ANY_TEXT
    is_begun, is_ended = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
    inner = pattern[is_begun : len(pattern) - is_ended].replace("/", "\\/")
    return f"{'' if is_begun else ANY_TEXT}(?:{inner}){'' if is_ended else ANY_TEXT}"


def arguments_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments, an object; a function without parameters takes none."""
    parameters = function.get("parameters")
    if parameters is None:
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **parameters}


def thought_rules(thought: ThoughtForm, tokens: Mapping[str, int], *, is_open: bool, with_text: bool) -> str:
    """Rules of Lark for a `thought`, which the model may leave out unless the prompt opened it.

    with_text: the marks before text, if the model writes any, follow.
    """
    literals = Literals(tokens)
    terms = [] if is_open else [literals.of(thought.opening)]
    closing = literals.of(thought.closing)
    if thought.closing in tokens:
        terms += ["inside", closing]
        inside = "inside: /(?s:.*)/"
    else:
        terms += ["inside"]
        inside = f"inside[suffix={closing}]: /(?s:.*)/"
    terms += [literals.of(thought.turn)] if thought.turn else [r"/\n{0,2}/"]
    rule = " ".join(terms)
    rule = rule if is_open else f"({rule})?"
    return f"thought: {rule} {literals.of(thought.text) if with_text else ''}\n{inside}"


class Literals:
    """Texts as terms of a grammar. tokens: special tokens, which stand there by their ids."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self.tokens = tokens
        self.special = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")

    def of(self, text: str) -> str:
        terms, place = [], 0
        for match in self.special.finditer(text):
            terms += [json.dumps(text[place : match.start()], ensure_ascii=False), f"<[{self.tokens[match[0]]}]>"]
            place = match.end()
        terms.append(json.dumps(text[place:], ensure_ascii=False))
        return " ".join(term for term in terms if term != '""')


class _CallGrammar:
    def __init__(self, form: CallForm, text: CallText, tokens: Mapping[str, int]) -> None:
        self.form, self.text = form, text
        self.rules: list[str] = []
        self.schemas: dict[str, Any] = {}
        literals = Literals(tokens)
        self.literal, self._special = literals.of, literals.special

    def add_call(self, number: int, function: Mapping[str, Any]) -> str:
        """Add the rule of one function's calls; returns its name."""
        text, name, schema = self.text, str(function["name"]), arguments_schema(function)
        written = json.dumps(name, ensure_ascii=False)[1:-1] if text.quotes_names else name
        before = self.literal(text.before + written + text.between)
        if text.has_keys:
            arguments = self._pairs(number, schema)
        else:
            self.schemas[f"arguments_{number}"] = schema
            arguments = f"@arguments_{number}"
        self.rules.append(f"call_{number}: {before} {arguments} {self.literal(text.after)}")
        return f"call_{number}"

    def _pairs(self, number: int, schema: Mapping[str, Any]) -> str:
        """The keys and values of an object, the required ones first if values are separated."""
        properties = schema.get("properties") or {}
        required = [key for key in properties if key in (schema.get("required") or ())]
        # definitions that a property refers to
        shared = {name: value for name, value in schema.items() if name in ("$defs", "definitions")}
        for index, (key, value) in enumerate(properties.items()):
            self._add_pair(f"pair_{number}_{index}", key, value, shared)
        rules = {key: f"pair_{number}_{index}" for index, key in enumerate(properties)}
        if not self.text.separates:
            return " ".join(rule + ("" if key in required else "?") for key, rule in rules.items())
        separator = self.literal(self.text.value_end)
        optional = [rule for key, rule in rules.items() if key not in required]
        after = [" ".join(f"({separator} {rule})?" for rule in optional[index:]) for index in range(len(optional) + 1)]
        if required:
            return f" {separator} ".join(rules[key] for key in required) + f" {after[0]}"
        cases = [f"{rule} {after[index + 1]}" for index, rule in enumerate(optional)]
        return f"({' | '.join(cases)})?" if cases else ""

    def _add_pair(self, rule: str, key: str, schema: Any, shared: Mapping[str, Any]) -> None:
        text, value_end = self.text, "" if self.text.separates else self.text.value_end
        opening, is_text = text.value, "string" in schema_types(schema)
        if is_text and self.form.arguments != "python":
            opening = opening.replace('string="false"', 'string="true"')
            values = schema.get("enum") or ([schema["const"]] if "const" in schema else [])
            quote = self.form.quotes[0] if self.form.quotes else ""
            if values:
                texts = [value if isinstance(value, str) else json.dumps(value) for value in values]
                value = "(" + " | ".join(self.literal(quote + item + quote) or '""' for item in texts) + ")"
                value += f" {self.literal(value_end)}"
            else:
                # the closing mark is the first, as for the reader; a newline before it belongs to the tags
                end = quote + value_end if quote else value_end.lstrip("\n")
                token = self._special.search(end)
                suffix = (quote or end)[: len(end) if token is None else token.start()]
                options = f"[suffix={json.dumps(suffix, ensure_ascii=False)}]" if suffix else ""
                body = _text_pattern(schema)
                is_any = body == ANY_TEXT
                name, padding = "text" if is_any else f"text_{rule}", "" if is_any or not self.form.padding else r"\n"
                rule_of_text = f"{name}{options}: /{body}{padding}/"
                if rule_of_text not in self.rules:  # several texts share a rule
                    self.rules.append(rule_of_text)
                value = f"{self.literal(quote)} {name} {self.literal(end.removeprefix(suffix))}"
        else:
            self.schemas[rule] = {**schema, **shared} if isinstance(schema, Mapping) else schema
            value = f"@{rule} {self.literal(value_end)}"
        self.rules.append(f"{rule}: {self.literal(text.key + key + opening)} {value}")
