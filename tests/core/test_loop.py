"""The loop: which rows share a batch, what a round reports, and what an interruption leaves behind."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import Draft, Drafter, SamplingParams, SpeculativeDecoder, Stats, UsageError
from slipstream.core.interfaces import Source
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.core.session import Session
from slipstream.core.types import Row, Traits
from slipstream.draft_length.policies import Fixed
from slipstream.sampling.sampler import Sampler
from tests.support.engine_parts import engine, run
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.tiny_models import VOCAB, HashBackend, Oracle, perturbed, prompts, reference, shared

pytestmark = pytest.mark.usefixtures("cache_audit")

COUNT = 16
PROMPTS = prompts([3, 9, 1, 22, 6, 30, 2, 12, 5, 17], seed=2)
GREEDY = SamplingParams(max_tokens=COUNT)
OPTIONS = [SamplingParams(max_tokens=n) for n in (4, 16, 9, 1, 13, 7, 16, 2, 11, 5)]


def tiny_decoder(drafter: str | Drafter, **options: Any) -> SpeculativeDecoder:
    draft = perturbed("llama") if drafter == "model" else None
    return SpeculativeDecoder(shared("llama"), draft, drafter=drafter, **options)


@cache
def whole_texts() -> list[list[int]]:
    return [[*prompt, *reference(shared("llama"), prompt, COUNT)] for prompt in PROMPTS]


@pytest.mark.parametrize("drafter", mostly_exhaustive(["none", "ngram", "model"], "model"))
def test_ten_prompts_in_a_batch_of_three_return_in_order_with_the_texts_they_have_alone(drafter: str) -> None:
    decoder = tiny_decoder(drafter, max_batch_size=3, num_draft_tokens=3 if drafter != "none" else 0)
    results = decoder.generate(PROMPTS, OPTIONS)
    alone = [decoder.generate(prompt, params) for prompt, params in zip(PROMPTS, OPTIONS, strict=True)]
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert [r.token_ids for r in results] == [
        text[len(prompt) :][: params.max_tokens]
        for text, prompt, params in zip(whole_texts(), PROMPTS, OPTIONS, strict=True)
    ]


def test_a_row_enters_as_soon_as_another_finishes_and_the_batch_stays_within_its_size() -> None:
    rounds = list(tiny_decoder("none", max_batch_size=3).rounds(PROMPTS, OPTIONS))
    sizes = Counter(round.step for round in rounds)
    assert all(round.num_rows == sizes[round.step] <= 3 for round in rounds)
    # the batch is full until too few rows are left, so that the forwards are as few as can be
    busy = [size for _, size in sorted(sizes.items())]
    assert busy == sorted(busy, reverse=True)
    entered = {round.row: round.step for round in reversed(rounds)}
    assert sorted(entered, key=lambda row: (entered[row], row)) == list(range(len(PROMPTS)))


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "oracle"])
def test_the_rounds_of_a_result_add_up_to_its_output(drafter: str) -> None:
    texts, num_draft_tokens = whole_texts(), 3 if drafter != "none" else 0
    decoder = tiny_decoder(
        Oracle(texts, frozenset({2, 7})) if drafter == "oracle" else drafter, num_draft_tokens=num_draft_tokens
    )
    results = decoder.generate(PROMPTS, OPTIONS)
    for i, result in enumerate(results):
        text = [*result.prompt_token_ids, *result.token_ids]
        position = len(PROMPTS[i])
        for round in result.rounds:
            assert (round.row, round.start) == (i, position)
            assert tuple(text[position : position + len(round.tokens)]) == round.tokens
            assert round.tokens[: round.num_accepted_tokens] == round.draft[: round.num_accepted_tokens]
            assert len(round.origins) == len(round.tokens)
            assert round.origins.count("accepted") == round.num_accepted_tokens
            assert round.num_accepted_tokens <= round.num_draft_tokens
            last = "recovered" if round.rejected else "bonus" if round.draft else "plain"
            assert set(round.origins[round.num_accepted_tokens :]) <= {last}
            if round.rejected:
                assert round.draft[round.num_accepted_tokens] != round.tokens[round.num_accepted_tokens]
            position += len(round.tokens)
        assert position == len(text)
        assert [round.finish_reason for round in result.rounds] == [None] * (len(result.rounds) - 1) + ["length"]
        assert result.stats == Stats.of(result.rounds)
        assert result.stats.num_output_tokens == len(result.token_ids)


def test_a_draft_is_accepted_up_to_its_first_wrong_token() -> None:
    prompt_length, texts = len(PROMPTS[0]), whole_texts()
    result = tiny_decoder(Oracle(texts, frozenset({2, 7})), num_draft_tokens=4).generate(PROMPTS[0], GREEDY)
    assert result.token_ids == texts[0][prompt_length:]
    # 0 from the prompt's forward; 1 and the recovered 2; 3-6 and the bonus 7, which was never drafted; 8-11, 12; 13-15
    blocks = [(round.start - prompt_length, round.num_accepted_tokens, round.rejected) for round in result.rounds]
    assert blocks == [(0, 0, False), (1, 1, True), (3, 4, False), (8, 4, False), (13, 2, False)]


def test_plain_decoding_makes_one_forward_per_token() -> None:
    backend = HashBackend()
    loop_engine = Engine(Session(backend), [], Fixed(0), Sampler)
    row = Row(0, [1, 2, 3], SamplingParams(max_tokens=9), seed=0)
    rounds = list(run(loop_engine, [row]))
    assert backend.forwards == [(1, 2, False)] + [(1, 1, True)] * 9
    assert [len(round.tokens) for round in rounds] == [1] * 9


@pytest.mark.parametrize("count", mostly_slow([1, 2, 5, 24], 2))
def test_a_draft_never_reaches_past_the_last_token(count: int) -> None:
    oracle = Oracle(whole_texts())
    results = tiny_decoder(oracle, num_draft_tokens=count, max_batch_size=4).generate(PROMPTS, OPTIONS)
    first = {(row, OPTIONS[row].max_tokens) for row in range(len(PROMPTS))}  # the rounds that draft nothing
    later = [(row, remaining, length) for row, remaining, length in oracle.asked if (row, remaining) not in first]
    assert later and all(length == min(count, remaining - 1) for _, remaining, length in later)
    assert [len(result.token_ids) for result in results] == [params.max_tokens for params in OPTIONS]


def test_a_draft_longer_than_the_agreeing_widths_is_refused_in_reproducible_mode_only() -> None:
    with pytest.raises(UsageError, match=r"num_draft_tokens=40; allowed: at most 24 in reproducible mode"):
        tiny_decoder(Oracle(whole_texts()), num_draft_tokens=40, reproducible=True)
    decoder = tiny_decoder(Oracle(whole_texts()), num_draft_tokens=40, reproducible=False)
    assert [r.token_ids for r in decoder.generate(PROMPTS, GREEDY)] == [
        text[len(prompt) :] for text, prompt in zip(whole_texts(), PROMPTS, strict=True)
    ]


def test_perfect_drafts_take_one_forward_per_block() -> None:
    results = tiny_decoder(Oracle(whole_texts()), num_draft_tokens=3).generate(PROMPTS, GREEDY)
    for result in results:
        block = ("accepted",) * 3 + ("bonus",)  # the first token comes from the prompt's forward
        assert [round.origins for round in result.rounds] == [("plain",), *[block] * 3, ("accepted",) * 2 + ("bonus",)]
        assert result.stats.block_efficiency == 16 / 5 and result.stats.acceptance_rate == 1 == result.stats.alpha


@pytest.mark.slow
def test_the_longest_draft_fits_beside_a_row_near_its_end_and_a_longer_one_is_refused() -> None:
    backend, length = HashBackend(), 800
    with pytest.raises(UsageError, match=f"num_draft_tokens={length}; allowed"):
        SamplingParams(num_draft_tokens=length)
    long = SamplingParams(max_tokens=length + 1, num_draft_tokens=MAX_DRAFT_TOKENS)
    loop_engine = engine(
        Session(backend), Oracle([[1] * 4000, [2] * 4000], vocab_size=7), Fixed(0), acceptance="topk:7"
    )
    rows = [Row(0, [1], long, seed=0), Row(1, [2] * (length - 2), SamplingParams(max_tokens=4), seed=0)]
    list(run(loop_engine, rows))
    assert [row.num_output_tokens for row in rows] == [length + 1, 4]


@dataclass
class WrongNumberOfRows:
    """Proposes drafts for a row more or a row less than it was asked for."""

    extra: int

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return Draft.from_lists([[3]] * (len(rows) + self.extra), sampler.device)


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_draft_for_the_wrong_number_of_rows_is_refused(extra: int) -> None:
    with pytest.raises(UsageError, match=rf"WrongNumberOfRows returned {1 + extra} rows .* allowed: 1"):
        tiny_decoder(WrongNumberOfRows(extra)).generate(PROMPTS[0], GREEDY)
    for result in tiny_decoder(WrongNumberOfRows(extra)).generate(PROMPTS[:2], GREEDY):
        assert result.finish_reason == "error" and "WrongNumberOfRows returned" in str(result.error)


@dataclass
class Stumbling:
    """Proposes what `inner` does for `rounds_left` rounds, then raises."""

    inner: Drafter
    rounds_left: int
    error: BaseException

    traits = Traits(has_own_cache=True)  # that of the draft model inside

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        draft = self.inner.propose(rows, lengths, sampler)
        self.rounds_left -= 1
        if self.rounds_left < 0:
            raise self.error
        return draft


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("num_rounds", mostly_slow([0, 1, 3, 7], 1, 7))
def test_a_decoder_is_usable_after_its_rounds_are_closed_early(drafter: str, num_rounds: int) -> None:
    decoder = tiny_decoder(drafter, max_batch_size=3, num_draft_tokens=3 if drafter != "none" else 0)
    rounds = decoder.rounds(PROMPTS, GREEDY)
    for _ in range(num_rounds):
        next(rounds)
    rounds.close()
    assert [result.token_ids for result in decoder.generate(PROMPTS[2:6], GREEDY)] == [
        text[len(prompt) :] for text, prompt in zip(whole_texts()[2:6], PROMPTS[2:6], strict=True)
    ]


def test_interleaved_streams_do_not_disturb_each_other() -> None:
    decoder = tiny_decoder("model", num_draft_tokens=3)
    texts = whole_texts()
    streams = [decoder.stream(PROMPTS[i], GREEDY) for i in (0, 3)]
    outputs: list[list[int]] = [[], []]
    for _ in range(COUNT):
        for collected, stream in zip(outputs, streams, strict=True):
            collected.extend(next((chunk.token_ids for chunk in stream), ()))
    assert outputs == [texts[0][len(PROMPTS[0]) :], texts[3][len(PROMPTS[3]) :]]


@pytest.mark.parametrize("error", [ValueError("stumbled"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", mostly_slow([0, 1, 4], 1))
def test_a_drafter_that_raises_leaves_a_usable_decoder(after: int, error: BaseException) -> None:
    decoder = tiny_decoder("model", num_draft_tokens=3, max_batch_size=2)
    stumbling = decoder.using(Stumbling(decoder.drafter, after, error), num_draft_tokens=3)
    if isinstance(error, Exception):
        results = stumbling.generate(PROMPTS[:4], GREEDY)
        assert {result.error for result in results if result.finish_reason == "error"} == {"stumbled"}
    else:
        with pytest.raises(type(error)):
            stumbling.generate(PROMPTS[:4], GREEDY)
    check_next_results(decoder)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("after", mostly_slow([0, 2, 5, 9], 2, 5))
def test_an_interrupt_inside_a_forward_leaves_a_usable_decoder(
    which: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = tiny_decoder("model", num_draft_tokens=3, max_batch_size=2)
    loaded = decoder.target if which == "target" else decoder.draft
    assert loaded is not None
    forward: Callable[..., torch.Tensor] = loaded.backend.forward
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = forward(*args, **kwargs)  # the cache is written before the interrupt arrives
        if calls > after:
            raise KeyboardInterrupt
        return logits

    monkeypatch.setattr(loaded.backend, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPTS[:4], GREEDY)
    monkeypatch.undo()
    check_next_results(decoder)


def check_next_results(decoder: SpeculativeDecoder) -> None:
    indices = (1, 0, 3)
    results = decoder.generate([PROMPTS[i] for i in indices], GREEDY)
    texts = whole_texts()
    assert [result.token_ids for result in results] == [texts[i][len(PROMPTS[i]) :] for i in indices]


def test_an_interrupted_row_continues_where_it_was() -> None:
    decoder = tiny_decoder("model", num_draft_tokens=3)
    row = decoder.reader.rows([PROMPTS[3]], GREEDY)[0]
    failing = decoder.using(Stumbling(decoder.drafter, 2, KeyboardInterrupt()), num_draft_tokens=3)
    with pytest.raises(KeyboardInterrupt):
        list(failing.run([row]))
    assert 0 < row.num_output_tokens < COUNT
    list(decoder.run([row]))
    assert row.tokens == whole_texts()[3]


def test_the_decoder_names_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(UsageError, match=f"token id {VOCAB}; allowed: 0 to {VOCAB - 1}"):
        tiny_decoder("none").generate([[1, VOCAB]], GREEDY)


@pytest.mark.parametrize("more", [1, 90])
def test_a_draft_longer_than_asked_for_is_refused(more: int) -> None:
    class TooLong:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
            return Draft.from_lists([[1] * (length + more) for length in lengths], sampler.device)

    decoder = SpeculativeDecoder("toy", drafter=TooLong(), num_draft_tokens=3)
    with pytest.raises(UsageError, match=rf"TooLong returned {3 + more} tokens for row 0; allowed: 0 to the 3 "):
        decoder.generate("The heron", SamplingParams(max_tokens=20))


@dataclass
class Offers:
    """Always proposes these tokens, each accepted with this probability; None: it does not say."""

    tokens: list[int]
    prob: float | None = None

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        probs = None if self.prob is None else [[self.prob] * len(self.tokens)]
        return Draft.from_lists([self.tokens], sampler.device, probs)


@pytest.mark.parametrize(
    ("first", "second", "drafted"),
    [
        (Offers([1], 0.5), Offers([2], 0.4), 1),
        (Offers([1], 0.4), Offers([2], 0.5), 2),
        (Offers([1], 0.5), Offers([]), 1),
        (Offers([], 0.5), Offers([2]), 2),
        (Offers([1], 0.5), Offers([2]), 2),  # a draft without probabilities counts as 0.6 of a token
        (Offers([1], 0.7), Offers([2]), 1),
    ],
)
def test_of_drafts_that_take_no_forwards_the_one_that_promises_more_is_verified(
    first: Offers, second: Offers, drafted: int
) -> None:
    class AsksAll(Fixed):
        def lengths(self, rows: Sequence[Row], source: Source, draft: Draft, room: Sequence[int]) -> list[int]:
            return list(room)

    sources = [Source(first, takes_forwards=False), Source(second, takes_forwards=False)]
    made = Engine(Session(HashBackend()), sources, AsksAll(1), Sampler)
    rounds = run(made, [Row(0, [1, 2, 3], GREEDY, seed=0)])
    assert next(round.draft for round in rounds if round.draft) == (drafted,)
