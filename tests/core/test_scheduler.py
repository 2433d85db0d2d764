"""Rows enter, end, fail and are cancelled without changing other texts, and long prompts delay no row for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream import SamplingParams, SlipstreamError, SpeculativeDecoder
from slipstream.core.kv_slots import Shapes
from slipstream.core.scheduler import IDLE_BUDGETS, Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
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


def make_scheduler(batch: int = 3, budget: int = CHUNK, backend: Any = None) -> Scheduler:
    target = Session(ToyBackend(3) if backend is None else backend, SHAPES)
    return Scheduler(engine(target, NgramDrafter(), Fixed(3)), batch, budget)


def row(index: int, length: int, tokens: int, seed: int = 0, fails: int | None = None) -> Row:
    processors = [] if fails is None else [Fails(length + fails)]
    params = SamplingParams(max_tokens=tokens, temperature=0.9 * (seed > 0), seed=seed, logits_processors=processors)
    text = TEXT * -(-(length + index * 5) // len(TEXT))
    return Row(index, text[index * 5 :][:length], params, seed)


def alone(row: Row) -> list[int]:
    """The row's output by plain decoding, undisturbed."""
    params = SamplingParams(
        max_tokens=row.params.max_tokens, temperature=row.params.temperature, seed=row.seed, num_draft_tokens=0
    )
    copy = Row(row.index, row.tokens[: row.prompt_length], params, row.seed)
    list(make_scheduler(1, budget=1 << 20).run([copy]))
    return copy.output


@dataclass
class Events:
    """Rows to add and, before each step, a list of events: None adds the next row, a number cancels that row."""

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


def play(scheduler: Scheduler, events: Events) -> None:
    waiting = list(events.rows)
    for events_of_step in events.script:
        for cancelled in events_of_step:
            if cancelled is not None:
                scheduler.cancel(events.rows[cancelled])
            elif waiting:
                scheduler.add(waiting.pop(0))
        scheduler.step()
    for row in waiting:
        scheduler.add(row)
    while scheduler.unfinished:
        scheduler.step()


@pytest.mark.slow
@EVERY_ORDER
@given(events())
def test_every_row_has_its_text_of_plain_decoding_whatever_happens_to_the_others(scenario: Events) -> None:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SLIPSTREAM_DEBUG", "1")  # what slots hold is compared with committed tokens
        play(make_scheduler(), scenario)
    for each in scenario.rows:
        plain = alone(each)
        processors = each.params.logits_processors
        if each.finish_reason == "length":
            assert each.output == plain and not (processors and processors[0].length < len(each.tokens))
        elif each.finish_reason == "error":
            # up to where plain decoding fails
            assert each.output == plain[: max(0, processors[0].length - each.prompt_length)]
            assert str(each.error) == "out of order"
        else:
            assert each.finish_reason == "cancelled" and each.output == plain[: len(each.output)]


def test_a_row_that_takes_over_anothers_cached_tokens_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what a slot holds of its old row is taken for the new row's."""
    scheduler, rows = make_scheduler(1), [row(0, 20, 6), row(1, 20, 6)]
    assign_slot: Callable[..., None] = type(scheduler.engine.target.table).assign_slot

    def careless(table: Any, slot: int, new_row: Row) -> None:
        state = table.states[slot]
        if state.row is not None and state.row is not new_row and new_row is rows[1]:
            state.row = new_row
            state.base = new_row.prompt_length - 1
            state.written = new_row.prompt_length - 1
            state.round = 0
        assign_slot(table, slot, new_row)

    monkeypatch.setattr(type(scheduler.engine.target.table), "assign_slot", careless)
    list(scheduler.run(rows))
    monkeypatch.undo()
    assert rows[0].output == alone(rows[0]) and rows[1].output != alone(rows[1])


class RecordsWidths(ToyBackend):
    """Records how many tokens each forward takes."""

    def __init__(self) -> None:
        super().__init__(3)
        self.widths: list[int] = []

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        self.widths.append(tokens.numel())
        return super().forward(tokens, starts, first_slot=first_slot, logits=logits)


