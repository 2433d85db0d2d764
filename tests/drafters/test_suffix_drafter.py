"""Suffix drafts: they equal a search of the whole text, change no text, and nothing is kept of ended rows."""

from __future__ import annotations

import gc
import weakref
from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters import Setup, load
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.drafters.suffix import automaton as suffix_automaton
from slipstream.drafters.suffix import suffix_drafter as suffix
from slipstream.drafters.suffix.automaton import LIMIT, Match, SuffixAutomaton
from slipstream.models.toy import FABLE
from slipstream.sampling.sampler import Sampler
from tests.support.markers import subcases

CPU = torch.device("cpu")
SIZE = 50
PARAMS = SamplingParams(max_tokens=1000)
STEADY = settings(max_examples=200)
SMALL = 3  # tokens of context, so that matches exceed the limit

token_lists = st.integers(2, 4).flatmap(lambda size: st.lists(st.integers(0, size - 1), min_size=1, max_size=40))


def row_of(tokens: Sequence[int]) -> Row:
    return Row(0, list(tokens), PARAMS, seed=0)


def propose(drafter: SuffixDrafter, rows: Sequence[Row], length: int) -> list[list[int]]:
    draft = drafter.propose(rows, [length] * len(rows), Sampler(list(rows), Race(SIZE, CPU), SIZE, CPU))
    assert draft.probs is None
    return [draft.tokens[i, :n].tolist() for i, n in enumerate(draft.lengths)]


def draft_of(tokens: Sequence[int], length: int = 8, shortest: int = 1, threshold: float = 0.0) -> list[int]:
    return propose(SuffixDrafter(SIZE, shortest, threshold), [row_of(tokens)], length)[0]


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(suffix_automaton, "LIMIT", SMALL)
    monkeypatch.setattr(suffix, "LIMIT", SMALL)
    return SMALL


# the specification: a search of whole texts


def ends(texts: Sequence[Sequence[int]], context: Sequence[int]) -> list[tuple[int, int]]:
    """(index of the text, position after the occurrence) of every occurrence."""
    size = len(context)
    return [
        (number, i)
        for number, text in enumerate(texts)
        for i in range(size, len(text) + 1)
        if list(text[i - size : i]) == list(context)
    ]


def followers(texts: Sequence[Sequence[int]], context: Sequence[int], prompt: int = 0) -> tuple[Counter[int], int]:
    """How often each token follows the context, and the most frequent one.

    A tie goes to the token seen last, but within the first `prompt` tokens to the one seen first.
    """
    count, most_frequent = Counter[int](), -1
    for number, i in ends(texts, context):
        if i < len(texts[number]):
            token = texts[number][i]
            count[token] += 1
            if count[token] > count[most_frequent] or (i >= prompt and count[token] == count[most_frequent]):
                most_frequent = token
    return count, most_frequent


def longest(texts: Sequence[Sequence[int]], text: Sequence[int], limit: int, *, extend: bool) -> int:
    """Length of the longest suffix of `text`, up to the limit, that occurs in the texts; extend: with a follower."""
    for size in range(min(limit, len(text)), 0, -1):
        context = text[len(text) - size :]
        if followers(texts, context)[0] if extend else ends(texts, context):
            return size
    return 0


def specification(
    texts: Sequence[Sequence[int]],
    text: Sequence[int],
    length: int,
    threshold: float,
    *,
    prompt: int = 0,
    limit: int = LIMIT,
) -> list[int]:
    """The draft along the most frequent continuations. prompt: prompt length of the row's own text; 0: the store."""
    text, draft, chance = list(text), list[int](), 1.0
    size = longest(texts, text, limit, extend=True)
    others = 0 if prompt else 1
    while size and len(draft) < length:
        context = text[len(text) - size :]
        count, token = followers(texts, context, prompt)
        chance *= count[token] / (len(ends(texts, context)) + others)
        if chance < threshold:
            break
        others = 0
        text.append(token)
        draft.append(token)
        size = longest(texts, text, limit, extend=True)
    return draft


def learned(texts: Sequence[Sequence[int]]) -> SuffixAutomaton:
    automaton = SuffixAutomaton()
    for text in texts:
        automaton.begin()
        automaton.learn(text)
    return automaton


def check_substrings(automaton: SuffixAutomaton, texts: Sequence[Sequence[int]], limit: int) -> None:
    """Checks every substring of up to `limit` tokens: its count, and its likeliest follower with its count."""
    substrings = {tuple(text[a:b]) for text in texts for a in range(len(text)) for b in range(a + 1, len(text) + 1)}
    for context in (substring for substring in substrings if len(substring) <= limit):
        match = automaton.find(context)
        assert match.length == len(context)
        assert automaton.count(match) == len(ends(texts, context))
        count, token = followers(texts, context)
        if count:
            chance = count[token] / automaton.count(match)
            assert automaton.follow(match, automaton.count(match), 1, chance) == [token]
            assert automaton.follow(match, automaton.count(match), 1, chance + 1e-9) == []


