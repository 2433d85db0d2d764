"""Calibration: it finds exactly the forward shapes that agree to the bit, and says so when none do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.backends import Backend, Loaded, read_memory
from slipstream.backends.fused import fuse
from slipstream.backends.hf import HFBackend
from slipstream.backends.packed import pack
from slipstream.calibration import READS, REFERENCE, VIEWS, WIDTHS, Calibration, calibrate
from slipstream.known_shapes import remembered
from slipstream.memo import EXACT_FIT
from tiny import VOCAB, fresh, shared

BATCH = 8
BIT = 2.0**-30  # far below what any comparison with a tolerance would see
Deviates = Callable[[int, int, Tensor, int], Tensor | bool]


def never(rows: int, width: int, columns: Tensor, length: int) -> bool:
    return False


class RoundingBackend:
    """Whole-number logits of the tokens in memory, off by a bit where `deviates(rows, width, columns, length)`.

    columns: [width] where in the forward a token stands; length: how far the memory is read.
    """

    vocab_size, device = 7, torch.device("cpu")

    def __init__(self, deviates: Deviates = never, max_length: int = 1000) -> None:
        self.view, self.max_length, self.deviates = 1, max_length, deviates
        self.slots = torch.zeros(0, 0, dtype=torch.float64)
        self.shapes: list[tuple[int, int]] = []

    def reserve(self, rows: int, length: int) -> None:
        old = self.slots
        self.slots = old.new_zeros(max(rows, old.shape[0]), max(length, old.shape[1]))
        self.slots[: old.shape[0], : old.shape[1]] = old

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        rows, width = tokens.shape
        if logits:
            self.shapes.append((rows, width))
        length = -(-(max(starts) + width) // self.view) * self.view
        off = BIT * torch.as_tensor(self.deviates(rows, width, torch.arange(width), length), dtype=torch.float64)
        out = torch.zeros(rows, width, self.vocab_size, dtype=torch.float64)
        for row, start in enumerate(starts):
            slot = self.slots[first_slot + row]
            slot[start : start + width] = tokens[row].double() + 1
            seen = slot.cumsum(0)[start : start + width]
            out[row] = seen[:, None] * torch.arange(3, 3 + self.vocab_size) % 11
            out[row] += off[:, None] if off.ndim else off
        return out

    def copy(self, source: int, destination: int, length: int) -> None:
        self.slots[destination, :length] = self.slots[source, :length]


def found(deviates: Deviates, max_length: int = 1000) -> Calibration:
    return calibrate(RoundingBackend(deviates, max_length), BATCH)


def without(*widths: int) -> tuple[int, ...]:
    return tuple(width for width in WIDTHS if width not in widths)


def test_all_shapes_of_a_backend_without_rounding_agree() -> None:
    result = found(never)
    assert (result.widths, result.view, result.agrees) == (WIDTHS, VIEWS[0], True)


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
    assert (shapes.pad(1, 1), shapes.pad(1, 2), shapes.pad(3, 8)) == (2, 1, 3)


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
    assert (result.view, result.widths) == (512, WIDTHS)


def grows(rows: int, width: int, columns: Tensor, length: int) -> float:
    return length


def test_nothing_agrees_where_every_view_rounds_in_its_own_way() -> None:
    assert not found(grows).agrees  # type: ignore[arg-type]


def test_nothing_agrees_where_every_view_rounds_in_its_own_way_and_the_context_is_short() -> None:
    assert not found(grows, 700).agrees  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_a_difference_in_a_batch_of_another_size_is_caught(size: int) -> None:
    assert not found(lambda rows, width, columns, length: rows == size).agrees


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


def _loaded(backend: Backend, fingerprint: str = "one") -> Loaded:
    return Loaded(backend, "rounding", (), fingerprint=fingerprint)


def test_a_calibration_is_remembered_by_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    first, again, other = (RoundingBackend(lambda r, w, c, n, odd=odd: w == odd) for odd in (5, 6, 6))
    known = remembered(_loaded(first), BATCH)
    assert first.shapes and known.widths == without(5)
    assert remembered(_loaded(again), BATCH) == known and again.shapes == []
    assert remembered(_loaded(other, "two"), BATCH).widths == without(6) and other.shapes
    assert len(list((tmp_path / "calibration").iterdir())) == 2
    short = remembered(_loaded(ReadsLess((128,)), "three"), BATCH)
    assert short.reads and remembered(_loaded(again, "three"), BATCH) == short


@pytest.fixture
def shaky(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RoundingBackend:
    """The model of every decoder of the test: it depends on the batch."""
    backend = RoundingBackend(lambda rows, width, columns, length: rows > 1)
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path))
    monkeypatch.setattr("slipstream.decoder.load", lambda *given: _loaded(backend))
    return backend


def test_reproducible_is_refused_where_no_shapes_agree(shaky: RoundingBackend) -> None:
    with pytest.raises(UsageError, match=r"reproducible=True, but no set of .* allowed: 'auto' or False"):
        SpeculativeDecoder("rounding", reproducible=True)


def test_auto_says_so_where_no_shapes_agree(shaky: RoundingBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="slipstream"):
        made = SpeculativeDecoder("rounding")
    assert "no forward shapes agree to the bit here" in caplog.text
    assert not made.reproducible and made._target_session.shapes == EXACT_FIT
    assert len(made.generate([1, 2, 3], SamplingParams(max_tokens=3)).token_ids) == 3


@pytest.mark.parametrize(("slower", "kept"), [(1.2, True), (1.3, False)])
def test_auto_keeps_to_agreeing_shapes_if_they_cost_little(
    slower: float, kept: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cost = Calibration(widths=(8, 16), view=256, milliseconds={1: 1.0, 8: slower})
    monkeypatch.setattr("slipstream.known_shapes.remembered", lambda loaded, rows: cost)
    with caplog.at_level(logging.INFO, logger="slipstream"):
        assert SpeculativeDecoder("toy").reproducible is kept
    assert ("would cost 30%" in caplog.text) is not kept
    assert SpeculativeDecoder("toy", reproducible=True).reproducible
    assert not SpeculativeDecoder("toy", reproducible=False).reproducible


def test_a_reproducible_decoder_keeps_to_the_shapes_that_agree(
    shaky: RoundingBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    shaky.deviates = lambda rows, width, columns, length: width < 6
    made = SpeculativeDecoder("rounding", drafter="ngram", num_draft_tokens=3, reproducible=True)
    shaky.shapes.clear()
    made.generate([[1, 2, 3] * 9, [4, 5]], SamplingParams(max_tokens=12))
    assert {width for _, width in shaky.shapes} <= {6, 7, 8, 16, 32} and shaky.view == VIEWS[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fast", [False, True])
def test_the_shapes_found_for_a_transformer_give_the_same_bits(dtype: torch.dtype, fast: bool) -> None:
    backend = HFBackend(fresh("llama", dtype=dtype) if fast else shared("llama", 0, dtype))
    if fast:
        fuse(backend.model)
        pack(backend.model)
        backend.group_queries()
        backend.shorten_layers()
    result = calibrate(backend, BATCH)
    assert result.agrees and bool(result.reads) == fast
    tokens = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(3))
    read_memory(backend, result.view, result.reads)
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
    pieces = []
    for fed in range(0, REFERENCE, width):
        inputs = torch.stack([torch.cat([tokens, tokens])[at + fed : at + fed + width] for at in starts])
        pieces.append(backend.forward(inputs, [at + fed for at in starts], first_slot=0, logits=True)[0])
    return torch.cat(pieces)[:REFERENCE]


@pytest.mark.parametrize("odd", [32, 64, 224, 256])
def test_prompt_chunks_that_differ_are_kept_whole(odd: int) -> None:
    free, bound = found(never), found(lambda rows, width, columns, length: (width == odd) & (columns == odd - 1))
    assert free.prompts and free.shapes.reuse == 1
    assert not bound.prompts and bound.shapes.reuse == bound.shapes.chunk == 256


class ReadsLess(RoundingBackend):
    """Rounds otherwise where it reads one of `odd` instead of the whole view.

    prompts: whether prompts that read less agree at all.
    """

    def __init__(self, odd: tuple[int, ...], prompts: bool = True) -> None:
        super().__init__()
        self.reads, self.odd, self.prompts = tuple[int, ...](), odd, prompts

    def reads_agree(self, widths: Sequence[int], read: int, whole: int) -> bool:
        assert tuple(widths) == WIDTHS and read <= whole and whole % self.view == 0
        return read not in self.odd

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
        end = max(starts) + tokens.shape[1]
        read = next((read for read in self.reads if read >= end), 0)
        differs = read in self.odd or (not self.prompts and bool(self.reads) and tokens.shape[1] > max(WIDTHS))
        return out + BIT * differs


def test_what_forwards_may_read_is_found_one_by_one() -> None:
    result = calibrate(ReadsLess((192, 256, 576)), BATCH)
    assert result.reads == result.shapes.reads == tuple(read for read in READS if read not in (192, 256, 576))
    assert result.widths == WIDTHS and result.prompts
    assert found(never).reads == ()  # a backend that always reads its whole view


def test_the_memory_is_read_whole_where_prompts_agree_only_so() -> None:
    result = calibrate(ReadsLess((), prompts=False), BATCH)
    assert (result.reads, result.widths, result.prompts) == ((), WIDTHS, True)


def test_a_single_row_is_padded_past_widths_that_are_no_faster_than_a_wider_one() -> None:
    times = {1: 9.0, 2: 10.0, 3: 12.0, 4: 11.0, 5: 13.0, 6: 14.0, 7: 15.0, 8: 13.9}
    shapes = Calibration((2, 3, 4, 5, 6, 7, 8, 16), 512, times).shapes
    assert [shapes.pad(width, 1) for width in range(1, 10)] == [2, 2, 4, 4, 5, 8, 8, 8, 16]
    assert [shapes.pad(width, 4) for width in range(1, 10)] == [2, 2, 3, 4, 5, 6, 7, 8, 16]