@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])
def test_a_long_prompt_delays_running_rows_by_a_bounded_number_of_tokens(budget: int) -> None:
    backend = RecordsWidths()
    scheduler, short, long = make_scheduler(2, budget, backend), row(0, 4, 40), row(1, 150, 3)
    scheduler.add(short)
    scheduler.step()
    scheduler.add(long)
    rounds = 0
    while not long.rounds:
        backend.widths.clear()
        scheduler.step()
        rounds += 1
        assert sum(backend.widths) <= budget + 2 * (1 + 3)  # the budget, and a round of both rows
    assert rounds >= 150 // budget and len(short.rounds) >= rounds
    while scheduler.unfinished:
        scheduler.step()
    assert short.output == alone(short) and long.output == alone(long)


@pytest.mark.parametrize(("reuse", "largest_chunk"), [(1, 24), (64, 64)])
def test_chunks_are_cut_to_the_budget_unless_only_whole_chunks_are_reproducible(reuse: int, largest_chunk: int) -> None:
    backend = RecordsWidths()
    target = Session(backend, Shapes((), 64, reuse=reuse))
    scheduler, short, long = Scheduler(engine(target, NgramDrafter(), Fixed(3)), 2, 24), row(0, 4, 60), row(1, 150, 3)
    scheduler.add(short)
    scheduler.step()
    scheduler.add(long)
    chunks = []
    while not long.rounds:
        backend.widths.clear()
        scheduler.step()
        chunks.append(max(backend.widths))
    assert max(chunks) == largest_chunk and len(short.rounds) >= 149 // largest_chunk
    while scheduler.unfinished:
        scheduler.step()
    assert short.output == alone(short) and long.output == alone(long)


def serving(backend: ToyBackend, max_batch_size: int = 3) -> Scheduler:
    """A scheduler that expects rows at any time, as a server's does."""
    target = Session(backend, Shapes((), CHUNK, reuse=1))
    return Scheduler(engine(target, NgramDrafter(), Fixed(3)), max_batch_size, CHUNK, num_slots=max_batch_size + 1)


def test_a_row_passes_a_long_prompt_that_is_read_while_nothing_else_runs() -> None:
    backend = RecordsWidths()
    scheduler, long, short = serving(backend), row(0, 20_000, 3), row(1, 10, 8)
    scheduler.add(long)
    assert scheduler.step() == [] and sum(backend.widths) <= IDLE_BUDGETS * CHUNK + CHUNK
    scheduler.add(short)
    scheduler.step()
    assert len(short.rounds) == 1 and not long.rounds  # its first token comes in its first step
    backend.widths.clear()
    while not long.rounds:
        scheduler.step()
    assert short.output == alone(short) and sum(backend.widths) <= 20_000 + 2 * CHUNK  # nothing is read twice
    while scheduler.unfinished:
        scheduler.step()
    assert long.output == alone(long)


