"""The loop: who is in the batch and when, what a round reports, and what an interruption leaves behind."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch

from slipstream import Draft, Drafter, SamplingParams, SpeculativeDecoder, Stats, UsageError
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters import Setup, load
from slipstream.sampling.sampler import Sampler
from tests.support.engine_parts import engine, run
from tests.support.markers import mostly_slow
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


@pytest.mark.parametrize("drafter", mostly_slow(["none", "ngram", "model"], "model"))
def test_ten_prompts_in_three_places_come_back_in_order_each_as_alone(drafter: str) -> None:
    made = tiny_decoder(drafter, max_batch_size=3, num_draft_tokens=3 if drafter != "none" else 0)
    results = made.generate(PROMPTS, OPTIONS)
    alone = [made.generate(prompt, params) for prompt, params in zip(PROMPTS, OPTIONS, strict=True)]
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]
    assert [r.token_ids for r in results] == [
        text[len(prompt) :][: params.max_tokens]
        for text, prompt, params in zip(whole_texts(), PROMPTS, OPTIONS, strict=True)
    ]


def test_a_finished_row_makes_room_at_once_and_never_for_too_many() -> None:
    rounds = list(tiny_decoder("none", max_batch_size=3).rounds(PROMPTS, OPTIONS))
    sizes = Counter(done.step for done in rounds)
    assert all(done.num_rows == sizes[done.step] <= 3 for done in rounds)
    # every place is taken until too few rows are left: the least number of forwards that three places allow
    busy = [size for _, size in sorted(sizes.items())]
    assert busy == sorted(busy, reverse=True)
    entered = {done.row: done.step for done in reversed(rounds)}
    assert sorted(entered, key=lambda row: (entered[row], row)) == list(range(len(PROMPTS)))


@pytest.mark.parametrize("drafter", ["none", "ngram", "model", "oracle"])
def test_rounds_tell_the_whole_output(drafter: str) -> None:
    texts, count = whole_texts(), 3 if drafter != "none" else 0
    made = tiny_decoder(Oracle(texts, frozenset({2, 7})) if drafter == "oracle" else drafter, num_draft_tokens=count)
    results = made.generate(PROMPTS, OPTIONS)
    for i, result in enumerate(results):
        whole = [*result.prompt_token_ids, *result.token_ids]
        at = len(PROMPTS[i])
        for done in result.rounds:
            assert (done.row, done.start) == (i, at)
            assert tuple(whole[at : at + len(done.tokens)]) == done.tokens
            assert done.tokens[: done.num_accepted_tokens] == done.draft[: done.num_accepted_tokens]
            assert len(done.origins) == len(done.tokens)
            assert done.origins.count("accepted") == done.num_accepted_tokens
            assert done.num_accepted_tokens <= done.num_draft_tokens
            last = "recovered" if done.rejected else "bonus" if done.draft else "plain"
            assert set(done.origins[done.num_accepted_tokens :]) <= {last}
            if done.rejected:
                assert done.draft[done.num_accepted_tokens] != done.tokens[done.num_accepted_tokens]
            at += len(done.tokens)
        assert at == len(whole)
        assert [done.finish_reason for done in result.rounds] == [None] * (len(result.rounds) - 1) + ["length"]
        assert result.stats == Stats.of(result.rounds)
        assert result.stats.num_output_tokens == len(result.token_ids)


def test_a_lying_oracle_is_believed_up_to_its_lie() -> None:
    begin, texts = len(PROMPTS[0]), whole_texts()
    result = tiny_decoder(Oracle(texts, frozenset({2, 7})), num_draft_tokens=4).generate(PROMPTS[0], GREEDY)
    assert result.token_ids == texts[0][begin:]
    # 0 from the prompt's forward; 1 and the recovered 2; 3-6 and the bonus 7, which was never drafted; 8-11, 12; 13-15
    found = [(done.start - begin, done.num_accepted_tokens, done.rejected) for done in result.rounds]
    assert found == [(0, 0, False), (1, 1, True), (3, 4, False), (8, 4, False), (13, 2, False)]


def test_plain_decoding_makes_one_forward_per_token() -> None:
    backend = HashBackend()
    made = engine(Session(backend), load("none", Setup(backend.device, 7)), Fixed(0))
    row = Row(0, [1, 2, 3], SamplingParams(max_tokens=9), seed=0)
    rounds = list(run(made, [row]))
    assert backend.forwards == [(1, 2, False)] + [(1, 1, True)] * 9
    assert [len(done.tokens) for done in rounds] == [1] * 9


@pytest.mark.parametrize("count", mostly_slow([1, 2, 5, 24], 2))
def test_a_draft_never_reaches_past_the_last_token(count: int) -> None:
    oracle = Oracle(whole_texts())
    results = tiny_decoder(oracle, num_draft_tokens=count, max_batch_size=4).generate(PROMPTS, OPTIONS)
    first = {(row, OPTIONS[row].max_tokens) for row in range(len(PROMPTS))}  # rounds that draft nothing
    later = [(row, remaining, length) for row, remaining, length in oracle.asked if (row, remaining) not in first]
    assert later and all(length == min(count, remaining - 1) for _, remaining, length in later)
    assert [len(result.token_ids) for result in results] == [params.max_tokens for params in OPTIONS]


def test_a_draft_longer_than_the_agreeing_widths_is_refused_and_fits_without_them() -> None:
    with pytest.raises(UsageError, match=r"num_draft_tokens=40; allowed: at most 24 in reproducible mode"):
        tiny_decoder(Oracle(whole_texts()), num_draft_tokens=40, reproducible=True)
    free = tiny_decoder(Oracle(whole_texts()), num_draft_tokens=40, reproducible=False)
    assert [r.token_ids for r in free.generate(PROMPTS, GREEDY)] == [
        text[len(prompt) :] for text, prompt in zip(whole_texts(), PROMPTS, strict=True)
    ]


def test_a_perfect_draft_costs_one_forward_per_block() -> None:
    results = tiny_decoder(Oracle(whole_texts()), num_draft_tokens=3).generate(PROMPTS, GREEDY)
    for result in results:
        block = ("accepted",) * 3 + ("bonus",)  # the first token comes from the prompt's forward
        assert [done.origins for done in result.rounds] == [("plain",), *[block] * 3, ("accepted",) * 2 + ("bonus",)]
        assert result.stats.block_efficiency == 16 / 5 and result.stats.acceptance_rate == 1 == result.stats.alpha


def test_the_longest_draft_fits_beside_a_row_near_its_end_and_a_longer_one_is_refused() -> None:
    backend, length = HashBackend(), 800
    with pytest.raises(UsageError, match=f"num_draft_tokens={length}; allowed"):
        SamplingParams(num_draft_tokens=length)
    long = SamplingParams(max_tokens=length + 1, num_draft_tokens=MAX_DRAFT_TOKENS)
    made = engine(Session(backend), Oracle([[1] * 4000, [2] * 4000], vocab_size=7), Fixed(0), acceptance="topk:7")
    rows = [Row(0, [1], long, seed=0), Row(1, [2] * (length - 2), SamplingParams(max_tokens=4), seed=0)]
    list(run(made, rows))
    assert [row.num_output_tokens for row in rows] == [length + 1, 4]


@dataclass
class WrongRows:
    """Proposes for one row more or fewer than asked."""

    extra: int

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        return Draft.from_lists([[3]] * (len(rows) + self.extra), sampler.device)


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_draft_for_the_wrong_number_of_rows_is_refused(extra: int) -> None:
    with pytest.raises(UsageError, match=rf"WrongRows returned {2 + extra} rows .* allowed: 2"):
        tiny_decoder(WrongRows(extra)).generate(PROMPTS[:2], GREEDY)


@dataclass
class Stumbling:
    """Another drafter, until the round in which it raises."""

    inner: Drafter
    rounds_left: int
    error: BaseException

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        draft = self.inner.propose(rows, lengths, sampler)
        self.rounds_left -= 1
        if self.rounds_left < 0:
            raise self.error
        return draft


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("taken", mostly_slow([0, 1, 3, 7], 1, 7))
def test_rounds_may_be_left_in_the_middle(drafter: str, taken: int) -> None:
    made = tiny_decoder(drafter, max_batch_size=3, num_draft_tokens=3 if drafter != "none" else 0)
    rounds = made.rounds(PROMPTS, GREEDY)
    for _ in range(taken):
        next(rounds)
    rounds.close()
    assert [result.token_ids for result in made.generate(PROMPTS[2:6], GREEDY)] == [
        text[len(prompt) :] for text, prompt in zip(whole_texts()[2:6], PROMPTS[2:6], strict=True)
    ]


def test_two_interleaved_iterations_do_not_disturb_each_other() -> None:
    made = tiny_decoder("model", num_draft_tokens=3)
    texts = whole_texts()
    streams = [made.stream(PROMPTS[i], GREEDY) for i in (0, 3)]
    out: list[list[int]] = [[], []]
    for _ in range(COUNT):
        for collected, stream in zip(out, streams, strict=True):
            collected.extend(next((chunk.token_ids for chunk in stream), ()))
    assert out == [texts[0][len(PROMPTS[0]) :], texts[3][len(PROMPTS[3]) :]]


@pytest.mark.parametrize("error", [ValueError("stumbled"), KeyboardInterrupt()], ids=["error", "interrupt"])
@pytest.mark.parametrize("after", mostly_slow([0, 1, 4], 1))
def test_a_drafter_that_raises_leaves_a_usable_decoder(after: int, error: BaseException) -> None:
    made = tiny_decoder("model", num_draft_tokens=3, max_batch_size=2)
    stumbling = made.using(Stumbling(made._engine.drafter, after, error), num_draft_tokens=3)
    with pytest.raises(type(error)):
        stumbling.generate(PROMPTS[:4], GREEDY)
    _next_result_is_right(made)


@pytest.mark.parametrize("which", ["target", "draft"])
@pytest.mark.parametrize("after", mostly_slow([0, 2, 5, 9], 2, 5))
def test_an_interrupt_inside_a_forward_leaves_a_usable_decoder(
    which: str, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tiny_decoder("model", num_draft_tokens=3, max_batch_size=2)
    loaded = made.target if which == "target" else made.draft
    assert loaded is not None
    whole: Callable[..., torch.Tensor] = loaded.backend.forward
    calls = 0

    def interrupted(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        out = whole(*args, **kwargs)  # the memory is written before the interrupt arrives
        if calls > after:
            raise KeyboardInterrupt
        return out

    monkeypatch.setattr(loaded.backend, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.generate(PROMPTS[:4], GREEDY)
    monkeypatch.undo()
    _next_result_is_right(made)


def _next_result_is_right(made: SpeculativeDecoder) -> None:
    chosen = (1, 0, 3)
    results = made.generate([PROMPTS[i] for i in chosen], GREEDY)
    texts = whole_texts()
    assert [result.token_ids for result in results] == [texts[i][len(PROMPTS[i]) :] for i in chosen]


def test_an_interrupted_row_goes_on_where_it_was() -> None:
    made = tiny_decoder("model", num_draft_tokens=3)
    row = made.reader.rows([PROMPTS[3]], GREEDY)[0]
    failing = made.using(Stumbling(made._engine.drafter, 2, ValueError("stumbled")), num_draft_tokens=3)
    with pytest.raises(ValueError, match="stumbled"):
        list(failing.run([row]))
    assert 0 < row.num_output_tokens < COUNT
    list(made.run([row]))
    assert row.tokens == whole_texts()[3]


def test_the_decoder_names_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(UsageError, match=f"token id {VOCAB}; allowed: 0 to {VOCAB - 1}"):
        tiny_decoder("none").generate([[1, VOCAB]], GREEDY)


@pytest.mark.parametrize("more", [1, 90])
def test_a_draft_longer_than_asked_for_is_refused(more: int) -> None:
    class Greedy:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
            return Draft.from_lists([[1] * (length + more) for length in lengths], sampler.device)

    decoder = SpeculativeDecoder("toy", drafter=Greedy(), num_draft_tokens=3)
    with pytest.raises(UsageError, match=rf"Greedy returned {3 + more} tokens for row 0; allowed: 0 to the 3 "):
        decoder.generate("The heron", SamplingParams(max_tokens=20))
