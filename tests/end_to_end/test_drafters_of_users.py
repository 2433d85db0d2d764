"""A faulty user's drafter or rule ends only the affected rows, with a line that names it; no text is wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slipstream import Draft, Policy, Result, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.acceptance import Distributions, Rule, load_rule
from slipstream.core.rounds import RowDraft
from slipstream.core.types import Row
from tests.support.tiny_models import VOCAB, shared

BAD = 59  # a token id: the row whose prompt begins with it gets wrong drafts
PROMPTS = [[5, 9, 11, 5, 9, 11, 5], [BAD, 9, 12, 9, 12], [7, 7, 7, 7]]
GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
PARAMS = [GREEDY, GREEDY, replace(GREEDY, logprobs=2)]


def with_probs(draft: Draft, change: Callable[[Any], Any]) -> Draft:
    """The draft with one-hot distributions, after a change."""
    return replace(draft, probs=change(torch.nn.functional.one_hot(draft.tokens, VOCAB).float()))


def with_acceptance(draft: Draft, probs: Callable[[int], list[Any]]) -> Draft:
    """The draft, with acceptance probabilities from a row's number of tokens."""
    return replace(draft, rows=tuple(RowDraft("", probs(length)) for length in draft.lengths))


def lists_of(draft: Draft, change: Callable[[int], Any]) -> Draft:
    """The draft, made again from lists of changed token ids."""
    lists = [row[:length] for row, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)]
    return Draft.from_lists([[change(token) for token in tokens] for tokens in lists], draft.tokens.device)


WRONG: dict[str, tuple[str, Callable[[Draft], Draft]]] = {
    "floats": ("returned tokens .* of torch.float32", lambda d: replace(d, tokens=d.tokens.float())),
    "flags": ("returned tokens .* of torch.bool", lambda d: replace(d, tokens=d.tokens.bool())),
    "one dimension": ("returned tokens .* allowed: .any, any.", lambda d: replace(d, tokens=d.tokens[0])),
    "another device": ("returned tokens .* on meta; allowed", lambda d: replace(d, tokens=d.tokens.to("meta"))),
    "an array": ("returned tokens of type ndarray", lambda d: replace(d, tokens=d.tokens.numpy())),
    "half a token": (r"returned lengths=\(\d.5", lambda d: replace(d, lengths=tuple(n - 0.5 for n in d.lengths))),  # type: ignore[arg-type]
    "a tensor of lengths": ("returned lengths=tensor", lambda d: replace(d, lengths=torch.tensor(d.lengths))),  # type: ignore[arg-type]
    "no record of a row": ("returned rows=", lambda d: replace(d, rows=(RowDraft(),) * (len(d.lengths) + 1))),
    "records of no kind": ("returned rows=", lambda d: replace(d, rows=(3,) * len(d.lengths))),  # type: ignore[arg-type]
    "half a forward": ("returned steps=0.5; allowed: a whole", lambda d: replace(d, steps=0.5)),  # type: ignore[arg-type]
    "no chance": ("returned acceptance_probs=.nan", lambda d: with_acceptance(d, lambda n: [torch.nan] * n)),
    "too few": ("returned acceptance_probs=.*0.5. for ", lambda d: with_acceptance(d, lambda n: [0.5] * (n - 1))),
    "chances of no kind": ("returned acceptance_probs=..a", lambda d: with_acceptance(d, lambda n: ["a"] * n)),
    "float parents": ("returned parents=.-1.0", lambda d: replace(d, parents=tuple((-1.0,) * n for n in d.lengths))),  # type: ignore[arg-type]
    "a tensor of parents": ("returned parents=", lambda d: replace(d, parents=torch.zeros(d.tokens.shape))),  # type: ignore[arg-type]
    "floats in lists": ("returned tokens .* of torch.float32", lambda d: lists_of(d, lambda token: token + 0.5)),
    "far out": (r"drafted token 10995116278\d\d; allowed: 0 to 60", lambda d: replace(d, tokens=d.tokens + 2**40)),
    "below 0": ("drafted token -", lambda d: replace(d, tokens=d.tokens - 2**40)),
    "one too many": (f"drafted token {VOCAB}; allowed: 0 to 60", lambda d: lists_of(d, lambda token: VOCAB)),
    "logits": ("returned probs with the sum -", lambda d: with_probs(d, lambda probs: probs * 100 - 50)),
    "no number": ("returned probs with the sum nan", lambda d: with_probs(d, lambda probs: probs * torch.nan)),
    "half a probability": ("returned probs with the sum 0.5", lambda d: with_probs(d, lambda probs: probs / 2)),
    "less than nothing": ("returned probs with the sum 1;", lambda d: with_probs(d, lambda p: p * 2 - 1 / VOCAB)),
    "a smaller vocabulary": ("returned probs .* allowed: .*61", lambda d: with_probs(d, lambda probs: probs[..., :-1])),
    "whole probabilities": ("returned probs .* of torch.int64", lambda d: with_probs(d, lambda probs: probs.long())),
}  # fmt: skip


