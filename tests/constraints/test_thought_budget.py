"""A thought ends at its budget, to the token, and the answer behind it keeps to its constraint, whatever is drafted."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import numpy as np
import pytest

from slipstream import Constraint, Result, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.constraints.answer_grammar import thought_rules
from slipstream.constraints.thought_budget import ThoughtBudget
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support import tiny_models

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}a:"
MARKS = ("<think>", "</think>")
BUDGETS = (0, 1, 5, 13, 40)
CONSTRAINTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "json_schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    "regex": {"regex": "[0-9]{3}"},
}


@cache
def tokenizer(opens: bool) -> Any:
    made = tiny_models.tokenizer(["\n", *'<>_{}"/[]-0123456789'], TEMPLATE + ("<think>" if opens else ""))
    made.add_tokens(list(MARKS))
    return made


@cache
def decoder(drafter: str, opens: bool) -> SpeculativeDecoder:
    inner = tokenizer(opens)
    size = len(inner)
    draft = tiny_models.fresh("llama", 1, vocab_size=size, eos_token_id=1) if drafter == "model" else None
    return SpeculativeDecoder(
        tiny_models.fresh("llama", vocab_size=size, eos_token_id=1),
        draft,
        tokenizer=inner,
        drafter=drafter,
        acceptance="match",
        num_draft_tokens=4,
    )


def constraint(kind: str, opens: bool) -> Constraint | None:
    options, ours = CONSTRAINTS[kind], HFTokenizer(tokenizer(opens))
    thought = ours.answer_form().thought
    assert thought is not None
    preamble = thought_rules(thought, ours.special_tokens(), is_open=opens, with_text=True)
    return None if options is None else Constraint(**options, preamble=preamble)


def answers(drafter: str, opens: bool, kind: str, budget: int, seeds: range, batch: int) -> list[Result]:
    results: list[Result] = []
    chosen = constraint(kind, opens)
    for start in range(0, len(seeds), batch):
        params = [
            {"temperature": 1.0, "seed": seed, "max_tokens": 60, "thinking_token_budget": budget, "constraint": chosen}
            for seed in seeds[start : start + batch]
        ]
        prompts = [[{"role": "user", "content": f"the cat {seed % 7}"}] for seed in seeds[start : start + batch]]
        results += decoder(drafter, opens).generate(prompts, [SamplingParams(**options) for options in params])
    return results


def check(result: Result, opens: bool, kind: str, budget: int) -> None:
    """The thought has at most `budget` tokens, or is cut there; what follows keeps to the constraint."""
    ours, ids = HFTokenizer(tokenizer(opens)), result.token_ids
    places = range(1, len(ids) + 1)  # marks may be spelled by several tokens
    start = 0 if opens else next((place for place in places if ours.decode(ids[:place]) == MARKS[0]), None)
    if start is None:
        assert not result.reasoning
    else:
        stop = next((place for place in places if MARKS[1] in ours.decode(ids[start:place])), None)
        if stop is None:
            assert result.finish_reason == "length" or kind == "none"
        limit = len(ids) if stop is None else stop
        assert (
            limit <= start + budget or ids[start + budget : limit] == ours.bare("\n</think>")[: limit - start - budget]
        )
    if kind != "none" and result.finish_reason == "stop":
        content = result.content
        assert re.fullmatch("[0-9]{3}", content) if kind == "regex" else json.loads(content).keys() >= {"a"}


CASES = [("ngram", True), ("suffix", False), ("model", True)]


@pytest.mark.parametrize("kind", CONSTRAINTS)
@pytest.mark.parametrize(("drafter", "opens"), CASES)
def test_budgets_are_kept_and_drafts_change_nothing(drafter: str, opens: bool, kind: str) -> None:
    fast, plain = (answers(name, opens, kind, 5, range(3), batch) for name, batch in ((drafter, 3), ("none", 1)))
    assert [result.token_ids for result in fast] == [result.token_ids for result in plain]
    for result in fast:
        check(result, opens, kind, 5)


@pytest.mark.slow
@pytest.mark.parametrize("num_seeds", [1, pytest.param(17, marks=pytest.mark.exhaustive)])  # 17: over 2,000 texts
@pytest.mark.parametrize("opens", [True, False])
@pytest.mark.parametrize("kind", CONSTRAINTS)
def test_texts_keep_their_budgets(kind: str, opens: bool, num_seeds: int) -> None:
    for budget in BUDGETS:
        seeds = range(num_seeds)
        plain = answers("none", opens, kind, budget, seeds, 1)
        for drafter, batch in (("ngram", 1), ("suffix", 5), ("model", 4), ("model", 8)):
            fast = answers(drafter, opens, kind, budget, seeds, batch)
            assert [result.token_ids for result in fast] == [result.token_ids for result in plain]
            for result in fast:
                check(result, opens, kind, budget)


def budget_of(budget: int, opens: bool) -> ThoughtBudget:
    ours = HFTokenizer(tokenizer(opens))
    return ThoughtBudget(ours, budget, len(tokenizer(opens)), None, is_open=opens, end=ours.bare("\n</think>"))


@pytest.mark.parametrize("opens", [True, False])
def test_drafts_are_cut_where_they_cross_the_budget(opens: bool) -> None:
    ours = HFTokenizer(tokenizer(opens))
    row, start = budget_of(3, opens), [] if opens else ours.bare("<think>")
    end, text = ours.bare("\n</think>"), [*start, *ours.bare("ab")]
    for _ in range(2):  # whatever was asked before
        assert row.num_legal(text, ours.bare("cdef")) == 1
        assert row.num_legal(text, [*ours.bare("c"), *end, *ours.bare("ok")]) == 5
        assert row.num_legal(text, [*ours.bare("c"), end[0], *ours.bare("x")]) == 2
        assert row.num_legal(text, [*ours.bare("</think>"), *ours.bare("quite long")]) == 11
        assert row.forced([*text, *ours.bare("c")], 9) == end and row.forced([*text, *ours.bare("c")], 1) == end[:1]
        assert row.forced(text, 9) == [] and row.problem(text) is None
        masks = np.unpackbits(row.masks(text, [*ours.bare("c"), *end]), axis=1, bitorder="little")
        counts = masks[:, : len(tokenizer(opens))].sum(1).tolist()
        assert counts == [len(tokenizer(opens)), 1, 1, len(tokenizer(opens))]
        assert masks[1, end[0]] and masks[2, end[1]]
    if not opens:
        assert row.num_legal([], ours.bare("no thought at all")) == 17


def test_a_closing_mark_of_several_tokens_ends_a_thought_too() -> None:
    ours = HFTokenizer(tokenizer(True))
    spelled = [token for sign in "</think>" for token in ours.bare(sign)]
    assert len(spelled) == 8 and budget_of(9, True).num_legal(ours.bare("a"), [*spelled, *ours.bare("b c d e f")]) == 17


def test_a_model_that_writes_no_thoughts_refuses_a_budget() -> None:
    with pytest.raises(UsageError, match="thinking_token_budget=5, but this model writes no thoughts; allowed: None"):
        SpeculativeDecoder("toy").generate("The heron", thinking_token_budget=5)
