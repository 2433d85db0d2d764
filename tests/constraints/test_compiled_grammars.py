"""Masks depend on the tokens alone, agree with what can be consumed, and have a single token where it is forced."""

from __future__ import annotations

import random

import numpy as np
import pytest

from slipstream import Constraint
from slipstream.constraints import compiled_grammars
from slipstream.constraints.compiled_grammars import GrammarState
from tests.support.markers import subcases
from tests.support.structured_outputs import EMPTY, SCHEMAS, VOCAB, allowed, grammars, state, tokenizer

CONSTRAINTS = {name: Constraint(json_schema=schema) for name, schema in SCHEMAS.items()} | {
    "spaced": Constraint(json_schema=SCHEMAS["record"], whitespace="spaced"),
    "flexible": Constraint(json_schema=SCHEMAS["nested"], whitespace="flexible"),
    "regex": Constraint(regex=r"[a-f]{2,5}(-[0-9]{1,3})?"),
    "choice": Constraint(choice=["red", "reddish", 'a "quoted"\nline', "na\u00efve \N{ROCKET}"]),
    "grammar": Constraint(grammar='start: item (";" item)*\nitem: /[a-z]{1,3}/ "=" /[0-9]/'),
}
FIRST = next(iter(CONSTRAINTS.values()))


def walk(constraint: Constraint, seed: int, longest: int = 40) -> list[int]:
    """A random legal output, complete or not."""
    rng, path, grammar = random.Random(seed), list[int](), state(constraint)
    while len(path) < longest:
        legal = np.flatnonzero(allowed(grammar.masks(path, []))[0])
        path.append(int(rng.choice(list(legal))))
        if path[-1] == tokenizer().eos_token_id:
            break
    return path


@pytest.mark.slow
@subcases("name", CONSTRAINTS)
def test_masks_do_not_depend_on_whether_the_state_is_stepped_fresh_or_drafted(name: str) -> None:
    constraint, rng = CONSTRAINTS[name], random.Random(name)
    for seed in range(3):
        path, stepwise = walk(constraint, seed), state(constraint)
        steps = [allowed(stepwise.masks(path[:at], []))[0] for at in range(len(path))]
        for at in range(len(path)):
            draft = path[at : at + 5][: rng.randint(0, 5)]
            junk = [rng.randrange(VOCAB) for _ in range(rng.randint(0, 2))]
            drafted = stepwise.masks(path[:at], draft + junk)
            fresh = state(constraint).masks(path[:at], draft)
            for count in range(min(len(draft) + 1, len(path) - at)):
                assert (allowed(drafted)[count] == steps[at + count]).all()
                assert (allowed(fresh)[count] == steps[at + count]).all()


@pytest.mark.parametrize("name", ["record", "choice", "regex"])
def test_a_mask_allows_exactly_what_can_be_consumed(name: str) -> None:
    grammar, ids = state(CONSTRAINTS[name]), range(VOCAB)
    path = walk(CONSTRAINTS[name], 1)
    for at in range(len(path)):
        mask = allowed(grammar.masks(path[:at], []))[0]
        assert not mask[VOCAB - EMPTY :].any()
        legal = [token for token in ids if grammar.num_legal(path[:at], [token])]
        assert set(np.flatnonzero(mask)) <= set(legal)
        # a token may be consumed though the mask leaves another as the only one: the forced, canonical one
        assert mask.sum() == 1 or set(np.flatnonzero(mask)) == set(legal)


@subcases("name", CONSTRAINTS)
def test_forced_tokens_are_the_only_ones_their_masks_allow(name: str) -> None:
    grammar, forced = state(CONSTRAINTS[name]), 0
    for seed in range(3):
        path = walk(CONSTRAINTS[name], seed)
        for at in range(len(path)):
            run = grammar.forced(path[:at], 64)
            masks = allowed(grammar.masks(path[:at], run))
            for count, token in enumerate(run):
                assert np.flatnonzero(masks[count]).tolist() == [token]
            if run[-1:] != [tokenizer().eos_token_id]:  # where no forced run begins, several tokens are allowed
                assert masks[len(run)].sum() != 1
            assert path[at : at + len(run)] == run[: len(path) - at]
            assert grammar.forced(path[:at], 2) == run[:2]
            forced += len(run)
    assert forced


def test_answers_of_a_state_do_not_depend_on_earlier_questions() -> None:
    rng, asked = random.Random(0), state(FIRST)
    paths = [walk(FIRST, seed) for seed in range(4)]
    for _ in range(60):
        path = rng.choice(paths)
        at = rng.randint(0, len(path) - 1)
        fresh = state(FIRST)
        question = rng.choice(("masks", "legal", "forced"))
        draft = [rng.randrange(VOCAB) for _ in range(3)] if rng.random() < 0.5 else path[at : at + 3]
        if question == "masks":
            assert (asked.masks(path[:at], draft) == fresh.masks(path[:at], draft)).all()
        elif question == "legal":
            assert asked.num_legal(path[:at], draft) == fresh.num_legal(path[:at], draft)
        else:
            assert asked.forced(path[:at], 8) == fresh.forced(path[:at], 8)


def test_further_end_tokens_are_allowed_only_where_the_text_may_end() -> None:
    end, further = tokenizer().eos_token_id, VOCAB - 1
    constraint = CONSTRAINTS["regex"]
    plain, more = state(constraint), state(constraint, further)
    path = walk(constraint, 2)
    for at in range(len(path)):
        mask = allowed(more.masks(path[:at], []))[0]
        assert mask[further] == mask[end]
        mask[further] = False
        assert (mask == allowed(plain.masks(path[:at], []))[0]).all()
    assert more.forced(path[:-1], 8) == []  # two end tokens are allowed


def test_a_text_outside_the_grammar_allows_no_token_and_says_why() -> None:
    grammar, wrong = state(CONSTRAINTS["choice"]), tokenizer().encode("zz")
    assert not grammar.masks(wrong, []).any() and grammar.forced(wrong, 8) == []
    assert grammar.problem(wrong) == f"token {wrong[0]} of the text is not one that the constraint allows"
    assert grammar.problem([]) is None and grammar.masks([], []).any()


def test_a_draft_that_exceeds_a_limit_does_not_affect_its_row(monkeypatch: pytest.MonkeyPatch) -> None:
    path = walk(FIRST, 3)
    expected, after = state(FIRST).masks(path[:2], path[2:4]), state(FIRST).masks(path[:3], [])
    broken = state(FIRST)
    monkeypatch.setattr(compiled_grammars, "_executor", _Exceeding)
    assert (allowed(broken.masks(path[:2], path[2:4])) == allowed(expected)).all()
    assert broken._matcher.is_error()
    assert (allowed(broken.masks(path[:3], [])) == allowed(after)).all()
    assert broken.problem(path[:3]) is None


class _Exceeding:
    """Leaves a matcher as one that has exceeded a limit while it was asked about a draft."""

    def unsafe_compute_mask_ptr_with_draft_token(self, question: list[tuple], *_: int) -> None:
        ((matcher, _, _),) = question
        assert not matcher.consume_token(VOCAB - 1) and matcher.is_error()


def test_only_the_latest_compiled_grammars_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled_grammars, "SAVED", 2)
    saved = grammars()._saved
    constraint = Constraint(regex="abc")
    state(constraint)
    first = saved[constraint.text]
    state(constraint)
    assert saved[constraint.text] is first
    for word in ("b", "c", "d"):
        state(Constraint(regex=word))
    assert constraint.text not in saved
    assert isinstance(state(constraint), GrammarState)
