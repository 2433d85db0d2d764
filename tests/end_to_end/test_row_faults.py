"""An exception ends the row that it belongs to, wherever it is raised; its neighbours keep their texts."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import pytest

from slipstream import Result, SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.wiring import guarded_engine
from tests.support import tiny_models
from tests.support.architectures import tiny_model
from tests.support.markers import mostly_slow

BAD = 59  # a token id: the row whose prompt begins with it fails
AT = 6  # tokens of output after which the bad row fails
PROMPTS = [[5, 9, 11, 5, 9, 11, 5], [BAD, 9, 12, 9, 12], [7, 7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
MIXED = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.7, seed=8, ignore_eos=True, logprobs=2),
]


class Broken(Exception):
    """The exception that these tests raise."""


class Panic(BaseException):
    """A panic of Rust code, which is not an `Exception`."""


def is_bad(row: Row) -> bool:
    return row.tokens[0] == BAD and row.num_output_tokens >= AT


@contextmanager
def patched(owner: Any, name: str, wrapper: Callable[..., Any]) -> Iterator[None]:
    honest = getattr(owner, name)
    object.__setattr__(
        owner, name, lambda *arguments, **more: wrapper(honest, *arguments, **more)
    )  # works for frozen objects too
    try:
        yield
    finally:
        object.__setattr__(owner, name, honest)


def in_drafter(decoder: SpeculativeDecoder) -> Any:
    def propose(honest: Any, rows: Sequence[Row], *arguments: Any) -> Any:
        if any(map(is_bad, rows)):
            raise Broken("drafter")
        return honest(rows, *arguments)

    return patched(decoder.drafter, "propose", propose)


def in_forward(decoder: SpeculativeDecoder) -> Any:
    """The forward fails after it has written to its caches."""

    def score(honest: Any, rows: Sequence[Row], *arguments: Any, **more: Any) -> Any:
        out = honest(rows, *arguments, **more)
        if any(map(is_bad, rows)):
            raise Broken("forward")
        return out

    session = decoder._target_session
    return both(patched(session, "score", score), patched(session, "verify_greedy", score))


def in_policy(decoder: SpeculativeDecoder) -> Any:
    """Code that learns from a round fails after the round was committed."""

    def observe(honest: Any, rows: Sequence[Row]) -> None:
        honest(rows)
        if any(map(is_bad, rows)):
            raise Broken("policy")

    return patched(decoder._engine.policy, "observe", observe)


def in_rust(decoder: SpeculativeDecoder) -> Any:
    def propose(honest: Any, rows: Sequence[Row], *arguments: Any) -> Any:
        if any(map(is_bad, rows)):
            raise Panic("drafter")
        return honest(rows, *arguments)

    return patched(decoder.drafter, "propose", propose)


def in_stop_check(decoder: SpeculativeDecoder) -> Any:
    """The check of a stop condition fails; it runs while tokens are committed, so it cannot be repeated."""

    def check(row: Row, tokens: Sequence[int], first: int) -> None:
        if is_bad(row):
            raise Broken("stop")

    def rows(honest: Any, *arguments: Any, **more: Any) -> Any:
        groups = honest(*arguments, **more)
        for row in (row for group in groups for row in group if row.tokens[0] == BAD):
            row.find_stop = partial(check, row)
        return groups

    return patched(decoder.reader, "sample_rows", rows)


def in_options(decoder: SpeculativeDecoder) -> Any:
    """The options of a batch cannot be prepared."""

    def sampler(honest: Any, rows: Sequence[Row], *arguments: Any) -> Any:
        if any(row.tokens[0] == BAD for row in rows):
            raise Broken("options")
        return honest(rows, *arguments)

    return patched(decoder._engine, "make_sampler", sampler)


def in_prompt(decoder: SpeculativeDecoder) -> Any:
    """A prompt cannot be read."""

    def assign_slot(honest: Any, slot: int, row: Row) -> None:
        honest(slot, row)
        if row.tokens[0] == BAD:
            raise Broken("prompt")

    return patched(decoder._target_session.table, "assign_slot", assign_slot)


def raising(error: BaseException) -> Callable[..., Any]:
    def work(*_: Any) -> Any:
        raise error

    return work


@contextmanager
def both(first: Any, second: Any) -> Iterator[None]:
    with first, second:
        yield


LATER = {fault.__name__: fault for fault in (in_drafter, in_forward, in_policy, in_rust, in_stop_check)}
AT_ONCE = {fault.__name__: fault for fault in (in_options, in_prompt)}


def model_pair(**settings: Any) -> SpeculativeDecoder:
    options = {"acceptance": "match", "num_draft_tokens": 3} | settings
    return SpeculativeDecoder(tiny_models.fresh("llama"), tiny_models.perturbed("llama"), drafter="model", **options)


def recurrent(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("lfm2"), drafter="ngram", num_draft_tokens=3, **settings)


def toy(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", **{"drafter": "ngram", "num_draft_tokens": 3, "acceptance": "match"} | settings)


def ordered(place: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts with the bad one at a place of the batch, and the options of each."""
    order = [n for n in range(len(PROMPTS)) if n != 1]
    order.insert(place, 1)
    return [PROMPTS[n] for n in order], [MIXED[n] for n in order]


@cache
def without_fault(made: Any, place: int) -> list[Result]:
    """The results of the prompts in this order where nothing fails."""
    results: list[Result] = made().generate(*ordered(place))
    return results