@pytest.mark.slow
@STEADY
@given(st.lists(token_lists, min_size=1, max_size=3))
def test_counts_and_followers_of_every_substring_are_those_of_the_texts(texts: list[list[int]]) -> None:
    check_substrings(learned(texts), texts, LIMIT)


@pytest.mark.slow
def test_counts_are_right_where_texts_are_longer_than_the_contexts_counted(small_limit: int) -> None:
    @STEADY
    @given(st.lists(token_lists, min_size=1, max_size=3))
    def check(texts: list[list[int]]) -> None:
        check_substrings(learned(texts), texts, small_limit)

    check()


@pytest.mark.slow
@STEADY
@given(st.lists(token_lists, min_size=1, max_size=2), token_lists, st.integers(0, 40))
def test_the_longest_suffix_is_found_also_from_a_saved_state(texts: list[list[int]], text: list[int], cut: int) -> None:
    automaton = learned(texts)
    match = automaton.find(text)
    assert match.length == longest(texts, text, LIMIT, extend=False)
    assert automaton.find(text[cut:], automaton.find(text[:cut])) == match
    assert automaton.followed(match).length == longest(texts, text, LIMIT, extend=True)


def test_learning_a_text_again_adds_no_states() -> None:
    text = [i * i * i % 101 for i in range(100)]
    once, repeated = learned([text]), learned([text, text, text[:50]])
    assert len(repeated._link) == len(once._link)
    assert (once.count(once.find(text[:20])), repeated.count(repeated.find(text[:20]))) == (1, 3)


class CountedReads(array):  # type: ignore[type-arg]
    """The links of an automaton's states."""

    count = 0

    def __getitem__(self, index: Any) -> Any:
        self.count += 1
        return super().__getitem__(index)


def test_learning_takes_a_bounded_number_of_steps_per_token() -> None:
    for text in ([1] * 4000, [i % 17 for i in range(4000)], [i % 90 % 7 for i in range(4000)]):
        automaton = SuffixAutomaton()
        automaton._link = CountedReads("i", automaton._link)
        automaton.learn(text)
        assert automaton._link.count < 2 * LIMIT * len(text)
        chain, state = 0, automaton.end.state
        while state:
            chain, state = chain + 1, automaton._link[state]
        assert chain <= LIMIT


@pytest.mark.slow
@STEADY
@given(
    tokens=token_lists,
    length=st.integers(1, 12),
    threshold=st.sampled_from([0.0, 0.2, 0.5, 0.7]),
    cut=st.integers(0, 40),
    shortest=st.integers(1, 3),
    read=st.booleans(),
)
def test_a_draft_is_that_of_the_specification_however_the_text_arrives(
    tokens: list[int], length: int, threshold: float, cut: int, shortest: int, read: bool
) -> None:
    is_long_enough = longest([tokens], tokens, LIMIT, extend=True) >= shortest
    drafter, row = SuffixDrafter(SIZE, shortest, threshold), row_of(tokens[: cut + 1])
    if read:
        propose(drafter, [row], length)
    row.tokens.extend(tokens[cut + 1 :])
    expected = specification([tokens], tokens, length, threshold, prompt=row.prompt_length) if is_long_enough else []
    assert propose(drafter, [row], length)[0] == expected


@pytest.mark.slow
def test_a_draft_is_that_of_the_specification_beyond_the_limit(small_limit: int) -> None:
    @STEADY
    @given(token_lists, st.integers(1, 12))
    def check(tokens: list[int], length: int) -> None:
        assert draft_of(tokens, length) == specification(
            [tokens], tokens, length, 0.0, prompt=len(tokens), limit=small_limit
        )

    check()


@pytest.mark.slow
@STEADY
@given(st.lists(token_lists, min_size=1, max_size=3), token_lists, token_lists, st.integers(1, 8))
def test_the_longer_of_the_matches_in_the_row_and_in_the_store_is_followed(
    texts: list[list[int]], tokens: list[int], more: list[int], length: int
) -> None:
    drafter, row = SuffixDrafter(SIZE, threshold=0.3), row_of(tokens)
    drafter.seed(texts)
    propose(drafter, [row], length)  # the drafter keeps the row's state in the store from here on
    row.tokens += more
    text = row.tokens
    in_row, in_store = (longest(searched, text, LIMIT, extend=True) for searched in ([text], texts))
    follows_row = in_row >= in_store
    assert propose(drafter, [row], length)[0] == specification(
        [text] if follows_row else texts, text, length, 0.3, prompt=follows_row and row.prompt_length
    )
    drafter.seed([text[1:]])  # the store has grown: that state is out of date
    row.tokens.append(0)
    in_row, in_store = (longest(searched, text, LIMIT, extend=True) for searched in ([text], [*texts, text[1:-1]]))
    follows_row = in_row >= in_store
    assert propose(drafter, [row], length)[0] == specification(
        [text] if follows_row else [*texts, text[1:-1]], text, length, 0.3, prompt=follows_row and row.prompt_length
    )


