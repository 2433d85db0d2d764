"""The adaptive n-gram table: what it learns, proposes and is filled with, and that no text changes."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import Draft, Drafter, SamplingParams, SpeculativeDecoder, UsageError, Verdict
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters import Setup, load
from slipstream.drafters import ngram_table as table
from slipstream.drafters.ngram_table import NgramTableDrafter
from slipstream.models.toy import FABLE
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_exhaustive, subcases
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import VOCAB, prompts, shared

CPU = torch.device("cpu")
SIZE = 50
PARAMS = SamplingParams(max_tokens=1000)
KINDS = ["ngram_table", "ngram_table:3", "ngram_table:3-4+fill", "ngram_table:fill"]


def row_of(tokens: Sequence[int]) -> Row:
    return Row(0, list(tokens), PARAMS, seed=0)


def propose(drafter: Drafter, rows: Sequence[Row], length: int, vocab: int = SIZE) -> list[list[int]]:
    draft = drafter.propose(rows, [length] * len(rows), Sampler(list(rows), Race(vocab, CPU), vocab, CPU))
    assert draft.probs is None
    return [draft.tokens[i, :n].tolist() for i, n in enumerate(draft.lengths)]


def draft_of(tokens: Sequence[int], length: int = 4, longest: int = 4, shortest: int = 2) -> list[int]:
    return propose(NgramTableDrafter(SIZE, longest, shortest), [row_of(tokens)], length)[0]


# what it drafts


def specification(tokens: Sequence[int], length: int, longest: int, shortest: int) -> list[int]:
    """The same draft, found by searching the whole text for every token."""
    text, draft = list(tokens), list[int]()
    while len(draft) < length:
        for size in range(longest - 1, shortest - 2, -1):
            context = text[-size:]
            ends = [i for i in range(size, len(tokens)) if list(tokens[i - size : i]) == context]
            if len(text) >= size and ends:
                count, last = Counter(tokens[i] for i in ends), {tokens[i]: i for i in ends}
                text.append(max(count, key=lambda token: (count[token], last[token])))
                draft.append(text[-1])
                break
        else:
            break
    return draft


@pytest.mark.slow
@settings(max_examples=300)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=40),
    st.tuples(st.integers(2, 6), st.integers(2, 6)).map(sorted),
    st.integers(1, 8),
    st.integers(0, 40),
)
def test_a_draft_is_that_of_the_specification_however_the_text_arrives(
    tokens: list[int], sizes: list[int], length: int, cut: int
) -> None:
    shortest, longest = sizes
    expected = specification(tokens, length, longest, shortest)
    assert draft_of(tokens, length, longest, shortest) == expected
    drafter, row = NgramTableDrafter(SIZE, longest, shortest), row_of(tokens[: cut + 1])
    propose(drafter, [row], length)
    row.tokens.extend(tokens[cut + 1 :])
    assert propose(drafter, [row], length)[0] == expected


# filling


def logits_for(rankings: Sequence[Sequence[int]], vocab: int = SIZE) -> Tensor:
    """[1, len(rankings), vocab] logits whose largest are at the tokens given, best first."""
    logits = torch.zeros(1, len(rankings), vocab)
    for j, ranking in enumerate(rankings):
        logits[0, j, list(ranking)] = torch.arange(len(ranking), 0, -1).float()
    return logits


def observe_round(
    drafter: NgramTableDrafter, row: Row, draft: Sequence[int], kept: int, rankings: Sequence[Sequence[int]]
) -> None:
    """Shows the drafter a round: `kept` accepted tokens, and the target's ranking at each position."""
    verdict = Verdict(torch.tensor([kept]), torch.tensor([rankings[kept][0]]))
    drafter.observe([row], Draft.from_lists([draft], CPU), logits_for(rankings), verdict)
    row.tokens += [*draft[:kept], rankings[kept][0]]


def test_an_unknown_token_is_followed_by_what_the_target_ranked_highest_after_it() -> None:
    drafter, row = load("ngram_table:fill", Setup(CPU, SIZE)), row_of([1, 2, 3])
    assert isinstance(drafter, NgramTableDrafter)
    assert propose(drafter, [row], 3) == [[]]
    observe_round(drafter, row, [], 0, [[4, 11, 12, 13]])
    row.tokens.append(3)
    assert propose(drafter, [row], 2) == [[4, 3]]  # 4 is filled in, and the table knows that 3 follows 4
    plain = NgramTableDrafter(SIZE)
    propose(plain, [row], 1)
    assert propose(plain, [row], 2) == [[4, 3]]