@dataclass
class Changing:
    """Drafts the beginning of each text; if the bad row is in the batch, its draft is changed."""

    change: Callable[[Draft], Draft]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        tokens = [row.tokens[:length] for row, length in zip(rows, lengths, strict=True)]
        draft = Draft.from_lists(tokens, sampler.device)
        return self.change(draft) if any(map(is_bad, rows)) else draft


@dataclass
class Writing:
    """Writes to its read-only arguments once the bad row has a few tokens."""

    write: Callable[[Sequence[Row], Any], object]

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        draft = Draft.from_lists([[7] * length for length in lengths], sampler.device)
        if any(map(is_bad, rows)):
            self.write(rows, lengths)
        return draft


def is_bad(row: Row) -> bool:
    return row.tokens[0] == BAD and row.num_output_tokens >= 4


@cache
def plain_decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder(shared("llama"), drafter="none", reproducible=True)  # equal bits are asked for


@cache
def plain_results() -> list[Result]:
    return plain_decoder().generate(PROMPTS, PARAMS)


def check_neighbors(drafter: Any, message: str, acceptance: str) -> None:
    model, plain = plain_decoder(), plain_results()
    decoder = model.using(drafter, num_draft_tokens=4, acceptance=acceptance)
    results = decoder.generate(PROMPTS, PARAMS)
    assert [result.token_ids for result in results[::2]] == [result.token_ids for result in plain[::2]]
    assert results[2].logprobs == plain[2].logprobs
    bad, whole = results[1], plain[1]
    assert bad.error is not None and bad.token_ids == whole.token_ids[: len(bad.token_ids)] and len(bad.token_ids) >= 4
    with pytest.raises((UsageError, AttributeError, TypeError), match=message):
        decoder.generate(PROMPTS[1], GREEDY)


@pytest.mark.each_value
@pytest.mark.parametrize("acceptance", ["auto", "rejection"])
@pytest.mark.parametrize("kind", WRONG)
def test_an_invalid_draft_fails_its_row_alone_and_names_the_drafter(kind: str, acceptance: str) -> None:
    message, change = WRONG[kind]
    check_neighbors(Changing(change), f"^drafter Changing {message}", acceptance)


@pytest.mark.parametrize(
    ("message", "write"),
    [
        ("^drafter Writing changed row.tokens", lambda rows, lengths: [row.tokens.append(3) for row in rows]),
        ("^drafter Writing changed row.tokens", lambda rows, lengths: [row.tokens.pop() for row in rows]),
        ("tuple", lambda rows, lengths: rows.reverse()),
        ("tuple", lambda rows, lengths: rows.pop()),
        ("tuple", lambda rows, lengths: lengths.clear()),
    ],
    ids=["append", "pop", "reverse rows", "pop rows", "clear lengths"],
)
def test_a_drafter_that_modifies_its_inputs_changes_no_text(message: str, write: Any) -> None:
    check_neighbors(Writing(write), message, "auto")


def test_an_error_without_a_message_or_with_several_lines_is_one_line() -> None:
    def raised(error: Exception) -> str | None:
        def fail(draft: Draft) -> Draft:
            raise error

        decoder = SpeculativeDecoder("toy", drafter=Changing(fail), num_draft_tokens=3)
        return decoder.generate(PROMPTS, PARAMS)[1].error

    assert raised(MemoryError()) == "MemoryError" and raised(ValueError("one\n  two")) == "one two"


def test_what_stands_beyond_a_rows_length_is_no_drafted_token() -> None:
    @dataclass
    class Padding:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
            return Draft(torch.tensor([[3, -1, VOCAB]] * len(rows)), tuple(min(1, length) for length in lengths))

    decoder = SpeculativeDecoder(shared("llama"), drafter=Padding(), num_draft_tokens=4)
    assert [result.error for result in decoder.generate(PROMPTS, PARAMS)] == [None] * 3