def test_a_shorter_prompt_passes_a_long_one_that_still_gets_half_of_all_steps() -> None:
    backend = RecordsWidths()
    scheduler = serving(backend)
    running, long, medium = row(0, 4, 2000), row(1, 100 * CHUNK, 3), row(2, 10 * CHUNK, 3)
    for new in (running, long, medium):
        scheduler.add(new)
        scheduler.step()
    steps = 0
    while not medium.rounds:
        scheduler.step()
        steps += 1
    assert steps <= 2 * 10 + 2  # rather than the 100 of the long one before
    assert scheduler.engine.target.num_cached(long) >= (steps // 2 - 1) * CHUNK
    while not long.rounds:
        scheduler.step()
        steps += 1
    assert steps <= 115 and len(running.rounds) >= steps
    assert medium.output == alone(medium)


def test_rows_with_a_common_prompt_read_it_once_while_others_run() -> None:
    backend = RecordsWidths()
    scheduler, running, first = serving(backend, 4), row(0, 4, 400), row(1, 50 * CHUNK, 3)
    copies = [Row(index, list(first.tokens), first.params, seed=index) for index in (2, 3)]
    scheduler.add(running)
    scheduler.step()
    backend.widths.clear()
    for new in (first, *copies):
        scheduler.add(new)
    while not all(new.rounds for new in (first, *copies)):
        scheduler.step()
    num_rounds = len(running.rounds)
    assert sum(backend.widths) <= 50 * CHUNK + 3 * CHUNK + 4 * 4 * num_rounds


def test_an_agents_long_prompt_stays_while_titles_and_sub_agents_come_and_go() -> None:
    scheduler = serving(ToyBackend(3))
    target = scheduler.engine.target
    system, others = row(0, 100 * CHUNK, 3).tokens, row(0, 10 * CHUNK, 3).tokens[::-1]
    conversation = list(system)
    for turn in range(6):
        before, agent = target.prefill_tokens, Row(0, list(conversation), SamplingParams(max_tokens=8), 0)
        list(scheduler.run([agent]))
        assert turn == 0 or target.prefill_tokens - before <= 8 + CHUNK + 1, turn  # the last answer and what is new
        conversation = [*agent.tokens, *TEXT[turn * CHUNK :][:CHUNK]]
        before = target.prefill_tokens
        for number in range(4):  # sub-agents with a common beginning, and titles
            tokens = others + TEXT[number * 40 :][:CHUNK] if number % 2 else TEXT[turn * 50 + number * 9 :][: 2 * CHUNK]
            list(scheduler.run([Row(1, tokens, SamplingParams(max_tokens=4), 0)]))
        assert turn == 0 or target.prefill_tokens - before <= 2 * 2 * CHUNK + 2 * CHUNK, turn


@pytest.mark.parametrize(("num_running", "share"), [(5, 1), (3, 1), (1, 5)])
def test_many_short_prompts_share_the_budget_unless_they_far_outnumber_the_running_rows(
    num_running: int, share: int
) -> None:
    backend = RecordsWidths()
    scheduler = make_scheduler(num_running + 5, CHUNK, backend)
    running = [row(i, 4, 60) for i in range(num_running)]
    shorts = [row(9 + i, CHUNK - 4, 3) for i in range(5)]  # one fits the budget, two do not
    for each in running:
        scheduler.add(each)
    scheduler.step()
    for each in shorts:
        scheduler.add(each)
    most_prompt_tokens = 0
    while scheduler.unfinished:
        backend.widths.clear()
        scheduler.step()
        # less a round of all rows
        most_prompt_tokens = max(most_prompt_tokens, sum(backend.widths) - (num_running + 5) * (1 + 3))
    # a chunk more than the budget
    assert most_prompt_tokens <= share * CHUNK + CHUNK and (share == 1 or most_prompt_tokens > 2 * CHUNK)
    assert all(each.output == alone(each) for each in (*running, *shorts))


def drafting_scheduler(budget: int) -> tuple[Scheduler, Session, tuple[RecordsWidths, RecordsWidths]]:
    """A scheduler with a draft model, its session, and both models."""
    backends = RecordsWidths(), RecordsWidths()
    target, draft = (Session(backend, SHAPES) for backend in backends)
    drafting_engine = engine(target, ModelDrafter(draft, backends[0].vocab_size), Fixed(3), "match", draft)
    return Scheduler(drafting_engine, 3, budget), draft, backends


@pytest.mark.parametrize("num_draft_tokens", [None, 0])
@pytest.mark.parametrize("seed", [0, 7])
@pytest.mark.parametrize("budget", [CHUNK, 2 * CHUNK])
def test_a_long_prompt_delays_running_rows_by_a_bounded_number_of_tokens_of_the_draft_model_too(
    budget: int, seed: int, num_draft_tokens: int | None
) -> None:
    scheduler, draft, backends = drafting_scheduler(budget)
    first, short, long = row(0, 4, 5), row(1, 4, 60, seed), row(2, 150, 9, seed)
    long.params = replace(long.params, num_draft_tokens=num_draft_tokens)
    for each in (first, short):
        scheduler.add(each)
    scheduler.step()
    scheduler.add(long)
    rounds = 0
    while len(long.rounds) < 3:
        for backend in backends:
            backend.widths.clear()
        scheduler.step()
        rounds += 1
        for backend in backends:  # the budget, and forwards of a few tokens of all rows
            assert sum(backend.widths) <= budget + 3 * (2 + 3)
    assert first.finish_reason and rounds >= 150 // budget and len(short.rounds) >= rounds
    assert draft.prefill_tokens <= 4 + 4 + 150  # it moves to the slot of `first` and is not read again
    while scheduler.unfinished:
        scheduler.step()
    assert short.output == alone(short) and long.output == alone(long)


def test_rows_that_ask_for_no_drafts_are_not_read_by_the_draft_model() -> None:
    scheduler, draft, _ = drafting_scheduler(CHUNK)
    for length in (4, 150):
        scheduler.add(Row(length, TEXT[:length], SamplingParams(max_tokens=30, num_draft_tokens=0), 0))
        scheduler.step()
    while scheduler.unfinished:
        scheduler.step()
    assert draft.prefill_tokens == 0


def test_without_running_rows_all_prompts_are_read_at_once() -> None:
    scheduler, rows = make_scheduler(2), [row(0, 60, 3), row(1, 70, 3)]
    for each in rows:
        scheduler.add(each)
    scheduler.step()
    assert all(len(each.rounds) == 1 for each in rows)


def test_rows_can_be_cancelled_while_waiting_reading_or_running() -> None:
    scheduler = make_scheduler(2)
    running, reading, waiting, last = row(0, 4, 30), row(1, 90, 5), row(2, 4, 5), row(3, 4, 5)
    scheduler.add(running)
    scheduler.step()
    for each in (reading, waiting, last):
        scheduler.add(each)
    scheduler.step()
    assert not reading.rounds and not waiting.rounds
    for each in (reading, waiting):
        scheduler.cancel(each)
    rounds = scheduler.step()
    assert {each.row for each in rounds} <= {0, 3} and scheduler.unfinished
    scheduler.cancel(running)
    while scheduler.unfinished:
        scheduler.step()
    scheduler.cancel(last)  # it has ended: nothing changes
    assert [each.finish_reason for each in (running, reading, waiting, last)] == ["cancelled"] * 3 + ["length"]
    assert scheduler.step() == [] and not scheduler.unfinished
    assert last.output == alone(last)


def test_the_cache_grows_with_the_rows_that_are_admitted() -> None:
    scheduler = make_scheduler(4)
    table = scheduler.engine.target.table
    scheduler.add(row(0, 4, 20))
    scheduler.step()
    assert len(table.states) == 1
    for index in (1, 2):
        scheduler.add(row(index, 4, 5))
    scheduler.step()
    assert len(table.states) == 3


PARAMS = [SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, logits_processors=[Fails(20)])]


