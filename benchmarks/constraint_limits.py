"""Do texts whose constraints hit their limits stay those of plain decoding, with every drafter, alone and in batches?

    python benchmarks/constraint_limits.py --target toy --texts 5000 --json FILE

Constraints are random schemas, regular expressions, choices and grammars, some of them endless, huge, deep or
repetitive. Limits are so small that many texts fail on the way. A text must have the tokens, the finish reason and the
error message that plain decoding gives to its request alone. The control lowers the limits of the drafting decoder
only, which must show as differences.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from random_schemas import Schema, random_schema
from terminal import in_one_line, positive

from slipstream import Constraint, Result, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.constraints.grammar_text import Limits

LIMITS = (
    Limits(),
    Limits(lexer_cost=6_000, step_cost=600),
    Limits(lexer_cost=12_000, step_cost=400),
    Limits(lexer_cost=40_000, step_cost=4_000),
    Limits(lexer_cost=100_000, step_cost=2_000),
    Limits(lexer_states=30),
    Limits(lexer_states=90),
    Limits(lexer_states=300, step_cost=5_000),
    Limits(row_items=8),
    Limits(row_items=40, lexer_cost=30_000, step_cost=3_000),
    Limits(step_items=60),
    Limits(step_items=400),
)
PROMPTS = ("Write JSON.", "Name three birds: heron, wren,", "A list of numbers: 1, 2, 3,", '{"a":{"a":{"a":')


def random_constraint(rng: random.Random) -> Constraint:
    """A valid constraint, perhaps long, deep, repetitive or endless."""
    kinds = (_schema, _recursive, _array, _deep, _repetition, _repetition, _words, _choice, _grammar)
    while True:
        try:
            return rng.choice(kinds)(rng)
        except UsageError:
            continue


def _schema(rng: random.Random) -> Constraint:
    return Constraint(json_schema=random_schema(rng.randrange(10_000)))


def _recursive(rng: random.Random) -> Constraint:
    """Objects nested in objects, in half of the cases without an end."""
    inner: Schema = {"$ref": "#/$defs/A"}
    value = inner if rng.random() < 0.5 else {"anyOf": [inner, {"type": "integer"}]}
    node = {"type": "object", "properties": {"a": value, "b": {"type": "string"}}, "additionalProperties": False}
    return Constraint(json_schema={"$defs": {"A": node | {"required": ["a"]}}, "type": "array", "items": inner})


def _array(rng: random.Random) -> Constraint:
    items = rng.choice([{"type": "integer"}, {"type": "string"}, {"enum": ["red", "green"]}])
    return Constraint(json_schema={"type": "array", "items": items, "minItems": rng.choice([3, 400, 100_000])})


def _deep(rng: random.Random) -> Constraint:
    depth = rng.randint(3, 60)
    defs: dict[str, Schema] = {
        f"A{i}": {"type": "array", "items": {"$ref": f"#/$defs/A{i + 1}"}, "minItems": 1} for i in range(depth)
    }
    return Constraint(json_schema={"$defs": defs | {f"A{depth}": {"type": "null"}}, "$ref": "#/$defs/A0"})


def _repetition(rng: random.Random) -> Constraint:
    letters = rng.choice([r"\w", "[a-z]", ".", "[ab]", r"[a-z\d]", "(a|b|ab)"])
    inner, outer = rng.choice([3, 20, 100]), rng.choice([2, 25, 200])
    return Constraint(
        regex=rng.choice(
            [
                f"({letters}{{1,{inner}}} ?){{1,{outer}}}",
                f"({letters}{{1,{inner}}}[0-9]{{0,3}},){{2,{outer}}}",
                f".*{letters}.{{{inner // 2}}}x.*",
            ]
        )
    )


def _words(rng: random.Random) -> Constraint:
    count = rng.choice([3, 40, 700])
    return Constraint(grammar="start: word+\nword: " + " | ".join(f'"{_word(rng)}"' for _ in range(count)))


def _choice(rng: random.Random) -> Constraint:
    return Constraint(choice=sorted({_word(rng) for _ in range(rng.choice([5, 300, 2500]))}))


def _grammar(rng: random.Random) -> Constraint:
    least = rng.randint(1, 4)
    return Constraint(
        grammar=rng.choice(
            [
                f'start: item (", " item){{1,{least * 20}}}\nitem: /[a-z]{{1,{least}}}/ | "(" start ")"',
                'start: x\nx: "a" x "b" | "c"',
                'start: x\nx: "a" x | "a" x x | "b"',
                f"start: T\nT: /(.*[a-z]{{{least}}}.*)/ & /(.*[0-9].*)/",
                'start: x\nx: "ab" x',
            ]
        )
    )


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("aeioubdgknrst ") for _ in range(rng.randint(2, 9))).strip() or "a"


@dataclass
class Comparison:
    """Counts of the texts compared with plain decoding, and those that differ."""

    texts: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    forced: int = 0
    differing: list[dict[str, Any]] = field(default_factory=list)

    def add(self, arm: str, params: SamplingParams, expected: Result, result: Result) -> None:
        """Compare a text with plain decoding's."""
        self.texts += 1
        self.finished[result.finish_reason] += 1
        self.forced += result.stats.num_forced_tokens
        if result.error is not None:
            self.reasons[str(result.error)] += 1
        plain, drafted = ((r.token_ids, r.finish_reason, str(r.error)) for r in (expected, result))
        if plain != drafted and params.constraint is not None:
            constraint = {key: str(value)[:300] for key, value in params.constraint.to_dict().items()}
            self.differing.append({"arm": arm, "constraint": constraint, "plain": plain, "found": drafted})
        if self.texts % 500 == 0:
            print(f"{self.texts} texts, {len(self.differing)} differ", flush=True)


