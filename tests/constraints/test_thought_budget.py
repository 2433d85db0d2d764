"""A thought ends at its budget, to the token, and the answer behind it keeps to its constraint, whatever is drafted.

The model writes the marks of each form again and again, whole, spelled or cut off.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import Constraint, Result, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.constraints.answer_grammar import thought_rules
from slipstream.constraints.thought_budget import ThoughtBudget
from slipstream.models.loaded import Loaded
from slipstream.models.toy import ToyBackend
from slipstream.tokenization.answer_forms import THOUGHTS, ThoughtForm
from slipstream.tokenization.answer_parser import AnswerParser
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from tests.support import tiny_models
from tests.support.vocabularies import decoder_of

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}.{% endfor %}a:"
FORMS = {form.closing: form for form in THOUGHTS}
TAGS = "</think>"
BUDGETS = (0, 1, 5, 13, 40)
CONSTRAINTS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "json_schema": {"json_schema": {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}},
    "regex": {"regex": "[0-9]{3}"},
}
DRAFTS: dict[str, dict[str, Any]] = {
    "none": {"drafter": "none"},
    "ngram": {"drafter": "ngram", "num_draft_tokens": 4},
    "suffix": {"drafter": "suffix", "num_draft_tokens": 4},
    "model": {"drafter": "model", "num_draft_tokens": 4},
    "tree": {"drafter": "model", "num_draft_tokens": "3x2"},
    "hybrid": {"drafter": "hybrid", "num_draft_tokens": 4},
}


class ThinkingBackend(ToyBackend):
    """Chooses by the last tokens, and likes to begin the marks of a form and to go on with them.

    looks_back: tokens by which it tells other tokens apart, fewer in a draft model.
    """

    def __init__(self, tokenizer: HFTokenizer, form: ThoughtForm, looks_back: int) -> None:
        texts = [form.opening, form.closing, form.turn + form.text, form.turn + form.opening, form.text, "ab cd"]
        phrases = [tokenizer.bare(text) for text in texts if text]
        phrases += [[token for sign in form.closing for token in tokenizer.bare(sign)], [tokenizer.inner.eos_token_id]]
        super().__init__(max(map(len, phrases)))
        self.vocab_size, self._phrases, self._looks_back = len(tokenizer.inner), phrases, looks_back

    @cache  # noqa: B019 - as long as the decoders
    def _noise(self, context: tuple[int, ...]) -> Tensor:
        return 1.5 * torch.randn(self.vocab_size, generator=torch.Generator().manual_seed(hash(context) & 0xFFFF))

    def _distribution(self, context: tuple[int, ...]) -> Tensor:
        scores = self._noise(context[len(context) - self._looks_back :]).clone()
        for phrase in self._phrases:
            for size in range(min(len(phrase), len(context) + 1)):
                if list(context[len(context) - size :]) == phrase[:size]:
                    scores[phrase[size]] += 6 if size else 2
        return scores


@cache
def tokenizer(closing: str, opens: bool) -> HFTokenizer:
    form = FORMS[closing]
    signs = "\n" + "".join(sorted({*'<>_{}"/[]-0123456789', *form.marks} - {*tiny_models.LETTERS, "\n"}))
    opening = form.opening if opens else ""
    inner = tiny_models.tokenizer([*signs], f"{{# {form.template_mark} {form.closing} #}}{TEMPLATE}{opening}")
    marks = re.findall(
        r"<\W?\w[^<>]*>|\[/?THINK\]|\u25c1\W?think\u25b7", "".join((form.opening, form.closing, form.turn, form.text))
    )
    inner.add_special_tokens({"additional_special_tokens": marks}) if form.anywhere else inner.add_tokens(marks)
    return HFTokenizer(inner)


@cache
def decoder(drafts: str, closing: str, opens: bool, acceptance: str = "match") -> SpeculativeDecoder:
    ours = tokenizer(closing, opens)
    end = ours.inner.eos_token_id
    target, draft = (
        Loaded(ThinkingBackend(ours, FORMS[closing], looks_back), name, (end,), ours, fingerprint=name)
        for name, looks_back in (("thinking", 2), ("draft", 1))
    )
    needs_draft = DRAFTS[drafts]["drafter"] in ("model", "hybrid")
    return decoder_of(target, draft if needs_draft else None, acceptance=acceptance, **DRAFTS[drafts])


def constraint(kind: str, closing: str, opens: bool) -> Constraint | None:
    options, ours = CONSTRAINTS[kind], tokenizer(closing, opens)
    preamble = thought_rules(FORMS[closing], ours.special_tokens(), is_open=opens, with_text=True)
    return None if options is None else Constraint(**options, preamble=preamble)


def answers(
    decoder: SpeculativeDecoder, chosen: Constraint | None, budget: int, seeds: range, batch: int
) -> list[Result]:
    results: list[Result] = []
    options = SamplingParams(temperature=1.0, max_tokens=60, thinking_token_budget=budget, constraint=chosen)
    for start in range(0, len(seeds), batch):
        rows = seeds[start : start + batch]
        prompts = [[{"role": "user", "content": f"the cat {seed % 7}"}] for seed in rows]
        results += decoder.generate(prompts, [replace(options, seed=seed) for seed in rows])
    return results


def check(result: Result, closing: str, opens: bool, kind: str, budget: int) -> None:
    """The thoughts have at most `budget` tokens, or are cut there; what follows keeps to the constraint."""
    ours, ids, room = tokenizer(closing, opens), result.token_ids, budget
    parser, end = AnswerParser(ours.answer_form(), in_thought=opens), ours.bare(FORMS[closing].forced_end)
    text, start = "", 0 if opens else None
    for place in range(1, len(ids) + 1):
        whole = ours.decode_marked(ids[:place])
        parser.feed(whole.removeprefix(text))
        text = whole
        if start is not None and (not parser.in_thought or place == len(ids)):
            over = ids[start + room : place]
            assert over == end[: len(over)], (text, room)
            room = max(0, room - (place - start))
        start = (place if start is None else start) if parser.in_thought else None
    if kind != "none" and result.finish_reason == "stop":
        content = result.content
        assert re.fullmatch("[0-9]{3}", content) if kind == "regex" else json.loads(content).keys() >= {"a"}


@cache
def plain_answers(closing: str, opens: bool, kind: str, budget: int, num_seeds: int) -> list[list[int]]:
    """The tokens of checked answers without drafts, one by one."""
    chosen = constraint(kind, closing, opens)
    plain = answers(decoder("none", closing, opens), chosen, budget, range(num_seeds), 1)
    for result in plain:
        check(result, closing, opens, kind, budget)
    return [result.token_ids for result in plain]


OPTIONS = [*product((True, False), CONSTRAINTS, BUDGETS)]
FAST = [name for name in DRAFTS if name != "none"]
CASES = [pytest.param(closing, FAST[i % 5], OPTIONS[i::13], 3) for i, closing in enumerate(FORMS)]
CASES += [  # each checks 300 texts, alone and seven at a time
    pytest.param(closing, drafts, OPTIONS, 10, marks=pytest.mark.exhaustive, id=f"{closing} {drafts} all")
    for closing, drafts in product(FORMS, FAST)
]


@pytest.mark.slow
@pytest.mark.parametrize(("closing", "drafts", "options", "num_seeds"), CASES)
def test_texts_keep_their_budgets_and_drafts_change_nothing(
    closing: str, drafts: str, options: list[tuple[bool, str, int]], num_seeds: int
) -> None:
    for opens, kind, budget in options:
        for batch in (1, 7) if num_seeds > 3 else (3,):
            chosen, seeds = constraint(kind, closing, opens), range(num_seeds)
            fast = answers(decoder(drafts, closing, opens), chosen, budget, seeds, batch)
            assert [result.token_ids for result in fast] == plain_answers(closing, opens, kind, budget, num_seeds)


@pytest.mark.parametrize("acceptance", ["rejection", "block"])
def test_every_acceptance_rule_keeps_budgets(acceptance: str) -> None:
    for kind, budget in (("none", 5), ("regex", 1)):
        fast = decoder("model", TAGS, True, acceptance)
        for result in answers(fast, constraint(kind, TAGS, True), budget, range(4), 4):
            check(result, TAGS, True, kind, budget)


@pytest.mark.slow
@pytest.mark.parametrize("drafts", ["none", "ngram"])
def test_a_character_that_a_budget_would_cut_is_completed_if_a_grammar_follows(drafts: str) -> None:
    inner = tiny_models.byte_tokenizer(f"{TEMPLATE}<think>")
    inner.add_tokens(["<think>", TAGS])
    ours = HFTokenizer(inner)
    backend = ThinkingBackend(ours, FORMS[TAGS], 2)
    target = Loaded(backend, "bytes", (inner.eos_token_id,), ours, fingerprint="bytes")
    preamble = thought_rules(FORMS[TAGS], ours.special_tokens(), is_open=True, with_text=True)
    chosen = Constraint(regex="[0-9]{3}", preamble=preamble)
    lengths = set()
    for result in answers(decoder_of(target, None, acceptance="match", **DRAFTS[drafts]), chosen, 5, range(12), 4):
        assert result.finish_reason == "stop" and re.fullmatch("[0-9]{3}", result.content)
        (rest,) = {*ours.bare(f"\n{TAGS}")[1:]}
        lengths.add(result.token_ids.index(rest) - 1)
    assert {5, 6} <= lengths <= {0, 1, 2, 3, 4, 5, 6, 7, 8}, lengths


def budget_of(budget: int, opens: bool) -> ThoughtBudget:
    ours = tokenizer(TAGS, opens)
    return ThoughtBudget(ours, budget, len(ours.inner), None, is_open=opens, end=ours.bare("\n</think>"))


@pytest.mark.parametrize("opens", [True, False])
def test_drafts_are_cut_where_they_cross_the_budget(opens: bool) -> None:
    ours = tokenizer(TAGS, opens)
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
        counts = masks[:, : len(ours.inner)].sum(1).tolist()
        assert counts == [len(ours.inner), 1, 1, len(ours.inner)]
        assert masks[1, end[0]] and masks[2, end[1]]
    if not opens:
        assert row.num_legal([], ours.bare("no thought at all")) == 17


def test_a_closing_mark_of_several_tokens_ends_a_thought_too() -> None:
    ours = tokenizer(TAGS, True)
    spelled = [token for sign in "</think>" for token in ours.bare(sign)]
    assert len(spelled) == 8 and budget_of(9, True).num_legal(ours.bare("a"), [*spelled, *ours.bare("b c d e f")]) == 17


def test_a_model_that_writes_no_thoughts_refuses_a_budget() -> None:
    with pytest.raises(UsageError, match="thinking_token_budget=5, but this model writes no thoughts; allowed: None"):
        SpeculativeDecoder("toy").generate("The heron", thinking_token_budget=5)
