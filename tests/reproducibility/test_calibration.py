"""Calibration finds exactly the forward shapes that agree to the bit, and reports when none do."""

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
from tests.support.rounding_backends import (
    BATCH,
    BIT,
    Deviates,
    ReadsLess,
    RoundingBackend,
    calibration_of,
    never,
    widths_without,
)
from tests.support.tiny_models import VOCAB, fresh, shared


def test_all_shapes_of_a_backend_without_rounding_agree() -> None:
    result = calibration_of(never)
    assert (result.widths, result.attended_unit, result.agrees) == (WIDTHS, ATTENDED_UNITS[0], True)


@pytest.mark.parametrize("odd", [(1,), (1, 2), (5, 6), (1, 2, 4, 5, 6), (16, 32), (32,), widths_without(REFERENCE)])
def test_exactly_the_widths_that_round_like_the_reference_are_kept(odd: tuple[int, ...]) -> None:
    result = calibration_of(lambda rows, width, columns, length: width in odd)
    assert result.widths == widths_without(*odd) and result.agrees
    assert set(result.shapes.widths) == set(result.widths)


def test_widths_that_agree_with_each_other_but_not_with_the_reference_are_refused() -> None:
    assert calibration_of(lambda rows, width, columns, length: width != REFERENCE).widths == (REFERENCE,)


def late(width: int, column: int) -> Deviates:
    return lambda rows, this_width, columns, length: (columns == column) & (this_width == width) & (rows == 1)


@pytest.mark.parametrize(("width", "column"), [(2, 1), (4, 3), (5, 4), (16, 1), (16, 15), (32, 9), (32, 31)])
def test_a_difference_at_a_later_position_is_caught(width: int, column: int) -> None:
    assert calibration_of(late(width, column)).widths == widths_without(width)


def test_a_forward_that_stores_other_values_is_caught_by_the_next() -> None:
    class Stores(RoundingBackend):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if tokens.shape[1] == 4:  # its own logits are right, but not what it stores
                for row, start in enumerate(starts):
                    self.slots[first_slot + row, start] += BIT
            return out

    assert calibrate(Stores(), BATCH).widths == widths_without(4)


def test_a_width_that_disagrees_only_for_a_single_row_is_kept_for_several() -> None:
    result = calibration_of(lambda rows, width, columns, length: rows == 1 and width in (1, 3))
    assert (result.widths, result.together) == (widths_without(1, 3), (1, 3))
    shapes = replace(result, milliseconds={}).shapes  # ignores how fast a width is
    assert (shapes.widths, shapes.alone) == (WIDTHS, widths_without(1, 3))
    assert (shapes.width_for(1, 1), shapes.width_for(1, 2), shapes.width_for(3, 8)) == (2, 1, 3)


@pytest.mark.parametrize("size", [2, 5, 8])
def test_a_batch_that_stores_other_values_is_caught_by_the_next_forward(size: int) -> None:
    class Stores(RoundingBackend):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if tokens.shape[1] == 1 and len(starts) == size:
                self.slots[first_slot, starts[0]] += BIT
            return out

    alone = Stores(lambda rows, width, columns, length: rows == 1 and width == 1)
    assert calibrate(alone, BATCH).together == ()


def test_a_width_that_depends_on_the_batch_is_refused() -> None:
    assert calibration_of(
        lambda rows, width, columns, length: (rows > 1) & (width == 4) & (columns == 3)
    ).widths == widths_without(4)


@pytest.mark.parametrize("column", [0, 3])
def test_nothing_agrees_where_every_width_depends_on_the_batch(column: int) -> None:
    result = calibration_of(lambda rows, width, columns, length: (rows > 1) & (columns == min(column, width - 1)))
    assert not result.agrees and set(result.widths).isdisjoint(range(33))


def test_the_attended_unit_is_the_first_that_agrees_at_every_length() -> None:
    result = calibration_of(lambda rows, width, columns, length: length % 512 != 0)
    assert (result.attended_unit, result.widths) == (512, WIDTHS)


def grows(rows: int, width: int, columns: Tensor, length: int) -> float:
    return length


@pytest.mark.parametrize("context", [(), (700,)])
def test_nothing_agrees_where_rounding_depends_on_the_attended_length(context: tuple[int, ...]) -> None:
    assert not calibration_of(grows, *context).agrees  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_difference_in_a_batch_of_another_size_is_caught(size: int) -> None:
    assert not calibration_of(lambda rows, width, columns, length: rows == size).agrees


@pytest.mark.parametrize("last", [1, 2])
def test_the_last_rows_of_a_batch_that_round_differently_are_caught(last: int) -> None:
    class Remainder(RoundingBackend):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if len(starts) > 4 and tokens.shape[1] % 2:  # as a matrix product may compute what its tiles leave over
                out[-last, -1] += BIT
            return out

    assert calibrate(Remainder(), BATCH).widths == widths_without(1, 3, 5, 7)


class Bounded(RoundingBackend):
    """Fails at positions beyond its context."""

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        assert max(starts) + tokens.shape[1] <= self.max_length
        return super().forward(tokens, starts, first_slot=first_slot, logits=logits)