@pytest.mark.pairwise
@pytest.mark.parametrize("place", range(len(PROMPTS)))
@pytest.mark.parametrize("fault", (LATER | AT_ONCE).values(), ids=LATER | AT_ONCE)
@pytest.mark.parametrize("made", mostly_slow([toy, model_pair, recurrent], toy))
def test_a_fault_fails_its_row_alone(made: Any, fault: Any, place: int) -> None:
    prompts, params = ordered(place)
    wanted = without_fault(made, place)
    decoder = made()
    with fault(decoder):
        results = decoder.generate(prompts, params)
    for n, (result, whole) in enumerate(zip(results, wanted, strict=True)):
        if n == place:
            count = len(result.token_ids)
            assert result.finish_reason == "error" and result.error
            assert AT <= count < 24 if fault.__name__ in LATER else count == 0
            assert result.token_ids == whole.token_ids[:count]
        else:
            assert result.token_ids == whole.token_ids and result.finish_reason == "length" and result.error is None
            assert result.logprobs == whole.logprobs
    assert [result.token_ids for result in decoder.generate(prompts, params)] == [
        expected.token_ids for expected in wanted
    ]


@pytest.mark.parametrize("made", [toy, model_pair])
def test_a_fault_keeps_the_caches_of_neighbours(made: Any) -> None:
    def read(decoder: SpeculativeDecoder) -> int:
        decoder.generate(prompts, params)
        return decoder.num_prefilled_tokens

    prompts, params = ordered(2)
    decoder = made()
    with in_drafter(decoder):
        faulty = read(decoder)
    assert faulty == read(made())


def test_without_exchange_the_neighbours_prompts_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guarded_engine, "exchange", lambda *_: None)
    with pytest.raises(AssertionError):
        test_a_fault_keeps_the_caches_of_neighbours(toy)


def test_a_fault_that_does_not_recur_fails_no_row() -> None:
    prompts, params = ordered(1)
    wanted, decoder, calls = toy().generate(prompts, params), toy(), iter(range(1000))

    def propose(honest: Any, *arguments: Any) -> Any:
        if next(calls) == 3:
            raise Broken("once")
        return honest(*arguments)

    with patched(decoder.drafter, "propose", propose):
        results = decoder.generate(prompts, params)
    assert [result.token_ids for result in results] == [result.token_ids for result in wanted]


def test_a_prompt_that_cannot_be_read_beside_others_fails_alone() -> None:
    long = [[BAD, *range(3, 60)] * 12, [*range(3, 60)] * 12]
    params = SamplingParams(max_tokens=40, ignore_eos=True)

    def decoded(decoder: SpeculativeDecoder) -> list[Row]:
        rows = decoder.rows([PROMPTS[0], *long], params)
        scheduler = decoder.scheduler()
        scheduler.prompt_budget = 64
        scheduler.add(rows[0])
        scheduler.step()
        for row in rows[1:]:
            scheduler.add(row)
        ended = [round for round in scheduler.run([]) if round.finish_reason is not None]
        assert len(ended) == 3
        return rows

    wanted, decoder = decoded(toy(max_batch_size=3)), toy(max_batch_size=3)
    with in_prompt(decoder):
        rows = decoded(decoder)
    assert isinstance(rows[1].error, Broken) and not rows[1].output
    assert [rows[0].output, rows[2].output] == [wanted[0].output, wanted[2].output]


def test_a_single_prompt_raises_its_error() -> None:
    decoder = toy()
    with in_drafter(decoder):
        with pytest.raises(Broken):
            decoder.generate(PROMPTS[1], MIXED[1])
        tokens = []
        with pytest.raises(Broken):
            for chunk in decoder.stream(PROMPTS[1], MIXED[1]):
                tokens += chunk.token_ids
        assert tokens == toy().generate(PROMPTS[1], MIXED[1]).token_ids[: len(tokens)] and len(tokens) >= AT


def test_a_fault_that_hits_every_row_is_raised() -> None:
    decoder = toy()
    with patched(decoder.drafter, "propose", raising(Broken("always"))), pytest.raises(Broken):
        decoder.generate(PROMPTS, MIXED)
    assert decoder.generate(PROMPTS, MIXED)[0].token_ids == toy().generate(PROMPTS, MIXED)[0].token_ids


def test_a_keyboard_interrupt_is_raised() -> None:
    decoder = toy()
    with patched(decoder.drafter, "propose", raising(KeyboardInterrupt())), pytest.raises(KeyboardInterrupt):
        decoder.generate(PROMPTS, MIXED)


class Alarm:
    """Signal handlers in two forms: a bound method and a callable object."""

    def method(self, number: int, frame: object) -> None:
        raise TimeoutError("time is up")

    def __call__(self, number: int, frame: object) -> None:
        self.method(number, frame)


def alarm(number: int, frame: object) -> None:
    Alarm().method(number, frame)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="the system has no alarms")
@pytest.mark.parametrize("fault", [in_drafter, in_forward, in_prompt, in_options])
@pytest.mark.parametrize("handler", [alarm, Alarm().method, Alarm()], ids=["function", "method", "object"])
def test_an_exception_from_a_signal_handler_reaches_the_caller(
    handler: Any, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm comes once, so repeating the round would hide it."""
    prompts, params = ordered(1)
    wanted, decoder = toy().generate(prompts, params), toy()
    raised = []

    def comes_once(what: str) -> Broken:
        if not raised:
            raised.append(what)
            signal.raise_signal(signal.SIGALRM)
        return Broken(what)

    before = signal.signal(signal.SIGALRM, handler)
    try:
        monkeypatch.setitem(globals(), "Broken", comes_once)
        with fault(decoder), pytest.raises(TimeoutError, match="time is up"):
            decoder.generate(prompts, params)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [result.token_ids for result in decoder.generate(prompts, params)] == [result.token_ids for result in wanted]
