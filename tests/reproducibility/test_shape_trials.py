"""Backends that claim that forward shapes change no bit: a few trials confirm it, and a false claim is caught."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models.backend_capabilities import RowSegment, is_shape_independent
from slipstream.models.cpu.packed_linear import PackedLinear, compressed_or_packed, pack
from slipstream.models.cpu.quantized_linear import quantized
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from slipstream.reproducibility.calibration import TOTALS, TOTALS_IF_GUARANTEED, Calibration, calibrate
from slipstream.reproducibility.shape_trials import ATTENDED_LENGTHS, ATTENDED_UNITS, FURTHER_WIDTHS, TOGETHER, WIDTHS
from tests.support.markers import needs_kernels
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
from tests.support.tiny_models import VOCAB, fast, fresh

ALL_WIDTHS = tuple(sorted(WIDTHS + FURTHER_WIDTHS))
Convert = Callable[[nn.Linear], nn.Module]


class Claims(RoundingBackend):
    """Claims that shapes change no bit, true or not."""

    shape_independent = True


class ClaimsReading(ReadsLess):
    """Makes the same claim for the lengths that attention reads."""

    shape_independent = True


class ClaimsRagged(Claims):
    """Makes the same claim for ragged forwards; with `odd` their logits are off by a bit."""

    ragged, odd = True, False

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        out, at = torch.zeros(len(tokens), self.vocab_size, dtype=torch.float64), 0
        for segment in segments:
            end = len(tokens) if segment is segments[-1] else at + segment.count
            out[at:end] = RoundingBackend.forward(
                self, tokens[None, at:end], [segment.start], first_slot=segment.slot, logits=True
            )[0]
            at = end
        return out + BIT * self.odd


def unmeasured(calibration: Calibration) -> Calibration:
    """The calibration without its times."""
    return replace(calibration, milliseconds={}, totals=dict.fromkeys(calibration.totals, 0.0), every_total=False)


def test_a_true_claim_is_trusted_after_a_few_trials(caplog: pytest.LogCaptureFixture) -> None:
    sceptical, trusting = RoundingBackend(), Claims()
    trusted, tried = unmeasured(calibrate(trusting, BATCH)), unmeasured(calibrate(sceptical, BATCH))
    assert (trusted.widths, tried.widths) == (ALL_WIDTHS, WIDTHS) and trusted == replace(tried, widths=ALL_WIDTHS)
    timed = sum(shape == (1, width) for shape in trusting.shapes for width in range(2, 5))
    assert len(trusting.shapes) < len(sceptical.shapes) and timed and caplog.text == ""


@pytest.mark.parametrize("odd", [(1,), (2,), (3,), (5, 6), (16, 32), widths_without(8)])
def test_a_width_that_rounds_differently_is_found_despite_the_claim(
    odd: tuple[int, ...], caplog: pytest.LogCaptureFixture
) -> None:
    def deviates(rows: int, width: int, columns: Tensor, length: int) -> bool:
        return width in odd

    calibration = calibrate(Claims(deviates), BATCH)
    assert unmeasured(calibration) == unmeasured(calibration_of(deviates))
    assert calibration.widths == widths_without(*odd)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "Claims says that the shape of a forward changes no bit, but it does" in caplog.text


FALSE_CLAIMS: dict[str, Deviates] = {
    "in batches": lambda rows, width, columns, length: rows > 1 and width > 1,
    "in a batch of five": lambda rows, width, columns, length: rows == 5,
    "at the end of a prompt's chunk": lambda rows, width, columns, length: (width > 32) & (columns > 247),
    "in prompts": lambda rows, width, columns, length: width > 32,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FALSE_CLAIMS)
def test_other_false_claims_are_found_too(name: str) -> None:
    calibration = calibrate(Claims(FALSE_CLAIMS[name]), BATCH)
    assert (
        unmeasured(calibration) == unmeasured(calibration_of(FALSE_CLAIMS[name])) != unmeasured(calibration_of(never))
    )


def test_a_forward_that_stores_other_values_is_found_despite_the_claim() -> None:
    class Stores(Claims):
        def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
            out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
            if tokens.shape[1] == 1:
                for row, start in enumerate(starts):
                    self.slots[first_slot + row, start] += BIT
            return out

    assert calibrate(Stores(), BATCH).widths == widths_without(1)


def test_claims_about_attended_lengths_and_ragged_forwards_are_tried() -> None:
    assert calibrate(ClaimsReading(()), BATCH).attended_lengths == ATTENDED_LENGTHS
    result = calibrate(ClaimsReading((576,)), BATCH)
    assert result.attended_lengths == tuple(read for read in ATTENDED_LENGTHS if read != 576)
    assert tuple(calibrate(ClaimsRagged(), BATCH).totals) == TOTALS_IF_GUARANTEED
    odd_backend = ClaimsRagged()
    odd_backend.odd = True
    assert not calibrate(odd_backend, BATCH).totals


@pytest.mark.slow
def test_large_batches_are_tried_at_some_sizes_only() -> None:
    backend = Claims()
    calibrate(backend, 512)
    sizes = {rows for rows, width in backend.shapes if width == TOGETHER}
    assert {*range(2, 65), *range(80, 512, 16), *range(497, 513)} <= sizes and len(sizes) < 120


def test_a_short_context_is_calibrated_within_it() -> None:
    result = calibrate(Claims(max_length=96), BATCH)
    assert (result.widths, result.attended_unit, result.prompts) == (ALL_WIDTHS, ATTENDED_UNITS[0], True)


@pytest.mark.slow
@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_compiled_layers_claim_what_all_trials_find(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = fast(name, torch.bfloat16, head_dim=64)
    trusted = calibrate(backend, BATCH)
    assert (trusted.widths, trusted.attended_lengths, tuple(trusted.totals)) == (
        ALL_WIDTHS,
        ATTENDED_LENGTHS,
        TOTALS_IF_GUARANTEED,
    )
    assert trusted.shapes.totals == tuple(range(1, TOTALS_IF_GUARANTEED[-1] + 1))  # none is padded
    monkeypatch.setattr("slipstream.reproducibility.calibration.is_shape_independent", lambda backend: False)
    totals = dict.fromkeys(TOTALS, 0.0)
    assert unmeasured(calibrate(backend, BATCH)) == replace(unmeasured(trusted), widths=WIDTHS, totals=totals)


def product_of(linear: nn.Linear, outputs: int, other: Convert) -> nn.Module:
    """The compressed form of a layer; that of `other` if the layer has `outputs` outputs."""
    return other(linear) if linear.out_features == outputs else compressed_or_packed(linear)


@needs_kernels
@pytest.mark.parametrize(
    ("changes", "outputs", "other", "guaranteed"),
    [
        ({}, 0, PackedLinear, True),
        ({"head_dim": 608}, 0, PackedLinear, False),  # PyTorch computes attention
        ({}, VOCAB, PackedLinear, False),
        ({}, VOCAB, lambda linear: linear, False),
        ({}, 96, PackedLinear, False),  # gate and up
        ({}, 96, partial(quantized, bits="int4"), True),
    ],
)
def test_only_kernels_for_all_products_and_attention_make_shapes_independent(
    changes: dict[str, Any], outputs: int, other: Convert, guaranteed: bool
) -> None:
    model = fresh("llama", dtype=torch.bfloat16, **{"head_dim": 64} | changes)
    convert = partial(product_of, outputs=outputs, other=other)
    fuse(model, convert)
    pack(model, convert)
    backend = HFBackend(model)
    group_queries(backend)
    fuse_layers(backend)
    assert is_shape_independent(backend) is guaranteed


def test_pytorchs_kernels_do_not_make_shapes_independent() -> None:
    assert not is_shape_independent(fast("llama", torch.float32, head_dim=64))
    assert not is_shape_independent(HFBackend(fresh("llama", dtype=torch.bfloat16)))