def test_a_failing_row_ends_alone_in_a_list_and_raises_on_its_own() -> None:
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


def test_a_row_without_an_allowed_token_ends_alone_in_a_list_and_raises_on_its_own() -> None:
    decoder = SpeculativeDecoder("toy", drafter="none")
    nothing = SamplingParams(max_tokens=4, logit_bias=dict.fromkeys(range(256), float("-inf")), bad_words=[[256]])
    good, bad = decoder.generate(["The heron ", "The heron "], [SamplingParams(max_tokens=4), nothing], chat=False)
    assert bad.finish_reason == "error" and "leave no token to choose from" in (bad.error or "")
    assert good.token_ids == decoder.generate("The heron ", SamplingParams(max_tokens=4), chat=False).token_ids
    with pytest.raises(SlipstreamError, match="leave no token to choose from"):
        decoder.generate("The heron ", nothing, chat=False)


@pytest.mark.parametrize("answer", [None, [[1, 2]], "text"])
def test_a_drafter_that_returns_no_draft_is_refused_by_name(answer: object) -> None:
    class NoDraft:
        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Any:
            return answer

    expected = f"drafter NoDraft returned {type(answer).__name__}; allowed: a Draft"
    with pytest.raises(SlipstreamError, match=expected):
        SpeculativeDecoder("toy", drafter=NoDraft(), num_draft_tokens=2).generate("The heron ", PARAMS[0], chat=False)


@pytest.mark.slow
def test_a_ragged_session_reads_a_long_prompt_in_chunks_too() -> None:
    from tests.support.tiny_models import fast, prompts

    backend = fast("llama")
    assert backend.ragged
    target = make_session(backend, Shapes((), 64))
    scheduler = Scheduler(engine(target, NgramDrafter(), Fixed(3)), 2, 64)
    first, second = (Row(i, ids, SamplingParams(max_tokens=20), 0) for i, ids in enumerate(prompts((5, 200))))
    scheduler.add(first)
    scheduler.step()
    scheduler.add(second)
    scheduler.step()
    assert not second.rounds and len(first.rounds) == 2
    while scheduler.unfinished:
        scheduler.step()
    for each in (first, second):
        plain = Row(0, each.tokens[: each.prompt_length], SamplingParams(max_tokens=20), 0)
        list(Scheduler(engine(make_session(fast("llama")), NgramDrafter(), Fixed(0))).run([plain]))
        assert plain.output == each.output