def test_drafts_that_are_too_long_are_reported_with_one_figure() -> None:
    @dataclass
    class Long:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
            return Draft.from_lists([[3] * (length + 2) for length in lengths], sampler.device)

    with pytest.raises(UsageError, match=r"^drafter Long returned \d+ tokens for row 0"):
        SpeculativeDecoder(shared("llama"), drafter=Long()).generate(PROMPTS[0], GREEDY)


def rule(**changes: Any) -> Rule:
    """`rejection` whose `keep` or `next_token` is changed."""
    honest = load_rule("rejection").distributions
    assert honest is not None

    def distributions(p: Any, scores: Any, draft: Any) -> Any:
        computed = honest(p, scores, draft)
        keep, next_token = (changes.get(name, lambda value: value) for name in ("keep", "next_token"))
        return Distributions(keep(computed.keep), lambda accepted: next_token(computed.next_token(accepted)))

    return Rule("mine", True, changes.get("distributions", distributions))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("returned NoneType; allowed: Distributions", {"distributions": lambda *_: None}),
        (r"returned keep \[1, .*; allowed: a tensor \[1, ", {"keep": lambda keep: keep.repeat(1, 2)}),
        ("returned keep list; allowed: a tensor", {"keep": lambda keep: keep.tolist()}),
        (r"returned next_token \[1, 60\] .*; allowed: a tensor \[1, 61\]", {"next_token": lambda probs: probs[:, :-1]}),
        ("returned keep .* of torch.int64; allowed: a tensor .* of probabilities", {"keep": lambda keep: keep.long()}),
        ("returned keep with the sum nan; allowed: none below 0", {"keep": lambda keep: keep * torch.nan}),
        ("returned keep with the sum 0; allowed: none below 0", {"keep": lambda keep: keep * 0}),
        ("returned next_token with the sum -1; allowed: none below 0", {"next_token": lambda probs: -probs}),
        (
            "returned next_token with the sum nan; allowed: none below 0",
            {"next_token": lambda probs: probs * torch.nan},
        ),
    ],
)
def test_a_rule_with_an_invalid_result_is_refused_by_name(message: str, changes: dict[str, Any]) -> None:
    decoder = SpeculativeDecoder(shared("llama"), drafter="ngram", num_draft_tokens=4).using(acceptance=rule(**changes))
    with pytest.raises(UsageError, match=f"^acceptance rule mine {message}"):
        decoder.generate(PROMPTS[0], GREEDY)


def test_a_rule_cannot_accept_more_than_was_drafted() -> None:
    """A lossy rule accepts every column, including those of rows with shorter drafts."""

    def all_columns(keep: Any) -> Any:
        return torch.zeros_like(keep).index_fill(1, torch.tensor([keep.shape[1] - 1]), 1.0)

    class Uneven:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
            return Draft.from_lists([[7] * min(n, place) for place, n in enumerate(lengths)], sampler.device)

    decoder = SpeculativeDecoder(shared("llama"), drafter=Uneven(), num_draft_tokens=4)
    plain = decoder.using("none", num_draft_tokens="auto").generate(PROMPTS, PARAMS)
    results = decoder.using(acceptance=rule(keep=all_columns)).generate(PROMPTS, PARAMS)
    assert results[0].token_ids == plain[0].token_ids
    assert [max(r.num_accepted_tokens for r in result.rounds) for result in results] == [0, 1, 2]


LOGGED = [replace(GREEDY, logprobs=2)] * 3


def check_same(decoder: SpeculativeDecoder) -> None:
    """The texts and log-probabilities are those of plain decoding, and drafts were accepted."""
    results, plain = decoder.generate(PROMPTS, LOGGED), plain_decoder().generate(PROMPTS, LOGGED)
    assert all(result.error is None for result in results)
    assert any(round.num_accepted_tokens for result in results for round in result.rounds)
    assert [(r.token_ids, r.logprobs) for r in results] == [(r.token_ids, r.logprobs) for r in plain]


def test_a_rule_that_writes_to_its_arguments_changes_neither_text_nor_log_probabilities() -> None:
    honest = load_rule("rejection").distributions
    assert honest is not None

    def writes(p: Any, scores: Any, draft: Any) -> Distributions:
        computed = honest(p, scores, replace(draft, tokens=draft.tokens.clone()))
        scores.zero_()
        draft.tokens.zero_()
        return computed

    check_same(plain_decoder().using("ngram", num_draft_tokens=4, acceptance=Rule("mine", True, writes)))