def test_a_short_context_is_calibrated_within_it() -> None:
    result = calibrate(Bounded(max_length=96), BATCH)
    assert result.widths == WIDTHS
    result = calibrate(Bounded(lambda rows, width, columns, length: rows == 1 and width != 8, max_length=96), BATCH)
    assert (result.widths, result.together) == ((8,), widths_without(8))


@pytest.mark.slow
@pytest.mark.each_value
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
    backend.reserve(3, len(tokens) + 256)
    for start in (0, 90, 300):
        starts = [start, 11, 250]
        for slot, end in enumerate(starts):
            for position in range(0, end, REFERENCE):
                chunk = tokens[None, position : min(position + REFERENCE, end)]
                backend.forward(chunk, [position], first_slot=slot, logits=False)
        expected = _logits(backend, tokens, REFERENCE, starts[:1])
        for width in result.widths:
            for rows in (1, 3):
                assert torch.equal(_logits(backend, tokens, width, starts[:rows]), expected), (width, start, rows)


def _logits(backend: HFBackend, tokens: Tensor, width: int, starts: list[int]) -> Tensor:
    """Logits of the first row's next eight positions, in forwards of `width` tokens and a row per start."""
    segments = []
    for offset in range(0, REFERENCE, width):
        inputs = torch.stack([torch.cat([tokens, tokens])[start + offset :][:width] for start in starts])
        segments.append(backend.forward(inputs, [start + offset for start in starts], first_slot=0, logits=True)[0])
    return torch.cat(segments)[:REFERENCE]


@pytest.mark.parametrize("odd", [32, 64, 224, 256])
def test_where_prompt_chunks_differ_prompts_are_reused_in_whole_chunks(odd: int) -> None:
    agreeing = calibration_of(never)
    differing = calibration_of(lambda rows, width, columns, length: (width == odd) & (columns == odd - 1))
    assert agreeing.prompts and agreeing.shapes.reuse == 1
    assert not differing.prompts and differing.shapes.reuse == differing.shapes.chunk == 256


def test_every_attended_length_is_tried_separately() -> None:
    result = calibrate(ReadsLess((192, 256, 576)), BATCH)
    assert (
        result.attended_lengths
        == result.shapes.attended_lengths
        == tuple(read for read in ATTENDED_LENGTHS if read not in (192, 256, 576))
    )
    assert result.widths == WIDTHS and result.prompts
    assert calibration_of(never).attended_lengths == ()  # this backend always reads its whole slots


def test_the_whole_cache_is_read_where_prompts_agree_only_then() -> None:
    result = calibrate(ReadsLess((), prompts=False), BATCH)
    assert (result.attended_lengths, result.widths, result.prompts) == ((), WIDTHS, True)


def test_a_single_row_is_padded_past_widths_that_are_no_faster_than_a_wider_one() -> None:
    times = {1: 9.0, 2: 10.0, 3: 12.0, 4: 11.0, 5: 13.0, 6: 14.0, 7: 15.0, 8: 13.9}
    shapes = Calibration((2, 3, 4, 5, 6, 7, 8, 16), 512, times).shapes
    assert [shapes.width_for(width, 1) for width in range(1, 10)] == [2, 2, 4, 4, 5, 8, 8, 8, 16]
    assert [shapes.width_for(width, 4) for width in range(1, 10)] == [2, 2, 3, 4, 5, 6, 7, 8, 16]


def test_no_row_is_padded_where_every_number_of_tokens_agrees() -> None:
    times = {1: 7.29, 2: 7.15, 3: 7.18, 4: 7.48}
    one_by_one = Calibration((1, 2, 3, 4), 256, times)
    assert [one_by_one.shapes.width_for(width, 1) for width in times] == [3, 3, 3, 4]
    assert [replace(one_by_one, every_total=True).shapes.width_for(width, 1) for width in times] == [1, 2, 3, 4]


def test_progress_is_reported_in_order_up_to_the_end() -> None:
    progress: list[float] = []
    calibrate(RoundingBackend(), BATCH, progress.append)
    assert progress == sorted(progress) and len(progress) > 2 * len(WIDTHS) and progress[0] > 0 and progress[-1] <= 1


@pytest.mark.parametrize(("kinds", "layers"), [("aaaa", [0, 1]), ("abab", [0, 1, 2, 3]), ("aabaab", [0, 1, 2, 5])])
def test_two_layers_of_every_kind_are_tried(kinds: str, layers: list[int]) -> None:
    assert first_of_each(kinds) == layers


@pytest.mark.exhaustive
def test_calibrating_a_few_layers_finds_what_calibrating_all_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = HFBackend(
        fresh(
            "gemma3",
            num_hidden_layers=7,
            layer_types=["sliding_attention", "full_attention"] * 3 + ["sliding_attention"],
        )
    )
    sample = trial_backend(backend)
    assert sample is not backend
    of_sample = calibrate(backend, BATCH)
    monkeypatch.setattr(shape_trials, "trial_backend", lambda backend: backend)
    of_all_layers = calibrate(backend, BATCH)
    assert of_sample.agrees and list(of_sample.totals) == list(of_all_layers.totals)
    assert replace(of_sample, milliseconds={}, totals={}) == replace(of_all_layers, milliseconds={}, totals={})
