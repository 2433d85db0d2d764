"""Only the row whose constraint reaches a limit fails, at the token and for the reason of plain decoding."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from slipstream import Constraint, Result, SamplingParams, UsageError, drafters
from slipstream.constraints import compiled_grammars
from slipstream.constraints.compiled_grammars import CompiledGrammars, GrammarState
from slipstream.constraints.grammar_text import Limits
from tests.support.markers import mostly_exhaustive
from tests.support.structured_outputs import VOCAB, allowed, decoder, grammars, tokenizer

DRAFTERS = [name for name in drafters.names() if name not in ("none", "cross_vocabulary")]
WORDS = Constraint(regex=r"(\w{1,20} ?){1,25}")
NEVER = {
    "$defs": {"A": {"type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"]}},
    "$ref": "#/$defs/A",
}
FORCED = Constraint(grammar='start: /[a-f]{2,9}/ "-" ' + '"x" "y" ' * 40)
CASES = {
    "cost": (WORDS, Limits(lexer_cost=400_000, step_cost=40_000)),
    "little cost": (WORDS, Limits(lexer_cost=120_000, step_cost=2_000)),
    "states": (WORDS, Limits(lexer_states=120)),
    "items of a row": (Constraint(grammar="start: x\nx: /[a-z]/ x | /[a-c]/ x x | /[0-9]/"), Limits(row_items=14)),
    "items of a step": (FORCED, Limits(step_items=50)),
}


def request(constraint: Constraint | None, seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=60, temperature=1.2, seed=seed, constraint=constraint)


def texts(name: str, params: Sequence[SamplingParams], limits: Limits) -> list[Result]:
    constrained = decoder(name, "match")
    constrained.reader.grammars.limits = limits
    constrained.reader.grammars._saved.clear()
    return constrained.generate(["one two three one two three "] * len(params), list(params), chat=False)


@pytest.fixture(autouse=True)
def limits_as_they_were() -> Iterator[None]:
    yield
    for name in ("none", *DRAFTERS):
        decoder(name, "match").reader.grammars.__dict__.pop("limits", None)


def outcome(result: Result) -> tuple[list[int], str, str | None]:
    return result.token_ids, result.finish_reason, None if result.error is None else str(result.error)


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("case", mostly_exhaustive(CASES, *(case for case in CASES if case != "little cost")))
@pytest.mark.parametrize("name", mostly_exhaustive(DRAFTERS, "suffix", "model"))
def test_every_drafter_reaches_a_limit_at_the_token_of_plain_decoding(name: str, case: str) -> None:
    constraint, limits = CASES[case]
    requests = [request(constraint, seed) for seed in range(4)] + [request(None, 9)]
    plain = [outcome(texts("none", [params], limits)[0]) for params in requests]
    assert [outcome(result) for result in texts(name, requests, limits)] == plain
    assert outcome(texts(name, requests[1:2], limits)[0]) == plain[1]
    errors = [error for _, _, error in plain if error is not None]
    assert errors and all(error.startswith("the constraint cannot go on: it") for error in errors)
    assert not any("<state>" in error or "lexer" in error for error in errors) and plain[-1][1] == "length"


def test_a_smaller_limit_changes_the_outcome() -> None:
    """Negative control: the comparison above notices a text that fails one token earlier."""
    constraint, limits = CASES["cost"]
    requests = [request(constraint, seed) for seed in range(4)]
    smaller = Limits(lexer_cost=limits.lexer_cost // 2, step_cost=limits.step_cost)
    assert list(map(outcome, texts("none", requests, limits))) != list(map(outcome, texts("none", requests, smaller)))


def walk(grammar: GrammarState, seed: int, longest: int) -> list[int]:
    rng, path = random.Random(seed), list[int]()
    while len(path) < longest and len(legal := np.flatnonzero(allowed(grammar.masks(path, []))[0])):
        path.append(int(rng.choice([token for token in legal if token != tokenizer().eos_token_id] or list(legal))))
    return path


def limited(limits: Limits) -> CompiledGrammars:
    return CompiledGrammars(grammars().model, VOCAB, limits)


def test_a_lexer_stopped_by_a_limit_is_never_reused_for_another_row() -> None:
    made, ends = limited(Limits(lexer_cost=300_000, step_cost=2_000)), frozenset((tokenizer().eos_token_id,))
    first, other = made.constraint(WORDS, ends), made.constraint(WORDS, ends)
    path = walk(first, 0, 200)
    assert first.problem(path) is not None and not first.masks(path, []).any()
    short = walk(limited(Limits()).constraint(WORDS, ends), 1, 3)
    for later in (other, made.constraint(WORDS, ends)):  # a row that ran beside it, and a new row
        assert later.masks(short, []).any() and later.problem(short) is None
        expected = limited(Limits()).constraint(WORDS, ends).masks(short, [])
        assert (allowed(later.masks(short, [])) == allowed(expected)).all()


@pytest.mark.slow
def test_rejected_drafts_do_not_count_towards_limits() -> None:
    made, ends = limited(Limits(lexer_cost=150_000, step_cost=2_000)), frozenset((tokenizer().eos_token_id,))
    path = walk(made.constraint(WORDS, ends), 0, 200)
    assert made.constraint(WORDS, ends).problem(path)
    drafted, failed_at = made.constraint(WORDS, ends), None
    drafts = [walk(limited(Limits()).constraint(WORDS, ends), seed, 6) for seed in range(1, 9)]
    for at in range(len(path) + 1):
        for draft in drafts:
            drafted.masks(path[:at], draft)
        if not drafted.masks(path[:at], []).any():
            failed_at = at
            break
    assert failed_at == len(path) and drafted.problem(path) == made.constraint(WORDS, ends).problem(path)


def test_a_schema_without_a_finite_text_is_refused_at_once() -> None:
    for schema, why in (
        (NEVER, "it demands a text without an end, or a very long one; allowed: a smaller or simpler one"),
        ({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}, "no text satisfies it; allowed: one that"),
    ):
        with pytest.raises(UsageError, match=rf"^constraint: {why}"):
            decoder("suffix", "match").generate("a", request(Constraint(json_schema=schema), 0), chat=False)


@pytest.mark.slow
def test_constraints_with_thousands_of_alternatives_work() -> None:
    words = [f"word {at}" for at in range(3000)]
    properties = {f"p{at}": {"type": "null"} for at in range(600)}
    optional = {"type": "object", "properties": properties, "additionalProperties": False}
    many = "start: " + " | ".join(json.dumps(word) for word in words)
    constraints = [Constraint(choice=words), Constraint(grammar=many), Constraint(json_schema={"enum": words})]
    for name in ("none", "suffix"):
        results = texts(name, [request(constraint, 3) for constraint in constraints], Limits())
        assert [result.finish_reason for result in results] == ["stop"] * 3
        assert results[0].text in words and results[1].text in words and json.loads(results[2].text) in words
        (record,) = texts(name, [SamplingParams(max_tokens=12, constraint=Constraint(json_schema=optional))], Limits())
        assert record.finish_reason in ("stop", "length"), record.error


def test_saved_grammars_are_bounded_by_their_size(monkeypatch: pytest.MonkeyPatch) -> None:
    made, ends = limited(Limits()), frozenset((tokenizer().eos_token_id,))
    for at in range(3):
        constraint = Constraint(regex=f"a{at}")
        object.__setattr__(constraint, "megabytes", compiled_grammars.SAVED_MEGABYTES // 2)
        made.constraint(constraint, ends)
    assert [json.loads(text)["grammars"][0]["lark_grammar"] for text in made._saved] == ["start: /a1/", "start: /a2/"]


def test_errors_of_llguidance_become_readable_sentences() -> None:
    from slipstream.constraints.grammar_text import reason

    raw: dict[str, Any] = {
        "Parser Error: Current row has 7599 items; max is 2000; consider\n<state>\nTokens": "it has 7599 alternatives",
        "lexer error: too many states: 9 >= 9\n<non-verbose/>": "its expressions take too much",
        "NoExtensionBias\n<state>": "no text satisfies it",
        "something\nnew\n<state>\nx": "something new",
    }
    for message, sentence in raw.items():
        assert reason(message).startswith(sentence) and "state>" not in reason(message)
