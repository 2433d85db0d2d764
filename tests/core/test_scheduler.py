"""Rows come, go, fail and are cancelled in any order: no other text changes, and long prompts delay nobody long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.kv_slots import Shapes
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed, drafts_for
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.ngram import NgramDrafter
from slipstream.models.layouts import make_session
from slipstream.models.toy import FABLE, ToyBackend
from tests.support.engine_parts import engine

TEXT = list(FABLE.replace("\n", " ").encode())
CHUNK = 16
SHAPES = Shapes((), CHUNK)
EVERY_ORDER = settings(max_examples=60, suppress_health_check=list(HealthCheck))


class Fails:
    """A processor that raises once the text has `length` tokens."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] >= self.length:
            raise RuntimeError("out of order")
        return scores


def scheduler(batch: int = 3, budget: int = CHUNK, backend: Any = None) -> Scheduler:
    target = Session(ToyBackend(3) if backend is None else backend, SHAPES)
    return Scheduler(engine(target, NgramDrafter(), Fixed(3)), batch, budget)


def row(index: int, length: int, tokens: int, seed: int = 0, fails: int | None = None) -> Row:
    processors = [] if fails is None else [Fails(length + fails)]
    params = SamplingParams(max_tokens=tokens, temperature=0.9 * (seed > 0), seed=seed, logits_processors=processors)
    return Row(index, TEXT[index * 5 :][:length], params, seed)


def alone(of: Row) -> list[int]:
    """What the row says by plain decoding, if nothing happens to it."""
    params = SamplingParams(
        max_tokens=of.params.max_tokens, temperature=of.params.temperature, seed=of.seed, num_draft_tokens=0
    )
    copy = Row(of.index, of.tokens[: of.prompt_length], params, of.seed)
    list(scheduler(1, budget=1 << 20).run([copy]))
    return copy.output


@dataclass
class Events:
    """What happens: rows to add, and between steps adds (None) and cancels (number of the row)."""

    rows: list[Row]
    script: list[list[int | None]] = field(default_factory=list)


@st.composite
def events(draw: st.DrawFn) -> Events:
    rows = [
        row(
            i,
            draw(st.integers(1, 70)),
            draw(st.integers(1, 12)),
            draw(st.integers(0, 2)),
            draw(st.none() | st.integers(0, 6)),
        )
        for i in range(draw(st.integers(1, 7)))
    ]
    step = st.lists(st.none() | st.integers(0, len(rows) - 1), max_size=3)
    return Events(rows, draw(st.lists(step, max_size=12)))


def play(made: Scheduler, of: Events) -> None:
    waiting = list(of.rows)
    for happens in of.script:
        for what in happens:
            if what is not None:
                made.cancel(of.rows[what])
            elif waiting:
                made.add(waiting.pop(0))
        made.step()
    for one in waiting:
        made.add(one)
    while made.unfinished:
        made.step()


@EVERY_ORDER
@given(events())
def test_every_row_says_what_it_says_alone_whatever_happens_to_the_others(of: Events) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLIPSTREAM_DEBUG", "1")  # what slots hold is compared with committed tokens
        play(scheduler(), of)
    for one in of.rows:
        text = alone(one)
        fails = one.params.logits_processors
        if one.finish_reason == "length":
            assert one.output == text and not (fails and fails[0].length < len(one.tokens))
        elif one.finish_reason == "error":
            assert one.output == text[: max(0, fails[0].length - one.prompt_length)]  # up to where plain decoding fails
            assert str(one.error) == "out of order"
        else:
            assert one.finish_reason == "cancelled" and one.output == text[: len(one.output)]


def test_a_row_that_touched_its_neighbours_would_be_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a place is given away, but what its slot holds is taken for the new row's."""
    made, rows = scheduler(1), [row(0, 20, 6), row(1, 20, 6)]
    whole: Callable[..., None] = type(made.engine.target.table).assign_slot

    def careless(table: Any, slot: int, of: Row) -> None:
        state = table.states[slot]
        if state.row is not None and state.row is not of and of is rows[1]:
            state.row, state.base, state.written, state.round = of, of.prompt_length - 1, of.prompt_length - 1, 0
        whole(table, slot, of)

    monkeypatch.setattr(type(made.engine.target.table), "assign_slot", careless)
    list(made.run(rows))
    monkeypatch.undo()
    assert rows[0].output == alone(rows[0]) and rows[1].output != alone(rows[1])


class Reads(ToyBackend):
    """Notes how many tokens each forward takes."""

    def __init__(self) -> None:
        super().__init__(3)
        self.widths: list[int] = []

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        self.widths.append(tokens.numel())
        return super().forward(tokens, starts, first_slot=first_slot, logits=logits)


