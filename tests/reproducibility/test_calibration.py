"""Calibration: it finds exactly the forward shapes that agree to the bit, and says so when none do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from slipstream.core.interfaces import set_attended_lengths
from slipstream.models.cpu.packed_linear import pack
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from slipstream.reproducibility import shape_trials
from slipstream.reproducibility.calibration import Calibration, calibrate
from slipstream.reproducibility.shape_trials import (
    ATTENDED_LENGTHS,
    ATTENDED_UNITS,
    REFERENCE,
    WIDTHS,
    first_of_each,
    trial_backend,
)
from tests.support.rounding_backends import BATCH, BIT, Deviates, ReadsLess, RoundingBackend, found, never, without
from tests.support.tiny_models import VOCAB, fresh, shared


def test_all_shapes_of_a_backend_without_rounding_agree() -> None:
    result = found(never)
    assert (result.widths, result.attended_unit, result.agrees) == (WIDTHS, ATTENDED_UNITS[0], True)


@pytest.mark.parametrize("odd", [(1,), (1, 2), (5, 6), (1, 2, 4, 5, 6), (16, 32), (32,), without(REFERENCE)])
def test_exactly_the_widths_that_round_like_the_reference_are_kept(odd: tuple[int, ...]) -> None:
    result = found(lambda rows, width, columns, length: width in odd)
    assert result.widths == without(*odd) and result.agrees
    assert set(result.shapes.widths) == set(result.widths)


def test_widths_that_agree_with_each_other_but_not_with_the_reference_are_refused() -> None:
    assert found(lambda rows, width, columns, length: width != REFERENCE).widths == (REFERENCE,)


def late(width: int, column: int) -> Deviates:
    return lambda rows, this, columns, length: (columns == column) & (this == width) & (rows == 1)


@pytest.mark.parametrize(("width", "column"), [(2, 1), (4, 3), (5, 4), (16, 1), (16, 15), (32, 9), (32, 31)])
def test_a_difference_at_a_later_position_is_caught(width: int, column: int) -> None:
    assert found(late(width, column)).widths == without(width)


def test_what_one_forward_stores_is_compared_through_the_next() -> None:
    class Stores(RoundingBackend):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if tokens.shape[1] == 4:  # its own logits are right, what it leaves behind is not
                for row, start in enumerate(starts):
                    self.slots[first_slot + row, start] += BIT
            return out

    assert calibrate(Stores(), BATCH).widths == without(4)


def test_a_width_that_disagrees_only_for_a_single_row_is_kept_for_several() -> None:
    result = found(lambda rows, width, columns, length: rows == 1 and width in (1, 3))
    assert (result.widths, result.together) == (without(1, 3), (1, 3))
    shapes = replace(result, milliseconds={}).shapes  # how fast a width is does not count here
    assert (shapes.widths, shapes.alone) == (WIDTHS, without(1, 3))
    assert (shapes.width_for(1, 1), shapes.width_for(1, 2), shapes.width_for(3, 8)) == (2, 1, 3)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_what_a_batch_stores_is_compared_through_the_next_forward(size: int) -> None:
    class Stores(RoundingBackend):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if tokens.shape[1] == 1 and len(starts) == size:
                self.slots[first_slot, starts[0]] += BIT
            return out

    alone = Stores(lambda rows, width, columns, length: rows == 1 and width == 1)
    assert calibrate(alone, BATCH).together == ()


def test_a_width_that_depends_on_the_batch_is_refused() -> None:
    assert found(lambda rows, width, columns, length: (rows > 1) & (width == 4) & (columns == 3)).widths == without(4)


@pytest.mark.parametrize("column", [0, 3])
def test_nothing_agrees_where_every_width_depends_on_the_batch(column: int) -> None:
    result = found(lambda rows, width, columns, length: (rows > 1) & (columns == min(column, width - 1)))
    assert not result.agrees and set(result.widths).isdisjoint(range(33))


def test_the_view_is_the_first_that_agrees_at_every_length() -> None:
    result = found(lambda rows, width, columns, length: length % 512 != 0)
    assert (result.attended_unit, result.widths) == (512, WIDTHS)


def grows(rows: int, width: int, columns: Tensor, length: int) -> float:
    return length


def test_nothing_agrees_where_every_view_rounds_in_its_own_way() -> None:
    assert not found(grows).agrees  # type: ignore[arg-type]


def test_nothing_agrees_where_every_view_rounds_in_its_own_way_and_the_context_is_short() -> None:
    assert not found(grows, 700).agrees  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_difference_in_a_batch_of_another_size_is_caught(size: int) -> None:
    assert not found(lambda rows, width, columns, length: rows == size).agrees


@pytest.mark.parametrize("last", [1, 2])
def test_rows_at_the_end_of_a_batch_that_round_otherwise_are_caught(last: int) -> None:
    class Remainder(RoundingBackend):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if len(starts) > 4 and tokens.shape[1] % 2:  # as a product of matrices may compute what its tiles leave
                out[-last, -1] += BIT
            return out

    assert calibrate(Remainder(), BATCH).widths == without(1, 3, 5, 7)


class Bounded(RoundingBackend):
    """Has no positions beyond its context."""

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        assert max(starts) + tokens.shape[1] <= self.max_length
        return super().forward(tokens, starts, first_slot=first_slot, logits=logits)


def test_a_short_context_is_calibrated_within_it() -> None:
    result = calibrate(Bounded(max_length=96), BATCH)
    assert result.widths == WIDTHS
    result = calibrate(Bounded(lambda rows, width, columns, length: rows == 1 and width != 8, max_length=96), BATCH)
    assert (result.widths, result.together) == ((8,), without(8))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast", [False, True])
def test_the_shapes_found_for_a_transformer_give_the_same_bits(dtype: torch.dtype, fast: bool) -> None:
    backend = HFBackend(fresh("llama", dtype=dtype) if fast else shared("llama", 0, dtype))
    if fast:
        fuse(backend.model)
        pack(backend.model)
        group_queries(backend)
        fuse_layers(backend)
    result = calibrate(backend, BATCH)
    assert result.agrees and bool(result.attended_lengths) == fast
    tokens = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(3))
    set_attended_lengths(backend, result.attended_unit, result.attended_lengths)
    for start in (0, 90, 300):
        expected = _logits(backend, tokens, start, REFERENCE, [start])
        for width in result.widths:
            for starts in ([start], [start, 11, 250]):
                assert torch.equal(_logits(backend, tokens, start, width, starts), expected), (width, starts)


def _logits(backend: HFBackend, tokens: Tensor, start: int, width: int, starts: list[int]) -> Tensor:
    """Logits of the eight positions from `start` on, in forwards of `width` tokens of as many rows as starts."""
    backend.reserve(len(starts), len(tokens) + 256)
    for slot, at in enumerate(starts):
        for begin in range(0, at, REFERENCE):
            backend.forward(tokens[None, begin : begin + REFERENCE], [begin], first_slot=slot, logits=False)
    segments = []
    for fed in range(0, REFERENCE, width):
        inputs = torch.stack([torch.cat([tokens, tokens])[at + fed : at + fed + width] for at in starts])
        segments.append(backend.forward(inputs, [at + fed for at in starts], first_slot=0, logits=True)[0])
    return torch.cat(segments)[:REFERENCE]


@pytest.mark.parametrize("odd", [32, 64, 224, 256])
def test_prompt_chunks_that_differ_are_kept_whole(odd: int) -> None:
    free, bound = found(never), found(lambda rows, width, columns, length: (width == odd) & (columns == odd - 1))
    assert free.prompts and free.shapes.reuse == 1
    assert not bound.prompts and bound.shapes.reuse == bound.shapes.chunk == 256


def test_what_forwards_may_read_is_found_one_by_one() -> None:
    result = calibrate(ReadsLess((192, 256, 576)), BATCH)
    assert (
        result.attended_lengths
        == result.shapes.attended_lengths
        == tuple(read for read in ATTENDED_LENGTHS if read not in (192, 256, 576))
    )
    assert result.widths == WIDTHS and result.prompts
    assert found(never).attended_lengths == ()  # a backend that always reads all of its slots


def test_the_memory_is_read_whole_where_prompts_agree_only_so() -> None:
    result = calibrate(ReadsLess((), prompts=False), BATCH)
    assert (result.attended_lengths, result.widths, result.prompts) == ((), WIDTHS, True)


def test_a_single_row_is_padded_past_widths_that_are_no_faster_than_a_wider_one() -> None:
    times = {1: 9.0, 2: 10.0, 3: 12.0, 4: 11.0, 5: 13.0, 6: 14.0, 7: 15.0, 8: 13.9}
    shapes = Calibration((2, 3, 4, 5, 6, 7, 8, 16), 512, times).shapes
    assert [shapes.width_for(width, 1) for width in range(1, 10)] == [2, 2, 4, 4, 5, 8, 8, 8, 16]
    assert [shapes.width_for(width, 4) for width in range(1, 10)] == [2, 2, 3, 4, 5, 6, 7, 8, 16]


def test_progress_is_reported_in_order_up_to_the_end() -> None:
    told: list[float] = []
    calibrate(RoundingBackend(), BATCH, told.append)
    assert told == sorted(told) and len(told) > 2 * len(WIDTHS) and told[0] > 0 and told[-1] <= 1


@pytest.mark.parametrize(("kinds", "chosen"), [("aaaa", [0, 1]), ("abab", [0, 1, 2, 3]), ("aabaab", [0, 1, 2, 5])])
def test_two_layers_of_every_kind_are_tried(kinds: str, chosen: list[int]) -> None:
    assert first_of_each(kinds) == chosen


@pytest.mark.slow
def test_a_few_layers_find_what_all_of_them_find(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HFBackend(
        fresh(
            "gemma3",
            num_hidden_layers=7,
            layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        )
    )
    few = trial_backend(backend)
    assert few is not backend
    found = calibrate(backend, BATCH)
    monkeypatch.setattr(shape_trials, "trial_backend", lambda whole: whole)
    everything = calibrate(backend, BATCH)
    assert found.agrees and list(found.totals) == list(everything.totals)
    assert replace(found, milliseconds={}, totals={}) == replace(everything, milliseconds={}, totals={})
