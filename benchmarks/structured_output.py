"""Structured output by many schemas: is it valid and the same as by plain decoding, and how fast is it?

    python benchmarks/structured_output.py --target smollm2 --schemas 60 --json FILE

For each random schema, plain constrained decoding and every drafter, with and without forced drafts, generate a text
after the same prompt. A text that ended must be valid by its schema; every text must be that of plain decoding.

    python benchmarks/structured_output.py --suite JSON-Schema-Test-Suite/tests/draft2020-12 --schemas 200

takes schemas from a folder of JSON Schema's own test suite instead, spread evenly over its files. Repeat --suite for
several versions ("drafts") of JSON Schema; each schema is read and checked by the version of its folder. Schemas that
llguidance refuses are printed with the reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import date
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import jsonschema
import referencing
import referencing.jsonschema
from random_schemas import Schema, random_schema
from terminal import in_one_line, positive, save

from slipstream import Constraint, Result, SamplingParams, SpeculativeDecoder, UsageError

DRAFTS = {  # versions of JSON Schema, by their folder in the test suite
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}
REMOTES = "http://localhost:1234"  # where the suite's schemas expect its folder `remotes`
Registry = referencing.Registry[Any]
PROMPT = "Write an example of a record as JSON. Its fields: {fields}."


@dataclass
class Arm:
    """A way to generate, and its results."""

    name: str
    decoder: SpeculativeDecoder
    results: list[Result] = field(default_factory=list)
    seconds: float = 0.0

    def run(self, prompt: str, params: SamplingParams) -> None:
        """Generate one text."""
        begun = perf_counter()
        self.results.append(self.decoder.generate(prompt, params))
        self.seconds += perf_counter() - begun

    def figures(self, schemas: Sequence[Schema], plain: Arm, remotes: Registry) -> dict[str, Any]:
        """The arm's figures. remotes: schemas that others refer to."""
        tokens = sum(len(result.token_ids) for result in self.results)
        pairs = zip(self.results, schemas, strict=True)
        ended = [(result.text, schema) for result, schema in pairs if result.finish_reason == "stop"]
        valid = [is_valid(text, schema, remotes) for text, schema in ended]
        for (text, schema), is_right in zip(ended, valid, strict=True):
            if not is_right:
                print(f"not valid: {text[:200]} by {json.dumps(schema)[:300]}")
        return {
            "arm": self.name,
            "texts": len(self.results),
            "ended": len(ended),
            "valid": sum(valid),
            "same_as_plain": sum(
                result.token_ids == expected.token_ids
                for result, expected in zip(self.results, plain.results, strict=True)
            ),
            "tokens": tokens,
            "tokens_per_forward": tokens / sum(result.stats.num_rounds for result in self.results),
            "forced_share": sum(result.stats.num_forced_tokens for result in self.results) / tokens,
            "tokens_per_second": tokens / self.seconds,
            "speed_up": plain.seconds / self.seconds,
        }


def is_date(value: object) -> bool:
    """True for anything but a string, and for a date of RFC 3339, which has a leap year 0 that Python lacks."""
    if not isinstance(value, str):
        return True
    return bool(date.fromisoformat(value.replace("0000-", "0004-", 1) if value.startswith("0000-") else value))


def is_valid(text: str, schema: Schema, remotes: Registry = referencing.jsonschema.EMPTY_REGISTRY) -> bool:
    """True if a text is JSON that fits a schema. remotes: schemas that it may refer to."""
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    formats = jsonschema.FormatChecker(())
    formats.checkers = validator.FORMAT_CHECKER.checkers | {"date": (is_date, ValueError)}
    checker = validator(schema, format_checker=formats, registry=remotes)
    try:
        return bool(checker.is_valid(json.loads(text)))
    except json.JSONDecodeError:
        return False