@dataclass
class Watching:
    """Drafts what plain decoding writes, and does something to what it observes."""

    write: Callable[[Sequence[Row], Draft, Any, Any], object]
    plain: list[Result] = field(default_factory=lambda: plain_results())

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        texts = [prompt + result.token_ids for prompt, result in zip(PROMPTS, self.plain, strict=True)]
        place = [[text[: len(row.tokens)] == row.tokens for text in texts].index(True) for row in rows]
        first = [len(row.tokens) for row in rows]
        lists = [texts[i][at : at + n] for i, at, n in zip(place, first, lengths, strict=True)]
        return Draft.from_lists(lists, sampler.device)

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Any, verdict: Any) -> None:
        self.write(rows, draft, logits, verdict)


@pytest.mark.parametrize(
    "write",
    [
        lambda rows, draft, logits, verdict: verdict.accepted.zero_(),
        lambda rows, draft, logits, verdict: verdict.next_token.zero_(),
        lambda rows, draft, logits, verdict: draft.tokens.zero_(),
        lambda rows, draft, logits, verdict: logits.zero_(),
    ],
    ids=["accepted", "next_token", "tokens", "logits"],
)
def test_a_drafter_that_writes_to_what_it_observes_changes_nothing(write: Any) -> None:
    check_same(plain_decoder().using(Watching(write), num_draft_tokens=4))


def test_a_drafter_that_changes_a_text_that_it_observes_is_refused() -> None:
    drafter = Watching(lambda rows, draft, logits, verdict: rows[0].tokens.append(3))
    with pytest.raises(UsageError, match=r"^drafter Watching changed row.tokens; allowed: to read them"):
        plain_decoder().using(drafter, num_draft_tokens=4).generate(PROMPTS, GREEDY)


def test_a_tree_whose_tokens_come_before_those_that_they_follow_is_drafted() -> None:
    class Backwards:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
            tokens = torch.tensor([[11, 7, 5]] * len(rows))
            fits = [3 if length >= 3 else 0 for length in lengths]
            return Draft(tokens, tuple(fits), parents=tuple((2, -1, -1)[:n] for n in fits))

    model = plain_decoder()
    for length in (3, "auto"):
        results = model.using(Backwards(), num_draft_tokens=length).generate(PROMPTS, GREEDY)
        assert [result.token_ids for result in results] == [result.token_ids for result in plain_results()]
        assert any(round.draft for result in results for round in result.rounds)


def test_traits_of_another_type_are_refused() -> None:
    class Named(Changing):
        traits = 5

    with pytest.raises(UsageError, match=r"^drafter Named has traits=5; allowed: a slipstream.Traits$"):
        SpeculativeDecoder("toy", drafter=Named(lambda draft: draft))


def longer(self: Policy, rows: Sequence[Row], draft: Draft) -> Draft:
    return Draft.from_lists([[3] * 40] * len(rows), draft.tokens.device)


def negative(self: Policy, rows: Sequence[Row], draft: Draft) -> Draft:
    return replace(draft, lengths=(-1,) * len(rows))


TAMPERING: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "observe_appends": ("observe", "changed row.tokens", lambda self, rows: rows[0].tokens.append(3)),
    "lengths_append": ("lengths", "changed row.tokens", lambda self, rows, *_: rows[0].tokens.append(3)),
    "cut_pops": ("worth_verifying", "changed row.tokens", lambda self, rows, draft: rows[0].tokens.pop()),
    "below_0": ("worth_verifying", "returned Draft", negative),
    "other_tokens": ("worth_verifying", "", lambda self, rows, draft: replace(draft, tokens=draft.tokens * 0)),
    "tokens_written": ("worth_verifying", "", lambda self, rows, draft: (draft.tokens.zero_(), draft)[1]),
    "too_long": ("worth_verifying", "", longer),
}


@pytest.mark.parametrize("name", TAMPERING)
def test_a_policy_can_neither_change_texts_nor_draft(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, message, function = TAMPERING[name]

    class Tampering(Policy):
        def lengths(self, rows: Any, source: Any, draft: Any, room: Any) -> list[int]:
            return [min(4, n) for n in room]

    monkeypatch.setattr(Tampering, method, function)
    monkeypatch.setitem(sys.modules, "tampering", SimpleNamespace(**{name: Tampering}))  # type: ignore[arg-type]
    decoder = plain_decoder().using("ngram", num_draft_tokens=f"tampering:{name}")
    if message:
        with pytest.raises(UsageError, match=f"^policy tampering:{name} {message}"):
            decoder.generate(PROMPTS, GREEDY)
    else:
        check_same(decoder)
