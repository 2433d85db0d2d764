"""Do the texts that constraints allow satisfy their JSON schemas, by a validator that shares no code with them?

    python benchmarks/schema_texts.py --schemas 20000 --json FILE

Random schemas have bounds, lengths, formats, patterns, arrays, objects, unions, conditions and references. From each
constraint, texts are drawn byte by byte among the allowed bytes, and `jsonschema` checks them, once with numbers read
as decimals and once as floats. For schemas of one number, numbers just inside and outside the bounds are tried as well,
in several notations. Schemas that are refused are counted by the keyword or the reason. The control checks each text
against another schema.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from decimal import MAX_EMAX, MIN_EMIN, Context, Decimal, InvalidOperation, localcontext
from pathlib import Path
from typing import Any

import jsonschema
from terminal import positive, save

from slipstream import Constraint, UsageError
from slipstream.constraints.grammar_text import load_llguidance
from slipstream.constraints.grammar_trial import byte_tokenizer

Schema = dict[str, Any]
END = 256  # the token after the 256 bytes
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6"),
    *("uuid", "uuid1", "uuid4", "uuid7", "uri", "uri-reference", "iri", "iri-reference", "uri-template", "url"),
    *("json-pointer", "relative-json-pointer", "regex", "byte", "base64", "base64url", "binary", "password", "path"),
    *("ipv4network", "ipvanyaddress", "ipv6interface", "multi-host-uri", "cuid", "nanoid", "jwt", "color", "money"),
)
PATTERNS = (
    *(r"^[A-Z]{2}-[0-9]{2,4}$", r"^\d+$", r"b+c", r"^(a|bc)*d", r"[^a-z]$", r"^$", r"\w\s\w", r"^x|y$", r"^[[a]b]*$"),
    *(r"^[a&&b]+$", r"^.{3}$", r"^\S+$", r"^[+--]+$", r"^(?:ab){2,3}$", r"^[\w.-]+@[\w-]+\.\w{2,3}$", r"^\u00e9+$"),
    *(r"^(?!a)b$", r"(a)\1", r"^[^\W\d]+$", r"^\D{2}$", r"^[^\n]*$", r"^\/a\/$", r"^\-\_$", r"^[^\"]+$"),
    *(r"^[^\\/:*?\"<>|]+$", r"^[\x00-\x21]$"),
)
NAMES = ("a", "b", "id", "x-y", "caf\u00e9")


class SchemaMaker:
    """Draws schemas."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)

    def schema(self) -> Schema:
        """A schema, in a fifth of all cases with definitions that it refers to."""
        if self.rng.random() < 0.2:
            defined = {"p": self.value(2), "q": self.value(2)}
            reference = {"$ref": f"#/$defs/{self.rng.choice('pq')}"}
            top = self.rng.choice([reference, {"type": "array", "items": reference, "maxItems": 2}, self.value(1)])
            return {"$defs": defined, **top}
        return self.value(0)

    def value(self, depth: int) -> Schema:
        """A schema at this depth."""
        kinds = [self.integer, self.number, self.number, self.text, self.text, self.choice]
        if depth < 3:
            kinds += [self.array, self.object, self.combined]
        schema = self.rng.choice(kinds)() if depth >= 3 else self._nested(kinds, depth)
        if self.rng.random() < 0.05:
            schema = {**schema, "nullable": True, "description": "a value", "deprecated": True}
        return schema

    def _nested(self, kinds: list[Any], depth: int) -> Schema:
        self.depth = depth
        return self.rng.choice(kinds)()  # type: ignore[no-any-return]

    def bound(self) -> int | float:
        """A number of any size and sign."""
        rng = self.rng
        kind = rng.randrange(8)
        if kind == 0:
            return rng.choice([0, 1, -1, 0.5, -0.5, 0.1, -0.0, 10, 100, 1e-9, -1e-9, 0.99, 1.5])
        if kind == 1:
            return rng.choice([2**53, -(2**53), 2**63 - 1, -(2**63), 2**64, 1e308, -1e308, 1e18, 2**31 - 1, 1e-300])
        if kind == 2:
            return rng.uniform(-1, 1)
        if kind == 3:
            return rng.uniform(-10, 10) * 10 ** rng.randint(-9, 15)
        if kind == 4:
            return round(rng.uniform(-100, 100), rng.randint(1, 4))
        return rng.randint(-(10 ** (n := rng.randint(1, 17))), 10**n) if kind == 5 else rng.randint(-30, 30)

    def bounds(self) -> Schema:
        """None to four bounds, often in one unit interval."""
        rng = self.rng
        low = self.bound()
        span = rng.choice([rng.random(), rng.randint(0, 3), rng.randint(1, 10**6), 10.0 ** rng.randint(-6, 6)])
        try:
            high = low + span if rng.random() < 0.8 else self.bound()
        except OverflowError:
            high = low
        schema: Schema = {}
        if rng.random() < 0.8:
            schema[rng.choice(["minimum", "exclusiveMinimum"])] = low
        if rng.random() < 0.8:
            schema[rng.choice(["maximum", "exclusiveMaximum"])] = high
        if rng.random() < 0.1:
            schema[rng.choice(["minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"])] = self.bound()
        return schema

    def integer(self) -> Schema:
        """An integer."""
        schema = {"type": "integer", **self.bounds()}
        if self.rng.random() < 0.2:
            schema["multipleOf"] = self.rng.choice([1, 2, 3, 5, 7, 10, 60, 65537, 1.5, 0.5])
        if self.rng.random() < 0.2:
            schema["format"] = self.rng.choice(["int32", "int64", "uint8", "int16", "float"])
        return schema

    def number(self) -> Schema:
        """A number."""
        schema = {"type": self.rng.choice(["number", "number", ["number", "null"]]), **self.bounds()}
        if self.rng.random() < 0.15:
            schema["multipleOf"] = self.rng.choice([0.01, 0.1, 0.5, 0.25, 2, 0.3, 0.07, 1e-8, 1.1])
        if self.rng.random() < 0.15:
            schema["format"] = self.rng.choice(["double", "float", "int32", "decimal"])
        return schema

    def text(self) -> Schema:
        """A string."""
        rng, schema = self.rng, Schema(type="string")
        if rng.random() < 0.4:
            schema["minLength"] = rng.choice([0, 1, 2, 5, 2.0])
        if rng.random() < 0.4:
            schema["maxLength"] = int(schema.get("minLength", 0)) + rng.choice([0, 1, 3, 40])
        if rng.random() < 0.35:
            schema["pattern"] = rng.choice(PATTERNS)
        if rng.random() < 0.35:
            schema["format"] = rng.choice(FORMATS)
        return schema

    def choice(self) -> Schema:
        """Constants and literals."""
        rng = self.rng
        constants = [1, 0, -3, 0.5, 1.0, "a", "", 'q"\n', "\u00e9\U0001f600", None, True, [1, "a"], {"k": [0.25]}, 1e2]
        if rng.random() < 0.3:
            constants.append(self.bound())
        values = rng.sample(constants, rng.randint(1, 4))
        return rng.choice([{"enum": values}, {"const": values[0]}, {"type": rng.choice(["boolean", "null"])}])

    def array(self) -> Schema:
        """An array."""
        rng, depth = self.rng, self.depth + 1
        schema = Schema(type="array")
        if rng.random() < 0.8:
            schema["items"] = self.value(depth)
        if rng.random() < 0.3:
            schema["prefixItems"] = [self.value(depth) for _ in range(rng.randint(1, 3))]
        if rng.random() < 0.1:
            schema["items"] = rng.random() < 0.5
        schema["maxItems"] = rng.randint(0, 4)
        if rng.random() < 0.5:
            schema["minItems"] = rng.randint(0, 3)
        for keyword, value, chance in (
            ("uniqueItems", rng.random() < 0.5, 0.15),
            ("contains", rng.choice([True, {"type": "integer"}, {"const": 1}]), 0.08),
            ("minContains", rng.randint(0, 2), 0.08),
            ("unevaluatedItems", rng.random() < 0.5, 0.04),
        ):
            if rng.random() < chance:
                schema[keyword] = value
        return schema

    def object(self) -> Schema:
        """An object."""
        rng, depth = self.rng, self.depth + 1
        names = rng.sample(NAMES, rng.randint(0, 3))
        schema = {"type": "object", "properties": {name: self.value(depth) for name in names}}
        schema["required"] = [name for name in names if rng.random() < 0.6] + rng.sample(["z"], rng.random() < 0.1)
        schema["additionalProperties"] = rng.choice([False, False, False, True, self.value(depth)])
        for keyword, value, chance in (
            ("patternProperties", {rng.choice(["^x", "d$", "^[0-9]+$", ".*"]): self.value(depth)}, 0.15),
            (
                "propertyNames",
                rng.choice([True, {}, {"type": "string"}, {"pattern": "^[a-z]+$"}, {"maxLength": 3}]),
                0.15,
            ),
            ("minProperties", rng.randint(0, 3), 0.1),
            ("maxProperties", rng.randint(1, 4), 0.1),
            ("dependentRequired", rng.choice([{}, {"a": []}, {"a": ["b"]}]), 0.05),
            ("unevaluatedProperties", rng.random() < 0.5, 0.04),
            ("required", None, 0.03),
        ):
            if rng.random() < chance:
                schema[keyword] = value
        return schema

    def combined(self) -> Schema:
        """A union, an intersection or a condition."""
        rng, depth = self.rng, self.depth + 1
        kind = rng.choice(["anyOf", "anyOf", "oneOf", "allOf", "if", "not", "bounds"])
        if kind == "bounds":
            return {
                "allOf": [self.integer(), self.bounds(), {"multipleOf": rng.choice([2, 3, 0.5, 65539])}][
                    : rng.randint(1, 3)
                ]
            }
        if kind == "if":
            schema = {"if": self.value(depth), "type": "integer", "maximum": 9}
            return schema | ({"then": self.value(depth)} if rng.random() < 0.7 else {})
        if kind == "not":
            return {"not": rng.choice([False, self.value(depth)]), "type": "integer", "maximum": 9}
        if kind == "oneOf" and rng.random() < 0.5:
            kinds = rng.sample(["integer", "string", "null", "boolean"], 2)
            return {"oneOf": [{"type": kind} for kind in kinds]}
        return {
            kind: [self.value(depth) for _ in range(rng.randint(1, 3))],
            **({"type": "string"} if rng.random() < 0.1 else {}),
        }