def unforced(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The decoder, changed to verify the drafter's drafts without forced tokens."""
    decoder._engine.grammar = None
    return decoder


def fields_of(schema: Schema) -> str:
    """The names of a schema's properties, for the prompt."""
    properties = schema.get("properties")
    return ", ".join(properties if isinstance(properties, dict) and properties else ["values"])


def suite_schemas(folder: Path, count: int) -> list[Schema]:
    """`count` schemas from a folder of JSON Schema's test suite, evenly over its files, without boolean ones."""
    groups = [group for file in sorted(folder.glob("*.json")) for group in json.loads(file.read_text(encoding="utf-8"))]
    version = {"$schema": DRAFTS[folder.name]} if folder.name in DRAFTS else {}
    schemas = [version | group["schema"] for group in groups if isinstance(group["schema"], dict)]
    if not schemas:
        raise SystemExit(f"--suite {folder}: no schemas there; allowed: a folder such as tests/draft2020-12")
    count = min(count, len(schemas))
    return [schemas[i * len(schemas) // count] for i in range(count)]


def remote_schemas(folders: Sequence[Path]) -> Registry:
    """The schemas in the suites' folders `remotes`, by the addresses under which others refer to them."""
    registry: Registry = referencing.jsonschema.EMPTY_REGISTRY
    for draft in folders:
        folder = draft.parent.parent / "remotes"
        for file in sorted({*folder.glob("*.json"), *folder.glob(f"{draft.name}/**/*.json")}):
            version = referencing.jsonschema.specification_with(DRAFTS[draft.name])
            address = f"{REMOTES}/{file.relative_to(folder).as_posix()}"
            registry = registry.with_resource(
                address, version.create_resource(json.loads(file.read_text(encoding="utf-8")))
            )
    return registry


def usable(schemas: Iterable[Schema], count: int, whitespace: str) -> tuple[list[Schema], list[Constraint], int]:
    """The first `count` schemas that llguidance accepts, their constraints, and how many it refused on the way."""
    accepted, constraints, refused = list[Schema](), list[Constraint](), 0
    for schema in schemas:
        try:
            constraints.append(Constraint(json_schema=schema, whitespace=whitespace))
            accepted.append(schema)
        except UsageError as error:
            refused += 1
            print(f"refused: {error}: {json.dumps(schema)[:200]}")
        if len(accepted) == count:
            break
    return accepted, constraints, refused


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Run all arms on all schemas. They take turns, so that a busy machine slows all of them alike."""
    folders: list[Path] = options.suite or []
    of_suites = [schema for folder in folders for schema in suite_schemas(folder, options.schemas)]
    offered: Iterable[Schema] = of_suites if folders else map(random_schema, count(options.seed))
    remotes = remote_schemas([folder for folder in folders if folder.name in DRAFTS])
    schemas, constraints, refused = usable(offered, options.schemas * max(1, len(folders)), options.whitespace)
    plain = SpeculativeDecoder(options.target, options.draft, drafter="none")
    arms = [Arm("none", plain)]
    for name in options.drafters.split(","):
        arms.append(Arm(f"{name}, not forced", unforced(plain.using(name, acceptance=options.acceptance))))
        arms.append(Arm(name, plain.using(name, acceptance=options.acceptance)))
    shared: dict[str, Any] = {"max_tokens": options.max_tokens, "temperature": options.temperature}
    for number, (schema, constraint) in enumerate(zip(schemas, constraints, strict=True)):
        prompt = PROMPT.format(fields=fields_of(schema))
        for i in range(len(arms)):
            arm = arms[(i + number) % len(arms)]
            arm.run(prompt, SamplingParams(**shared, seed=number, constraint=constraint).explicit)
    return {
        "target": options.target,
        "schemas": len(schemas),
        "refused": refused,
        **shared,
        "arms": [arm.figures(schemas, arms[0], remotes) for arm in arms],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit with 1 if a text that ended is not valid, or a text is not that of plain decoding."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--draft")
    parser.add_argument("--drafters", default="suffix,token_recycling")
    parser.add_argument("--acceptance", default="match")
    parser.add_argument("--schemas", type=positive, default=40, help="number of schemas, of each --suite")
    parser.add_argument(
        "--suite",
        type=Path,
        action="append",
        help="folder of JSON Schema's test suite, repeatable (default: random schemas)",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=positive, default=160)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--whitespace", default="compact")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    report = measure(options)
    print(f"{report['target']}: {report['schemas']} schemas, {report['refused']} refused by llguidance")
    for arm in report["arms"]:
        print(
            f"{arm['arm']:28} ended {arm['ended']}/{arm['texts']}, valid {arm['valid']}/{arm['ended']}, "
            f"same as plain {arm['same_as_plain']}/{arm['texts']}, {arm['tokens']} tokens, "
            f"{arm['tokens_per_forward']:.2f} per forward, forced {arm['forced_share']:.0%}, "
            f"{arm['tokens_per_second']:.1f} tok/s, {arm['speed_up']:.2f}x"
        )
    save(options.json, report)
    exact = options.acceptance == "match" or options.temperature == 0
    wrong = [a for a in report["arms"] if a["valid"] < a["ended"] or (exact and a["same_as_plain"] < a["texts"])]
    return 1 if wrong else 0


if __name__ == "__main__":
    in_one_line(main)