def set_limits(decoder: SpeculativeDecoder, limits: Limits) -> None:
    """Set the limits of a decoder's constraints and drop the grammars it has saved."""
    grammars = decoder.reader.grammars
    grammars.limits = limits
    grammars._saved.clear()


def compare(options: argparse.Namespace, *, smaller: bool) -> Comparison:
    """Compare texts of all drafters until there are enough. smaller: lower only the drafters' limits, as a control."""
    plain = SpeculativeDecoder(options.target, options.draft, drafter="none")
    arms = {name: plain.using(name, acceptance="match", num_draft_tokens=4) for name in options.drafters.split(",")}
    if "token_recycling" in arms:
        arms["tree"] = plain.using("token_recycling", num_draft_tokens="3x2", acceptance="match", reproducible=False)
    comparison, number = Comparison(), 0
    while comparison.texts < (options.texts if not smaller else options.control):
        rng = random.Random(f"{options.seed} {number}")
        limits, number = rng.choice(LIMITS), number + 1
        requests = [random_request(rng) for _ in range(5)]
        prompts = [rng.choice(PROMPTS) for _ in requests]
        requests, expected = usable(plain, prompts, requests, limits)
        if smaller:
            names = ("lexer_cost", "lexer_states", "row_items", "step_items")
            limits = replace(limits, **{name: getattr(limits, name) // 3 for name in names})
        for name, decoder in arms.items():
            set_limits(decoder, limits)
            alone = rng.randrange(len(requests))
            groups = [range(len(requests)), [alone]] if number % 2 else [range(len(requests))]
            for group in groups:
                try:
                    results = decoder.generate([prompts[i] for i in group], [requests[i] for i in group], chat=False)
                except UsageError:
                    if not smaller:
                        raise
                    continue  # the control's limits may refuse a constraint before decoding
                for i, result in zip(group, results, strict=True):
                    comparison.add(f"{name} {len(group)}", requests[i], expected[i], result)
    return comparison


def random_request(rng: random.Random) -> SamplingParams:
    """The options of one row; one row in ten has no constraint, three in ten a prediction."""
    constraint = None if rng.random() < 0.1 else random_constraint(rng)
    prediction = rng.choice(['[{"a":{"a":{"a":{"a":', "heron wren heron wren"]) if rng.random() < 0.3 else None
    return SamplingParams(
        max_tokens=rng.choice([12, 40, 80]),
        temperature=rng.choice([0.0, 1.0, 1.5]),
        seed=rng.randrange(1 << 30),
        constraint=constraint,
        prediction=prediction,
    )


def usable(
    plain: SpeculativeDecoder, prompts: Sequence[str], requests: Sequence[SamplingParams], limits: Limits
) -> tuple[list[SamplingParams], list[Result]]:
    """Requests and their results by plain decoding, each alone. A constraint that is refused is removed."""
    accepted, results = list[SamplingParams](), list[Result]()
    for prompt, params in zip(prompts, requests, strict=True):
        set_limits(plain, limits)
        try:
            (result,) = plain.generate([prompt], [replace(params, prediction=None)], chat=False)
        except UsageError:
            params = replace(params, constraint=None)
            (result,) = plain.generate([prompt], [replace(params, prediction=None)], chat=False)
        accepted.append(params)
        results.append(result)
    return accepted, results


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the figures; exit with 1 if a text differs, or if no text of the control does."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="toy")
    parser.add_argument("--draft", default="toy")
    parser.add_argument("--drafters", default="ngram,suffix,token_recycling,model,hybrid")
    parser.add_argument("--texts", type=positive, default=5000, help="number of texts to compare")
    parser.add_argument("--control", type=positive, default=300, help="number of texts of the control")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    comparison, control = compare(options, smaller=False), compare(options, smaller=True)
    for difference in comparison.differing[:20]:
        print(json.dumps(difference)[:1500])
    print(f"{options.target}: {comparison.texts} texts, {dict(comparison.finished)}, {comparison.forced} tokens forced")
    for reason, count in comparison.reasons.most_common():
        print(f"{count:6} {reason}")
    print(f"differing from plain decoding: {len(comparison.differing)} of {comparison.texts}")
    print(f"control, with lower limits when drafting: {len(control.differing)} of {control.texts} differ")
    if options.json:
        figures = {
            "texts": comparison.texts,
            "finished": comparison.finished,
            "reasons": comparison.reasons,
            "differing": comparison.differing,
        }
        options.json.write_text(
            json.dumps(figures | {"control": len(control.differing)}, indent=2) + "\n", encoding="utf-8"
        )
    return 1 if comparison.differing or not control.differing else 0


if __name__ == "__main__":
    in_one_line(main)