# rules one by one


def test_the_longest_match_counts_however_rare_it_is() -> None:
    often = [7, 1, 20, 7, 1, 21, 7, 1, 22]
    assert draft_of([3, 4, 7, 2, *often, 7], length=1) == [1]
    assert draft_of([3, 4, 7, 2, *often, 3, 4, 7], length=1) == [2]


def test_a_draft_is_as_long_as_was_asked_for() -> None:
    text = list(range(10, 40))
    for size in (1, 2, 3):
        tokens = [*text, 5, *text[10 : 10 + size]]
        assert draft_of(tokens, length=9) == text[10 + size : 19 + size]


def test_ties_go_to_the_first_continuation_in_a_prompt_and_the_last_in_an_output() -> None:
    row, drafter = row_of([7, 1, 7, 2, 7]), SuffixDrafter(SIZE, threshold=0.0)
    assert propose(drafter, [row], 1) == [[1]]
    row.tokens += [3, 7]
    assert propose(drafter, [row], 1) == [[3]]
    row.tokens += [4, 5, 7]
    assert propose(drafter, [row], 1) == [[4]]


def test_a_draft_ends_where_it_becomes_unlikely() -> None:
    # after 1 2: 3 twice of three, then 4 as often as 5
    tokens = [1, 2, 3, 4, 9, 1, 2, 3, 5, 8, 1, 2, 6, 7, 1, 2]
    assert draft_of(tokens, 4, threshold=0.1) == [3, 4, 9, 1]
    assert draft_of(tokens, 4, threshold=0.4) == [3]  # 3 follows 2 of 4 occurrences, the end of the text included
    assert draft_of(tokens, 4, threshold=0.6) == []


def test_periodic_text_stays_periodic() -> None:
    assert draft_of([1, 2, 3, 1, 2, 3, 1, 2], length=9) == [3, 1, 2, 3, 1, 2, 3, 1, 2]


def test_matches_shorter_than_the_shortest_allowed_are_ignored() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3]
    assert draft_of(tokens, 1, shortest=2) == [4]
    assert draft_of(tokens, 1, shortest=3) == []


def test_output_is_learned_as_it_comes() -> None:
    drafter, row = SuffixDrafter(SIZE), row_of([1, 2, 3])
    assert propose(drafter, [row], 2) == [[]]
    row.tokens += [4, 5, 6, 4]
    assert propose(drafter, [row], 3) == [[5, 6, 4]]


# rows


def test_rows_of_a_batch_are_independent() -> None:
    texts = [[1, 2, 3, 1, 2], [3, 1, 3, 1], [5, 6, 7], [2, 2, 2]]
    drafter = SuffixDrafter(SIZE)
    rows = [row_of(text) for text in texts]
    for _ in range(3):
        assert propose(drafter, rows, 4) == [
            specification([row.tokens], row.tokens, 4, suffix.THRESHOLD, prompt=row.prompt_length) for row in rows
        ]
        for row in rows:
            row.tokens.append(row.tokens[1])
        rows = [*rows[1:], rows[0]]


def test_nothing_is_kept_of_a_deleted_row() -> None:
    drafter, row = SuffixDrafter(SIZE, outputs=0), row_of(list(range(40)) * 50)
    propose(drafter, [row], 2)
    text_of_row = weakref.ref(drafter._texts[row].own)
    assert len(drafter._texts) == 1 and text_of_row() is not None
    del row
    gc.collect()
    assert len(drafter._texts) == 0 and text_of_row() is None


def test_a_finished_row_is_released_while_others_still_refer_to_it() -> None:
    drafter, row = SuffixDrafter(SIZE), row_of([1, 2, 3])
    propose(drafter, [row], 2)
    row.tokens += [4, 5]
    row.finish_reason = "stop"
    assert drafter.num_stored_tokens == 5 and len(drafter._texts) == 0
    del row
    gc.collect()
    assert drafter.num_stored_tokens == 5  # it is not stored twice