def test_ranks_of_all_occurrences_of_a_token_add_up() -> None:
    drafter, row = NgramTableDrafter(SIZE, shortest=3, fill=True), row_of([1])
    propose(drafter, [row], 1)
    for ranking in ([20, 30, 31, 32], [21, 30, 33, 34], [22, 30, 35, 36]):
        observe_round(drafter, row, [], 0, [ranking])
        row.tokens.append(1)
    assert propose(drafter, [row], 1) == [[30]]  # always ranked second, and never in the text
    assert propose(NgramTableDrafter(SIZE, shortest=3), [row], 1) == [[]]


def test_rankings_after_rejected_tokens_are_not_learned() -> None:
    drafter, row = NgramTableDrafter(SIZE, shortest=3, fill=True), row_of([1])
    propose(drafter, [row], 1)
    observe_round(drafter, row, [2, 3], 1, [[2, 40, 41, 42], [9, 43, 44, 45], [8, 46, 47, 48]])
    assert row.tokens == [1, 2, 9]
    for last, expected in ((1, [2]), (2, [9]), (3, [])):
        row.tokens.append(last)
        assert propose(drafter, [row], 1) == [expected]


def test_filling_ranks_between_contexts_of_two_tokens_and_of_one() -> None:
    drafter, row = NgramTableDrafter(SIZE, fill=True), row_of([1, 2, 3, 9, 2, 4, 9, 2])
    propose(drafter, [row], 1)
    observe_round(drafter, row, [], 0, [[5, 6, 7, 8]])
    row.tokens += [1, 2]
    assert propose(drafter, [row], 1) == [[3]]
    row.tokens += [30, 2]
    assert propose(drafter, [row], 1) == [[5]]
    assert propose(NgramTableDrafter(SIZE), [row_of(row.tokens)], 1) == [[30]]


