"""The states of recurrent layers by slot: the positions at which a forward may begin, and the state it finds."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.models.decoder import recurrence as module
from slipstream.models.decoder.recurrence import RING, RecurrentStates, SlotPositions
from tests.support.recurrent_layers import feed, make_inputs, make_recurrence, make_states, read

LENGTH = 200
RECURRENCE = make_recurrence("delta rule", torch.float32)
TEXT, OTHER = make_inputs(RECURRENCE, 2, LENGTH)


@cache
def expected() -> torch.Tensor:
    return read(make_states(RECURRENCE), TEXT, [1] * LENGTH)


def is_right(out: torch.Tensor, start: int) -> bool:
    return torch.allclose(out, expected()[start : start + len(out)], rtol=0, atol=1e-4)


def test_a_forward_may_begin_at_any_position_after_the_final_one() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 30, settled=10)
    assert [states.checkpoint(0, limit) for limit in (5, 10, 20, 30, 99)] == [0, 10, 20, 30, 30]
    assert is_right(feed(states, TEXT, 17, 4, settled=17), 17)
    assert [states.checkpoint(0, limit) for limit in (16, 17, 40)] == [0, 17, 21]


def test_all_positions_after_the_final_one_are_kept_however_many() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 5, settled=4)
    feed(states, TEXT, 5, 3 * RING, settled=5)
    assert states.checkpoint(0, 6) == 6
    assert is_right(feed(states, TEXT, 6, 3, settled=6), 6)


def test_without_a_final_position_a_forward_may_begin_shortly_before_the_end() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 3 * RING)
    assert states.checkpoint(0, 3 * RING - RING // 2) == 3 * RING - RING // 2
    assert states.checkpoint(0, RING) == 0


def test_the_ends_of_prompts_are_copied_for_texts_that_begin_alike() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 40, settled=40)
    feed(states, TEXT, 40, 60, settled=100)
    assert [states.checkpoint(0, limit) for limit in (39, 40, 99, 100)] == [0, 40, 40, 100]
    states.copy(0, 2, 40)
    assert states.checkpoint(2, 99) == 40
    assert is_right(feed(states, TEXT, 40, 10, slot=2), 40)
    assert is_right(feed(states, TEXT, 40, 10), 40)  # going back drops later states
    assert states.checkpoint(0, 100) == 50


def test_older_copies_are_evicted_by_newer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 20, settled=20)
    ((state, inputs),) = states._copies[0, 20]
    monkeypatch.setattr(module, "COPIES", 2 * (state.nbytes + inputs.nbytes))
    for start in (20, 40, 60):
        feed(states, TEXT, start, 20, settled=start + 20)
    assert [position for _, position in states._copies] == [60, 80]


def test_a_position_without_a_state_is_refused() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 30, settled=20)
    with pytest.raises(SlipstreamError, match="no state is kept for position 12"):
        states.begin(0, [12], 4)


def test_a_failed_forward_drops_the_states_of_its_rows_except_copies() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 30, settled=20)
    states.begin(0, [25], 4)
    with pytest.raises(RuntimeError):
        states.run(0, torch.zeros(1, 4, 3))
    assert states.checkpoint(0, 30) == 20 == states.checkpoint(0, 20)  # the copy, which forwards do not change
    assert is_right(feed(states, TEXT, 20, 5), 20)


@pytest.mark.slow
@settings(max_examples=40)
@given(st.data())
def test_every_row_sees_its_own_text_after_any_rounds(data: st.DataObject) -> None:
    """Rows draft and reject, draft column by column, move and restart; each sees its own text only."""
    states, settled = make_states(RECURRENCE), [0, 0, 0]
    for _ in range(data.draw(st.integers(1, 10))):
        slot = data.draw(st.integers(0, 2))
        kind = data.draw(st.sampled_from(["round", "columns", "copy", "again"]))
        position = states.checkpoint(slot, settled[slot])
        if kind == "copy":
            to = data.draw(st.integers(0, 2))
            if to != slot:
                states.copy(slot, to, position)
                settled[to] = position
        elif kind == "again":
            settled[slot] = 0
        elif position + 40 < LENGTH:
            right, wrong = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 12))
            text = torch.cat([TEXT[: position + right], OTHER[position + right :]])
            if kind == "round":
                assert is_right(feed(states, text, position, right + wrong, slot, settled=position)[:right], position)
            else:
                for column in range(right + wrong):
                    output = feed(states, text, position + column, 1, slot, settled=position)
                    assert column >= right or is_right(output, position + column)
            settled[slot] = position + right


def a_token_late(states: RecurrentStates, slot: int) -> None:
    positions = states._slots[slot]
    states._slots[slot] = SlotPositions(positions.kept + 1, positions.end)


def another_rows(states: RecurrentStates, slot: int) -> None:
    for memory in states._memory.values():
        memory.states[slot] = memory.states[1]


def overwritten_inputs(states: RecurrentStates, slot: int) -> None:
    for memory in states._memory.values():
        memory.inputs[slot] = memory.inputs[1]


@pytest.mark.parametrize("wrong", [a_token_late, another_rows, overwritten_inputs])
def test_a_wrong_state_is_noticed(wrong: Callable[[RecurrentStates, int], None]) -> None:
    states = make_states(RECURRENCE)
    feed(states, OTHER, 0, 30, slot=1, settled=10)
    feed(states, TEXT, 0, 30, settled=10)
    wrong(states, 0)
    assert not is_right(feed(states, TEXT, 20, 5), 20)


def test_a_state_that_was_not_restored_is_noticed() -> None:
    states = make_states(RECURRENCE)
    feed(states, torch.cat([TEXT[:10], OTHER[10:]]), 0, 30, settled=30)  # treats the draft as final
    states._slots[0] = SlotPositions(10, 10)
    assert not is_right(feed(states, TEXT, 10, 5), 10)
