"""Recurrent layers: the compiled form computes what the specification does, and bits do not depend on the forwards."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.compiled_recurrence import CompiledRecurrence, agrees, unsupported
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.decoder import recurrence as module
from slipstream.models.decoder.recurrence import RING, Advance, Recurrence, RecurrentStates, SlotPositions
from tests.support.recurrent_layers import KINDS, feed, make_inputs, make_recurrence, make_states, read

LENGTH = 40
DTYPES = (torch.float32, torch.bfloat16)


def compiled_form(recurrence: Recurrence) -> CompiledRecurrence:
    library = kernels()
    if library is None:
        pytest.skip("Slipstream's own kernels cannot be used on this machine")
    return CompiledRecurrence(recurrence, library)


def form(recurrence: Recurrence, way: str) -> Advance | None:
    return None if way == "specification" else compiled_form(recurrence)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_form_agrees_with_the_specification(kind: str, dtype: torch.dtype) -> None:
    recurrence = make_recurrence(kind, dtype)
    assert agrees(recurrence, compiled_form(recurrence))


@pytest.mark.parametrize("field", ["weight", "rate", "shift", "skip"])
def test_a_wrong_parameter_is_noticed(field: str) -> None:
    recurrence = make_recurrence("state space", torch.float32)
    assert recurrence.heads is not None
    if field == "weight":
        wrong = dataclasses.replace(recurrence, weight=recurrence.weight * 1.1)
    else:
        wrong = dataclasses.replace(
            recurrence, heads=dataclasses.replace(recurrence.heads, **{field: getattr(recurrence.heads, field) + 0.2})
        )
    assert not agrees(recurrence, compiled_form(wrong))


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("way", ["specification", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_in_forwards_of_1_to_16_tokens(kind: str, dtype: torch.dtype, way: str) -> None:
    recurrence = make_recurrence(kind, dtype)
    compiled, x = form(recurrence, way), make_inputs(recurrence, 1, LENGTH)[0]
    one_by_one = read(make_states(recurrence, compiled), x, [1] * LENGTH)
    for width in (2, 3, 4, 5, 7, 8, 9, 15, 16):
        counts = [width] * (LENGTH // width)
        wide = read(make_states(recurrence, compiled), x, counts)
        assert torch.equal(wide, one_by_one[: len(wide)]), width


@pytest.mark.parametrize("way", ["specification", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
def test_rejected_tokens_leave_no_trace_in_the_state(kind: str, way: str) -> None:
    recurrence = make_recurrence(kind, torch.float32)
    right, wrong = make_inputs(recurrence, 2, LENGTH)
    expected = read(make_states(recurrence, form(recurrence, way)), right, [1] * LENGTH)
    states, position, outputs = make_states(recurrence, form(recurrence, way)), 0, []
    for kept in (1, 4, 2, 0, 3, 5, 1, 0, 4):  # the number of right tokens of five drafted
        mixed = torch.cat([right[: position + 1 + kept], wrong[position + 1 + kept :]])
        outputs.append(feed(states, mixed, position, 6, settled=position)[: 1 + kept])
        position += 1 + kept
    assert torch.equal(torch.cat(outputs), expected[:position])


@pytest.mark.parametrize("way", ["specification", "compiled"])
def test_rows_of_a_batch_do_not_affect_each_other(way: str) -> None:
    recurrence = make_recurrence("delta rule", torch.float32)
    x = make_inputs(recurrence, 3, LENGTH)
    alone = [read(make_states(recurrence, form(recurrence, way)), row, [8, 8, 8]) for row in x]
    states = make_states(recurrence, form(recurrence, way))
    starts = [0, 3, 7]
    for slot, start in enumerate(starts):
        if start:
            feed(states, x[slot], 0, start, slot)
    for _ in range(2):
        states.begin(0, starts, 8)
        outputs = states.run(0, torch.stack([row[start : start + 8] for row, start in zip(x, starts, strict=True)]))
        states.end()
        for row, start, expected in zip(outputs, starts, alone, strict=True):
            assert torch.equal(row, expected[start : start + 8])
        starts = [start + 8 for start in starts]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"key_size": 24}, "24 numbers in a key, not a multiple of 16"),
        ({"value_size": 1024}, "1024 numbers in a head; at most 576"),
    ],
)
def test_sizes_that_the_kernel_cannot_compute_are_named(change: dict[str, int], reason: str) -> None:
    recurrence = make_recurrence("delta rule", torch.float32)
    assert recurrence.heads is not None
    assert unsupported(recurrence) is None
    changed = dataclasses.replace(recurrence, heads=dataclasses.replace(recurrence.heads, **change))
    assert unsupported(changed) == reason


STATE_LENGTH = 200
RECURRENCE = make_recurrence("delta rule", torch.float32)
TEXT, OTHER = make_inputs(RECURRENCE, 2, STATE_LENGTH)


@cache
def expected() -> torch.Tensor:
    return read(make_states(RECURRENCE), TEXT, [1] * STATE_LENGTH)


def is_right(out: torch.Tensor, start: int) -> bool:
    return torch.allclose(out, expected()[start : start + len(out)], rtol=0, atol=1e-4)


@pytest.mark.slow
def test_a_forward_may_begin_at_any_position_after_the_final_one() -> None:
    states = make_states(RECURRENCE)
    feed(states, TEXT, 0, 30, settled=10)
    assert [states.checkpoint(0, limit) for limit in (5, 10, 20, 30, 99)] == [0, 10, 20, 30, 30]
    assert is_right(feed(states, TEXT, 17, 4, settled=17), 17)
    assert [states.checkpoint(0, limit) for limit in (16, 17, 40)] == [0, 17, 21]


@pytest.mark.slow
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
@settings(max_examples=8)
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
        elif position + 40 < STATE_LENGTH:
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