@dataclass
class Findings:
    """Counts of schemas and texts, and the texts that are wrong."""

    schemas: int = 0
    accepted: int = 0
    texts: int = 0
    unfinished: int = 0  # texts cut at the longest length
    stuck: int = 0  # texts after which no byte is allowed
    numbers: int = 0  # that were tried around bounds
    wrong: list[dict[str, Any]] = field(default_factory=list)
    narrowed: Counter[str] = field(default_factory=Counter)  # valid numbers that are not allowed, by notation
    narrowed_examples: list[Any] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    control_texts: int = 0
    control_wrong: int = 0

    def __str__(self) -> str:
        lines = [f"{count:6} {reason}" for reason, count in self.refused.most_common()]
        return "\n".join(
            [
                *map(str, self.wrong[:20]),
                "refused:",
                *lines,
                f"{self.schemas} schemas, {self.accepted} accepted; {self.texts} texts ({self.unfinished} cut, "
                f"{self.stuck} stuck), {self.numbers} numbers around bounds",
                f"valid numbers not allowed: {dict(self.narrowed)}",
                f"texts that the validator refuses: {len(self.wrong)}",
                f"control: {self.control_wrong} of {self.control_texts} texts are refused by another schema",
            ]
        )


def drawn(matcher: Any, rng: random.Random, longest: int = 2000) -> str | None:
    """A text drawn among the allowed bytes, biased towards its end; None if it becomes too long or too costly."""
    matcher, text = matcher.deep_copy(), bytearray()
    while len(text) < longest:
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return None
        legal = [token for token in range(257) if mask[token >> 3] >> (token & 7) & 1]
        if not legal:
            if matcher.is_accepting():
                return text.decode()
            raise LookupError(text.decode(errors="replace"))
        closing = [token for token in legal if token == END or token in b'"]}']
        token = rng.choice(closing if closing and rng.random() < 0.3 else legal)
        if token == END:
            return text.decode()
        matcher.try_consume_tokens([token])
        text.append(token)
    return None


