"""Recurrent layers: the compiled form computes what the specification does, and bits do not depend on the forwards."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from slipstream.models.cpu.compiled_recurrence import CompiledRecurrence, agrees, unsupported
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.decoder.recurrence import Advance, Recurrence
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


@pytest.mark.pairwise
@pytest.mark.parametrize("way", ["specification", "compiled"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_has_the_same_bits_in_forwards_of_1_to_16_tokens(kind: str, dtype: torch.dtype, way: str) -> None:
    recurrence = make_recurrence(kind, dtype)
    compiled, x = form(recurrence, way), make_inputs(recurrence, 1, LENGTH)[0]
    one_by_one = read(make_states(recurrence, compiled), x, [1] * LENGTH)
    for width in range(2, 17):
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
        ({"value_size": 512}, "512 numbers in a head; at most 256"),
    ],
)
def test_sizes_that_the_kernel_cannot_compute_are_named(change: dict[str, int], reason: str) -> None:
    recurrence = make_recurrence("delta rule", torch.float32)
    assert recurrence.heads is not None
    assert unsupported(recurrence) is None
    changed = dataclasses.replace(recurrence, heads=dataclasses.replace(recurrence.heads, **change))
    assert unsupported(changed) == reason