class Untouchable:
    """Fails when any attribute is read."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_without_filling_the_logits_are_not_read() -> None:
    drafter, row = NgramTableDrafter(SIZE), row_of([1, 2])
    propose(drafter, [row], 1)
    never: Any = Untouchable()
    drafter.observe([row], never, never, never)
    with pytest.raises(AssertionError, match="was asked for"):
        NgramTableDrafter(SIZE, fill=True).observe([row], never, never, never)


def test_a_row_that_never_asks_for_drafts_gets_no_table() -> None:
    drafter, row = NgramTableDrafter(SIZE, fill=True), row_of([1, 2])
    observe_round(drafter, row, [], 0, [[4, 5, 6, 7]])
    assert len(drafter._tables) == 0


@dataclass
class Recording:
    """Wraps a table and records what it observes."""

    inner: NgramTableDrafter
    observed: list[tuple[list[int], list[int], list[int], int, int]] = field(default_factory=list)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return self.inner.propose(rows, lengths, sampler)

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        choices = logits.argmax(-1)
        for i, row in enumerate(rows):
            kept, length = int(verdict.accepted[i]), draft.lengths[i]
            argmaxes = choices[i, : length + 1].tolist()
            self.observed.append((list(row.tokens), draft.tokens[i, :length].tolist(), argmaxes, kept, row.index))


def test_the_loop_shows_every_round_before_it_is_committed() -> None:
    recording = Recording(NgramTableDrafter(VOCAB))
    decoder = SpeculativeDecoder(shared("llama"), drafter=recording, num_draft_tokens=3, reproducible=False)
    results = decoder.generate(prompts([9, 22, 5]), SamplingParams(max_tokens=16))
    assert sum(len(result.rounds) for result in results) == len(recording.observed)
    for i, result in enumerate(results):
        text = [*result.prompt_token_ids, *result.token_ids]
        observations = [observation for observation in recording.observed if observation[-1] == i]
        for round, (before, draft, argmaxes, kept, _) in zip(result.rounds, observations, strict=True):
            assert before == text[: round.start] and tuple(draft) == round.draft
            # the argmax at position j follows the first j draft tokens
            assert argmaxes[: kept + 1] == [*draft[:kept], text[round.start + kept]]


# the text


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("kind", mostly_exhaustive(KINDS, "ngram_table", "ngram_table:3-4+fill"))
@pytest.mark.parametrize("size", [1, 3])
def test_text_is_that_of_plain_decoding_greedy_and_seeded(kind: str, size: int) -> None:
    texts = prompts([3, 30, 1, 22, 12], seed=2)
    params = [
        SamplingParams(max_tokens=40 - 5 * i, temperature=0.3 * (i % 3), top_p=0.9, seed=i) for i in range(len(texts))
    ]
    decoder = SpeculativeDecoder(
        shared("llama", 0, torch.float64),
        drafter=kind,
        acceptance="match",
        num_draft_tokens=4,
        max_batch_size=size,
        reproducible=False,
    )
    results = drafted_as_plain(decoder, texts, params)
    rounds = [round for result in results for round in result.rounds]
    assert any(round.num_accepted_tokens for round in rounds) and any(round.rejected for round in rounds)


def test_periodic_text_is_drafted_in_full_blocks() -> None:
    decoder = SpeculativeDecoder("toy", drafter="ngram_table", num_draft_tokens=7)
    result = decoder.generate(FABLE[:400].replace("\n", " ") * 2 + FABLE[:40], SamplingParams(max_tokens=64))
    assert result.stats.block_efficiency > 6


# limits


def test_a_table_is_freed_with_its_row() -> None:
    drafter, rows = NgramTableDrafter(SIZE), [row_of([1, 2, 1]), row_of([3, 4])]
    propose(drafter, rows, 1)
    assert len(drafter._tables) == 2
    del rows[0]
    gc.collect()
    assert len(drafter._tables) == 1


def test_only_the_later_part_of_a_long_row_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SPAN", 32)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 4, (300,), generator=generator).tolist()
    drafter, row, sizes = NgramTableDrafter(SIZE, longest=4), row_of(tokens[:1]), [0]
    for token in tokens[1:]:
        row.tokens.append(token)
        fresh = NgramTableDrafter(SIZE, longest=4)
        assert propose(drafter, [row], 4) == propose(fresh, [row_of(row.tokens)], 4)
        start = max(0, len(row.tokens) // 32 - 1) * 32
        assert propose(drafter, [row], 4)[0] == specification(row.tokens[start:], 4, 4, 2)
        sizes.append(len(drafter._tables[row]._count))
    assert max(sizes) <= 1 + 64 * 4
    assert any(after < before for before, after in pairwise(sizes))


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("", (2, 5, False)),
        ("fill", (2, 5, True)),
        ("4", (2, 4, False)),
        ("4+fill", (2, 4, True)),
        ("3-6", (3, 6, False)),
        ("3-6+fill", (3, 6, True)),
    ],
)
def test_the_argument_gives_sizes_and_filling(argument: str, expected: tuple[int, int, bool]) -> None:
    drafter = load(f"ngram_table:{argument}" if argument else "ngram_table", Setup(CPU, SIZE))
    assert isinstance(drafter, NgramTableDrafter)
    assert (drafter.shortest, drafter.longest, drafter.fill) == expected


OUT_OF_RANGE = ["1", "0", "1-4", "5-4", "17", "2-99999999999"]
MALFORMED = ["x", "+fill", "4+", "4-", "-4", "4+filled", "fill+4", "4 +fill", "3-4-5"]


@subcases("argument", MALFORMED + OUT_OF_RANGE)
def test_an_invalid_argument_is_refused_with_what_is_allowed(argument: str) -> None:
    sizes = r"table sizes shortest=\d+, longest=\d+; allowed: 2 <= shortest"
    message = (
        sizes if argument in OUT_OF_RANGE else "drafter='ngram_table:.*'; allowed: ngram_table, ngram_table:LONGEST"
    )
    with pytest.raises(UsageError, match=f"^{message}"):
        load(f"ngram_table:{argument}", Setup(CPU, SIZE))


def test_a_table_takes_at_most_150_bytes_per_size_and_token() -> None:
    count = 500
    tokens = random.Random(1).sample(range(count), count)  # no n-gram repeats
    tracemalloc.start()
    try:
        grams = table._Table(range(table.SHORTEST, table.LONGEST + 1), count, 0)
        grams.learn(tokens)
        snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, table.__file__)])
    finally:
        tracemalloc.stop()
    size = sum(statistic.size for statistic in snapshot.statistics("filename"))
    assert 0 < size <= 150 * count * table.LONGEST