def is_allowed(matcher: Any, text: str) -> bool:
    """True if a constraint allows exactly this text."""
    copy, tokens = matcher.deep_copy(), list(text.encode())
    return bool(copy.try_consume_tokens(tokens) == len(tokens) and copy.is_accepting())


def validator(schema: Schema, number: Callable[[str], Any]) -> Any:
    """A validator of instances whose fractions are read as this type."""
    read = json.loads(json.dumps(without_nulls(schema)), parse_float=number)
    return jsonschema.Draft202012Validator(read, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)


def without_nulls(schema: Any) -> Any:
    """A schema without keywords that are null, which JSON Schema does not define."""
    if isinstance(schema, list):
        return [without_nulls(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: without_nulls(value) for key, value in schema.items() if (key, value) != ("required", None)}


def decimal(text: str) -> Decimal | float:
    """A number as a decimal; as a float if its exponent is too large."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return float(text)


def problem(schema: Schema, text: str) -> str | None:
    """Why a text does not satisfy its schema; None if it does."""
    try:
        for number in (decimal, float):
            if number is float and "multipleOf" in json.dumps(schema):
                continue  # remainders of floats are not exact
            with localcontext(prec=700, Emax=MAX_EMAX, Emin=MIN_EMIN):
                errors = list(validator(schema, number).iter_errors(json.loads(text, parse_float=number)))
            error = jsonschema.exceptions.best_match(errors)
            if error is not None:
                return str(error.message)
    except ValueError as error:
        return f"not JSON: {error}"
    except InvalidOperation:
        return "too large a number for multipleOf"
    return None


def numbers_around(schema: Schema) -> list[str]:
    """Numbers at the bounds of a schema, next to them and far from them, in several notations."""
    texts, exact = ["0", "-0", "0.0", "-0.0", "1", "-1", "0.5", "-0.5", "1e0", "5E-1", "1e400"], Context(prec=60)
    for keyword in ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "const"):
        bound = schema.get(keyword)
        if not isinstance(bound, int | float) or isinstance(bound, bool) or abs(bound) > 1e30 or 0 < abs(bound) < 1e-30:
            continue
        middle = Decimal(repr(bound))
        for step in ("0", "1e-25", "1e-17", "1e-12", "1e-3", "0.5", "1", "10"):
            for change in (Decimal(step), -Decimal(step)):
                number = exact.add(middle, change)
                texts += [f"{number:f}", f"{number:f}0" if "." in f"{number:f}" else f"{number:f}.0", f"{number:e}"]
    return list(dict.fromkeys(texts))


def notation(text: str) -> str:
    """The form in which a number is written."""
    if text.startswith("-") and not text.strip("-0."):
        return "negative zero"
    if "e" in text.lower():
        return "exponent"
    if re.search(r"\.\d*0$", text):
        return "trailing zeros"
    return f"{'over' if len(text.strip('-0.').replace('.', '')) > 15 else 'up to'} 15 digits"


def check(seeds: Sequence[int], texts_each: int) -> Findings:
    """Draw a schema for each seed, and texts of each."""
    findings, previous = Findings(), {"type": "null"}
    for seed in seeds:
        schema = SchemaMaker(seed).schema()
        findings.schemas += 1
        try:
            constraint = Constraint(json_schema=schema)
        except UsageError as error:
            findings.refused[summary(str(error))] += 1
            continue
        findings.accepted += 1
        matcher = load_llguidance().LLMatcher(byte_tokenizer(), constraint.text, log_level=0)
        samples = sample(findings, seed, schema, matcher, texts_each)
        numbers = try_numbers(findings, schema, matcher) if schema.get("type") in ("integer", "number") else []
        for text in samples + numbers:
            if why := problem(schema, text):
                findings.wrong.append({"seed": seed, "schema": schema, "text": text[:200], "problem": why[:200]})
        findings.control_texts += len(samples)
        findings.control_wrong += sum(problem(previous, text) is not None for text in samples)
        previous = schema
    return findings


def sample(findings: Findings, seed: int, schema: Schema, matcher: Any, count: int) -> list[str]:
    """Draw texts of a schema; the finished ones."""
    rng, texts = random.Random(seed), list[str]()
    for _ in range(count):
        try:
            text = drawn(matcher, rng)
        except LookupError as error:
            findings.stuck += 1
            findings.wrong.append({"seed": seed, "schema": schema, "text": str(error)[:200], "problem": "stuck"})
            continue
        if text is None:
            findings.unfinished += 1
        else:
            texts.append(text)
    findings.texts += len(texts)
    return texts


def try_numbers(findings: Findings, schema: Schema, matcher: Any) -> list[str]:
    """Try numbers around the bounds of a schema, and count the valid ones that are not allowed; the allowed ones."""
    around = numbers_around(schema)
    findings.numbers += len(around)
    allowed = [text for text in around if is_allowed(matcher, text)]
    for text in set(around) - set(allowed):
        is_spelled = schema["type"] == "number" or text.lstrip("-").isdigit()
        if is_spelled and problem(schema, text) is None:
            findings.narrowed[notation(text)] += 1
            if notation(text) == "up to 15 digits":
                findings.narrowed_examples.append((schema, text))
    return allowed


def summary(message: str) -> str:
    """A refusal without the values of the schema."""
    return re.sub(r"-?\d[\d.e+]*|/.*/|\{.*\}", "#", message.removeprefix("constraint: json_schema: "))[:110]


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit with 1 if a text is wrong, or if the control finds none."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schemas", type=positive, default=20_000)
    parser.add_argument("--texts", type=positive, default=4, help="number of texts of each schema")
    parser.add_argument("--seed", type=int, default=0, help="of the first schema")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    findings = check(range(options.seed, options.seed + options.schemas), options.texts)
    print(findings)
    save(options.json, vars(findings))
    return 0 if not findings.wrong and findings.control_wrong else 1


if __name__ == "__main__":
    raise SystemExit(main())