# the text stays the target's


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_those_of_plain_decoding(temperature: float) -> None:
    prompts = [list(FABLE[start : start + 40].encode()) for start in range(0, 500, 60)]
    params = [SamplingParams(temperature=temperature, seed=i, max_tokens=60) for i in range(len(prompts))]
    plain = SpeculativeDecoder("toy", drafter="none").generate(prompts, params)
    for batch in (1, 3):
        decoder = SpeculativeDecoder("toy", drafter="suffix", num_draft_tokens=6, max_batch_size=batch)
        rounds = []
        for _ in range(2):  # the second time the store has the texts
            results = decoder.generate(prompts, params)
            assert [result.token_ids for result in results] == [result.token_ids for result in plain]
            rounds.append([round for result in results for round in result.rounds])
        assert any(round.rejected for round in rounds[0])
        assert sum(round.num_accepted_tokens for round in rounds[0]) > 100
        assert len(rounds[1]) < len(rounds[0])


def test_a_draft_is_never_longer_than_asked() -> None:
    drafter, row = SuffixDrafter(SIZE, threshold=0.0), row_of([1, 2] * 40)
    for length in (0, 1, 5, 64):
        assert propose(drafter, [row], length) == [([1, 2] * 32)[:length]]


# arguments


def test_arguments_are_read() -> None:
    drafter = load("suffix:3+p=35+outputs=1000", Setup(CPU, SIZE))
    assert isinstance(drafter, SuffixDrafter)
    assert (drafter.vocab_size, drafter.shortest, drafter.threshold, drafter.outputs) == (SIZE, 3, 0.35, 1000)
    assert load("suffix", Setup(CPU, SIZE)) == SuffixDrafter(SIZE)
    assert load("suffix:p=5", Setup(CPU, SIZE)) == SuffixDrafter(SIZE, threshold=0.05)
    assert load("suffix:4+outputs=0", Setup(CPU, SIZE)) == SuffixDrafter(SIZE, 4, outputs=0)


@subcases(
    "argument, message",
    [
        ("0", "shortest=0 .* allowed: 1 to 32"),
        ("33", "shortest=33"),
        ("2+p=101", r"'suffix:2\+p=101': p=101; allowed: p=0 to p=100"),
        ("outputs=63", "outputs=63 .* allowed: 0, or 64 to"),
        ("outputs=99999999", "outputs=99999999"),
        ("p=0.5", "allowed: suffix, suffix:MIN"),
        ("outputs=100+p=3", "in this order"),
        ("-1", "allowed"),
        ("2+", "allowed"),
        ("store=", "allowed"),
        ("outputs=0+store=x.npz", "outputs=0 keeps nothing; allowed: outputs above 0"),
        ("store=/no/such/folder/x.npz", "'/no/such/folder/x.npz' is not a file"),
    ],
)
def test_a_bad_argument_is_refused_in_one_line(argument: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as refusal:
        load(f"suffix:{argument}", Setup(CPU, SIZE))
    assert "\n" not in str(refusal.value)


def test_a_match_gives_the_length_of_the_longest_known_suffix() -> None:
    automaton = learned([[1, 2, 3, 1, 2]])
    assert automaton.end.length == 5
    assert automaton.followed(automaton.end).length == 2
    assert automaton.find([9]) == Match()


def test_extend_starts_from_the_newest_text_after_a_round_without_a_draft() -> None:
    setup = Setup(torch.device("cpu"), 256, acceptance_probs=True)
    row = Row(0, list(b"abcdef12 abcdef12 uvwxyf34 uvwxyf34 abcde"), SamplingParams(max_tokens=90), 0)

    def extended(drafter: SuffixDrafter) -> list[int]:
        draft: list[int] = drafter.extend(row, list(b"f"), 6, 1.0)[0]
        return draft

    used, new = (suffix.build(setup, "") for _ in range(2))
    sampler = Sampler([row], Race(256, torch.device("cpu")), 256, torch.device("cpu"))
    used.propose([row], [4], sampler)
    row.tokens += list(b" uvwxy")
    used.propose([row], [0], sampler)
    new.propose([row], [4], sampler)
    assert extended(used) == extended(new) and bytes(extended(new)).startswith(b"34 ")


def test_texts_that_a_row_may_quote_are_drafted_where_its_own_text_has_no_match_as_long() -> None:
    quoting = row_of([1, 4, 5])
    quoting.quotable = [[4, 5, 6, 7], [2, 3, 8]]
    drafter = SuffixDrafter(SIZE, threshold=0.0)
    assert propose(drafter, [quoting], 8) == [[6, 7]]
    quoting.tokens += [6, 2, 3]
    assert propose(drafter, [quoting], 8) == [[8]]
    own = row_of([2, 3, 9, 1, 2, 3])
    own.quotable = quoting.quotable
    assert propose(drafter, [own], 1) == [[9]]
    unlike = row_of([1, 4])  # a single token is no quote
    unlike.quotable = quoting.quotable
    assert propose(drafter, [unlike], 8) == [[]]