@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])
def test_a_long_prompt_delays_running_rows_by_a_bounded_number_of_tokens(budget: int) -> None:
    backend = Reads()
    made, short, long = scheduler(2, budget, backend), row(0, 4, 40), row(1, 150, 3)
    made.add(short)
    made.step()
    made.add(long)
    rounds = 0
    while not long.rounds:
        backend.widths.clear()
        made.step()
        rounds += 1
        assert sum(backend.widths) <= budget + 2 * (1 + 3)  # the budget, and a round of both rows
    assert rounds >= 150 // budget and len(short.rounds) >= rounds
    while made.unfinished:
        made.step()
    assert short.output == alone(short) and long.output == alone(long)


@pytest.mark.parametrize(("reuse", "most"), [(1, 24), (64, 64)])
def test_chunks_are_cut_to_the_budget_unless_only_whole_ones_keep_the_bits(reuse: int, most: int) -> None:
    backend = Reads()
    target = Session(backend, Shapes((), 64, reuse=reuse))
    made, short, long = Scheduler(engine(target, NgramDrafter(), Fixed(3)), 2, 24), row(0, 4, 60), row(1, 150, 3)
    made.add(short)
    made.step()
    made.add(long)
    read = []
    while not long.rounds:
        backend.widths.clear()
        made.step()
        read.append(max(backend.widths))
    assert max(read) == most and len(short.rounds) >= 149 // most
    while made.unfinished:
        made.step()
    assert short.output == alone(short) and long.output == alone(long)


@pytest.mark.parametrize(("old", "share"), [(5, 1), (3, 1), (1, 5)])
def test_many_short_prompts_delay_running_rows_by_as_little_unless_they_are_many_more(old: int, share: int) -> None:
    backend = Reads()
    made = scheduler(old + 5, CHUNK, backend)
    running = [row(at, 4, 60) for at in range(old)]
    shorts = [row(9 + at, CHUNK - 4, 3) for at in range(5)]  # each within the budget, two of them not
    for one in running:
        made.add(one)
    made.step()
    for one in shorts:
        made.add(one)
    most = 0
    while made.unfinished:
        backend.widths.clear()
        made.step()
        most = max(most, sum(backend.widths) - (old + 5) * (1 + 3))  # without a round of all rows
    assert most <= share * CHUNK + CHUNK and (share == 1 or most > 2 * CHUNK)  # a chunk more than the budget
    assert all(one.output == alone(one) for one in (*running, *shorts))


def drafting_scheduler(budget: int) -> tuple[Scheduler, Session, tuple[Reads, Reads]]:
    """A scheduler with a draft model, its session, and both models."""
    backends = Reads(), Reads()
    target, draft = (Session(backend, SHAPES) for backend in backends)
    made = engine(target, ModelDrafter(draft, backends[0].vocab_size), Fixed(3), "match", draft)
    made.drafts_for = partial(drafts_for, made.policy)
    return Scheduler(made, 3, budget), draft, backends


@pytest.mark.parametrize("own", [None, 0])
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])
def test_a_long_prompt_delays_running_rows_by_few_tokens_of_either_model(
    budget: int, seed: int, own: int | None
) -> None:
    made, draft, backends = drafting_scheduler(budget)
    first, short, long = row(0, 4, 5), row(1, 4, 60, seed), row(2, 150, 9, seed)
    long.params = replace(long.params, num_draft_tokens=own)
    for one in (first, short):
        made.add(one)
    made.step()
    made.add(long)
    rounds = 0
    while len(long.rounds) < 3:
        for backend in backends:
            backend.widths.clear()
        made.step()
        rounds += 1
        for backend in backends:  # the budget, and forwards of a few tokens of all rows
            assert sum(backend.widths) <= budget + 3 * (2 + 3)
    assert first.finish_reason and rounds >= 150 // budget and len(short.rounds) >= rounds
    assert draft.prefill_tokens <= 4 + 4 + 150  # it moved to the place of `first` without being read again
    while made.unfinished:
        made.step()
    assert short.output == alone(short) and long.output == alone(long)


def test_rows_that_ask_for_no_drafts_are_not_read_by_the_draft_model() -> None:
    made, draft, _ = drafting_scheduler(CHUNK)
    for length in (4, 150):
        made.add(Row(length, TEXT[:length], SamplingParams(max_tokens=30, num_draft_tokens=0), 0))
        made.step()
    while made.unfinished:
        made.step()
    assert draft.prefill_tokens == 0


