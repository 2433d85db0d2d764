"""A fault of a request's own code or of a user's drafter ends its row; any other fault leaves a usable decoder."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest

from slipstream import Draft, Result, SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from tests.support import tiny_models
from tests.support.architectures import tiny_model
from tests.support.markers import mostly_slow

BAD = 59  # a token id: the row whose prompt begins with it fails
AT = 6  # tokens of output after which the bad row fails
PROMPTS = [[5, 9, 11, 5, 9, 11, 5], [BAD, 9, 12, 9, 12], [7, 7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]]
MIXED = [
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=17, temperature=0.7, seed=8, ignore_eos=True, logprobs=2),
]
# equal bits are asked for: "auto" would give them up where padded forwards are measured to cost too much
SETTINGS: dict[str, Any] = {"num_draft_tokens": 3, "acceptance": "match", "reproducible": True}


class Broken(Exception):
    """The exception that these tests raise."""


class Panic(BaseException):
    """A panic of Rust code, which is not an `Exception`."""


def is_bad(row: Row) -> bool:
    return row.tokens[0] == BAD and row.num_output_tokens >= AT


class UsersDrafter:
    """Prompt lookup that does something else when a row of a batch is bad."""

    def __init__(self, fail: Callable[[Sequence[Row]], Any], is_bad: Callable[[Row], bool] = is_bad) -> None:
        self.fail, self.is_bad = fail, is_bad
        self.lookup: Any = SpeculativeDecoder("toy", drafter="ngram").drafter

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        if any(map(self.is_bad, rows)):
            self.fail(rows)
        draft: Draft = self.lookup.propose(rows, lengths, sampler)
        return draft


def raises(rows: Sequence[Row]) -> None:
    raise Broken("drafter")


def toy(**settings: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", **{"drafter": "ngram"} | SETTINGS | settings)


def model_pair() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_models.fresh("llama"), tiny_models.perturbed("llama"), drafter="model", **SETTINGS)


def recurrent() -> SpeculativeDecoder:
    return SpeculativeDecoder(tiny_model("lfm2"), drafter="ngram", **SETTINGS)


def ordered(place: int) -> tuple[list[list[int]], list[SamplingParams]]:
    """The prompts with the bad one at a place of the batch, and the options of each."""
    order = [n for n in range(len(PROMPTS)) if n != 1]
    order.insert(place, 1)
    return [PROMPTS[n] for n in order], [MIXED[n] for n in order]


@cache
def without_fault(made: Callable[[], SpeculativeDecoder], place: int) -> list[Result]:
    """The results of the prompts in this order where nothing fails."""
    return made().generate(*ordered(place))  # type: ignore[return-value]


def with_faulty_stop_check(decoder: SpeculativeDecoder, prompts: Any, params: Any) -> list[Result]:
    """The check of a stop condition fails; it runs while tokens are committed, so it cannot be repeated."""

    def check(row: Row, tokens: Sequence[int], first: int) -> None:
        if is_bad(row):
            raise Broken("stop")

    rows = decoder.rows(prompts, params)
    for row in rows:
        row.find_stop = partial(check, row)
    return decoder.decode_rows(rows)


def with_faulty_processor(decoder: SpeculativeDecoder, prompts: Any, params: Any) -> list[Result]:
    def process(ids: Any, scores: Any) -> Any:
        if ids[0, 0] == BAD and ids.shape[1] >= len(PROMPTS[1]) + AT:
            raise Broken("processor")
        return scores

    params = [replace(options, logits_processors=[process]) for options in params]
    return decoder.generate(prompts, params)


def with_faulty_drafter(decoder: SpeculativeDecoder, prompts: Any, params: Any) -> list[Result]:
    return decoder.using(drafter=UsersDrafter(raises)).generate(prompts, params)


FAULTS = {fault.__name__: fault for fault in (with_faulty_drafter, with_faulty_processor, with_faulty_stop_check)}


@pytest.mark.pairwise
@pytest.mark.parametrize("place", range(len(PROMPTS)))
@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
@pytest.mark.parametrize("made", mostly_slow([toy, recurrent], toy))
def test_a_fault_of_its_own_fails_a_row_alone(made: Any, fault: Any, place: int) -> None:
    prompts, params = ordered(place)
    decoder = made()
    results = fault(decoder, prompts, params)
    for n, (result, whole) in enumerate(zip(results, without_fault(made, place), strict=True)):
        count = len(result.token_ids)
        assert result.token_ids == whole.token_ids[:count]
        if n == place:
            assert result.finish_reason == "error" and result.error and AT <= count < 24
        else:
            assert result.finish_reason == "length" and result.error is None and count == len(whole.token_ids)
            assert result.logprobs == whole.logprobs
    again = decoder.generate(prompts, params)
    assert [result.token_ids for result in again] == [whole.token_ids for whole in without_fault(made, place)]


def test_a_fault_keeps_the_caches_of_neighbors() -> None:
    def num_read(drafter: Any) -> int:
        decoder = toy(drafter=drafter)
        decoder.generate(*ordered(2))
        return decoder.num_prefilled_tokens

    assert num_read(UsersDrafter(raises)) == num_read("ngram")


def test_a_single_prompt_raises_its_error() -> None:
    decoder = toy(drafter=UsersDrafter(raises))
    with pytest.raises(Broken):
        decoder.generate(PROMPTS[1], MIXED[1])
    tokens = []
    with pytest.raises(Broken):
        for chunk in decoder.stream(PROMPTS[1], MIXED[1]):
            tokens += chunk.token_ids
    assert tokens == toy().generate(PROMPTS[1], MIXED[1]).token_ids[: len(tokens)] and len(tokens) >= AT


def test_a_drafter_that_always_fails_fails_every_row() -> None:
    results = toy(drafter=UsersDrafter(raises, is_bad=lambda row: True)).generate(PROMPTS, MIXED)
    assert [result.error for result in results] == ["drafter"] * len(PROMPTS)


class Alarm:
    """Signal handlers in two forms: a bound method and a callable object."""

    def method(self, number: int, frame: object) -> None:
        raise TimeoutError("time is up")

    def __call__(self, number: int, frame: object) -> None:
        self.method(number, frame)


def alarm(number: int, frame: object) -> None:
    Alarm().method(number, frame)


@pytest.mark.skipif(not hasattr(signal, "SIGALRM"), reason="the system has no alarms")
@pytest.mark.parametrize("prompts", [PROMPTS, PROMPTS[1:2]], ids=["batch", "single"])
@pytest.mark.parametrize("handler", [alarm, Alarm().method, Alarm()], ids=["function", "method", "object"])
def test_an_exception_from_a_signal_handler_in_a_drafter_reaches_the_caller(handler: Any, prompts: Any) -> None:
    """An alarm comes once, so asking the drafter again would hide it."""
    alarms = iter([signal.SIGALRM])

    def fail(rows: Sequence[Row]) -> None:
        for number in alarms:
            signal.raise_signal(number)

    decoder = toy(drafter=UsersDrafter(fail))
    before = signal.signal(signal.SIGALRM, handler)
    try:
        with pytest.raises(TimeoutError, match="time is up"):
            decoder.generate(prompts, MIXED[1])
    finally:
        signal.signal(signal.SIGALRM, before)
    assert decoder.generate(PROMPTS[1], MIXED[1]).token_ids == without_fault(toy, 1)[1].token_ids


@contextmanager
def failing(
    owner: Any, name: str, error: BaseException, fails: Callable[..., bool] = lambda *_: True
) -> Iterator[None]:
    """The method does its work and then raises once, as soon as `fails(*arguments)`."""
    honest, errors = getattr(owner, name), [error]

    def work(*arguments: Any, **more: Any) -> Any:
        out = honest(*arguments, **more)
        if errors and fails(*arguments):
            raise errors.pop()
        return out

    object.__setattr__(owner, name, work)  # works for frozen objects too
    try:
        yield
    finally:
        object.__setattr__(owner, name, honest)


def has_bad(rows: Sequence[Row], *_: Any) -> bool:
    return any(map(is_bad, rows))


PLACES: dict[str, Callable[[SpeculativeDecoder, BaseException], Any]] = {
    "drafter": lambda decoder, error: failing(decoder.drafter, "propose", error, has_bad),
    "forward": lambda decoder, error: failing(decoder._target_session.table, "note_cached", error, has_bad),
    "policy": lambda decoder, error: failing(decoder._engine.policy, "observe", error, has_bad),
    "options": lambda decoder, error: failing(decoder._engine, "make_sampler", error),
    "prompt": lambda decoder, error: failing(decoder._target_session.table, "read_chunk", error),
    "memory": lambda decoder, error: failing(decoder._target_session, "reserve", error),
}


@pytest.mark.each_value
@pytest.mark.parametrize("error", [Broken("ours"), Panic("ours"), KeyboardInterrupt(), MemoryError()], ids=repr)
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("made", mostly_slow([toy, model_pair, recurrent], toy))
def test_any_other_exception_reaches_the_caller_and_leaves_a_usable_decoder(made: Any, place: Any, error: Any) -> None:
    decoder = made()
    with place(decoder, error), pytest.raises(type(error)):
        decoder.generate(*ordered(1))
    results = decoder.generate(*ordered(1))
    assert [result.token_ids for result in results] == [whole.token_ids for whole in without_fault(made, 1)]


def continued(made: Callable[[], SpeculativeDecoder], place: str) -> list[list[int]]:
    """The outputs of rows that go on after a round that was interrupted."""
    decoder = made()
    rows, scheduler = decoder.rows(*ordered(1)), decoder.scheduler()
    with PLACES[place](decoder, Broken("once")), pytest.raises(Broken):
        list(scheduler.run(rows))
    assert any(row.output for row in rows) and any(row.finish_reason is None for row in rows)
    list(scheduler.run([]))
    return [row.output for row in rows]


@pytest.mark.parametrize("place", ["drafter", "forward"])
@pytest.mark.parametrize("made", mostly_slow([toy, model_pair, recurrent], toy, model_pair))
def test_rows_can_go_on_after_an_interrupted_round(made: Any, place: str) -> None:
    assert continued(made, place) == [whole.token_ids for whole in without_fault(made, 1)]