def test_without_running_rows_all_prompts_are_read_at_once() -> None:
    made, rows = scheduler(2), [row(0, 60, 3), row(1, 70, 3)]
    for one in rows:
        made.add(one)
    made.step()
    assert all(len(one.rounds) == 1 for one in rows)


def test_rows_leave_where_they_are_waiting_reading_or_running() -> None:
    made = scheduler(2)
    running, reading, waiting, rest = row(0, 4, 30), row(1, 90, 5), row(2, 4, 5), row(3, 4, 5)
    made.add(running)
    made.step()
    for one in (reading, waiting, rest):
        made.add(one)
    made.step()
    assert not reading.rounds and not waiting.rounds
    for one in (reading, waiting):
        made.cancel(one)
    done = made.step()
    assert {one.row for one in done} <= {0, 3} and made.unfinished
    made.cancel(running)
    while made.unfinished:
        made.step()
    made.cancel(rest)  # ended already: stays as it is
    assert [one.finish_reason for one in (running, reading, waiting, rest)] == ["cancelled"] * 3 + ["length"]
    assert made.step() == [] and not made.unfinished
    assert rest.output == alone(rest)


def test_the_cache_grows_with_the_rows_that_are_admitted() -> None:
    made = scheduler(4)
    table = made.engine.target.table
    made.add(row(0, 4, 20))
    made.step()
    assert len(table.states) == 1
    for index in (1, 2):
        made.add(row(index, 4, 5))
    made.step()
    assert len(table.states) == 3


PARAMS = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, logits_processors=[Fails(20)])]


def test_a_failing_row_of_a_list_ends_alone_and_a_single_one_raises() -> None:
    decoder = SpeculativeDecoder("toy", drafter="ngram", num_draft_tokens=3)
    prompts = ["The heron ", "The heron sai"]
    good, bad = decoder.generate(prompts, PARAMS, chat=False)
    assert good.token_ids == decoder.generate(prompts[0], PARAMS[0], chat=False).token_ids
    assert (bad.finish_reason, bad.error, good.finish_reason, good.error) == ("error", "out of order", "length", None)
    whole = decoder.using("none").generate(prompts[1], PARAMS[0], chat=False)
    assert bad.token_ids == whole.token_ids[: len(bad.token_ids)]
    with pytest.raises(RuntimeError, match="out of order"):
        decoder.generate(prompts[1], PARAMS[1], chat=False)
    with pytest.raises(RuntimeError, match="out of order"):
        list(decoder.stream(prompts[1], PARAMS[1], chat=False))


def test_a_row_without_a_token_to_choose_ends_alone() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    nothing = SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(range(256), float("-inf")), bad_words=[[256]])
    good, bad = decoder.generate(["The heron ", "The heron "], [SamplingParams(max_tokens=4), nothing], chat=False)
    assert bad.finish_reason == "error" and "leave no token to choose from" in (bad.error or "")
    assert good.token_ids == decoder.generate("The heron ", SamplingParams(max_tokens=4), chat=False).token_ids
    with pytest.raises(SlipstreamError, match="leave no token to choose from"):
        decoder.generate("The heron ", nothing, chat=False)


@pytest.mark.parametrize("answer", [None, [[1, 2]], "text"])
def test_a_drafter_that_returns_no_draft_is_named(answer: object) -> None:
    class Odd:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Any:
            return answer

    expected = f"drafter Odd returned {type(answer).__name__}; allowed: a Draft"
    with pytest.raises(SlipstreamError, match=expected):
        SpeculativeDecoder("toy", drafter=Odd(), num_draft_tokens=2).generate("The heron ", PARAMS[0], chat=False)


def test_ragged_sessions_read_ahead_too() -> None:
    from tests.support.tiny_models import fast, prompts

    backend = fast("llama")
    assert backend.ragged
    target = make_session(backend, Shapes((), 64))
    made = Scheduler(engine(target, NgramDrafter(), Fixed(3)), 2, 64)
    first, second = (Row(i, ids, SamplingParams(max_tokens=20), 0) for i, ids in enumerate(prompts((5, 200))))
    made.add(first)
    made.step()
    made.add(second)
    made.step()
    assert not second.rounds and len(first.rounds) == 2
    while made.unfinished:
        made.step()
    for one in (first, second):
        same = Row(0, one.tokens[: one.prompt_length], SamplingParams(max_tokens=20), 0)
        list(Scheduler(engine(make_session(fast("llama")), NgramDrafter(), Fixed(0))).run([same]))
        assert same.output == one.output
