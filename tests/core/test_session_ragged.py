"""Ragged forwards: they equal rectangular ones, prompts share them, and calibration keeps only those that agree."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.interfaces import Backend, set_attended_lengths
from slipstream.core.kv_slots import EXACT_FIT, Shapes
from slipstream.core.session import Rectangle
from slipstream.core.types import Row
from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.decoder.cache import lay_out
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.hf.backend import HFBackend
from slipstream.models.layouts import RaggedLayout, end_to_end, last_of_each, make_session, portions
from slipstream.reproducibility.calibration import TOTALS, calibrate
from tests.support.markers import mostly_slow
from tests.support.rounding_backends import BATCH, BIT, RoundingBackend
from tests.support.tiny_models import ARCHITECTURES, VOCAB, RaggedHash, fast, fresh, prompts, shared

WIDTHS = (1, 2, 4, 8, 16, 32)
CONTEXTS = (100, 7, 33, 64)
OPTIONS = SamplingParams(max_tokens=100)


def backend_of(name: str) -> HFBackend:
    backend = fast(name)
    set_attended_lengths(backend, 256, EXACT_FIT.attended_lengths)
    return backend


def tokens_of(rows: int, length: int = 200) -> Tensor:
    return torch.randint(0, VOCAB, (rows, length), generator=torch.Generator().manual_seed(4))


def one_by_one(backend: HFBackend, tokens: Tensor, segments: Sequence[RowSegment]) -> Tensor:
    """Logits of the segments' tokens, [T, V], each segment in a forward of its own."""
    parts = []
    for row, segment in zip(tokens, segments, strict=True):
        tokens_of_row = row[None, segment.start : segment.start + segment.count]
        parts.append(backend.forward(tokens_of_row, [segment.start], first_slot=segment.slot, logits=True)[0])
    return torch.cat(parts)


def cut_out(tokens: Tensor, segments: Sequence[RowSegment], padding: int = 0) -> Tensor:
    parts = [row[segment.start : segment.start + segment.count] for row, segment in zip(tokens, segments, strict=True)]
    return torch.cat([*parts, torch.zeros(padding, dtype=torch.int64)])


@pytest.mark.pairwise
@pytest.mark.parametrize("widths", [WIDTHS, ()], ids=["padded", "exact"])
@pytest.mark.parametrize("counts", [(1, 1, 1, 1), (3, 1, 2, 5), (1, 16, 1, 2), (21, 1, 1, 9), (8, 8, 8, 8)], ids=str)
@pytest.mark.parametrize("name", mostly_slow(["llama", "qwen3", "gemma3", "mistral"], "llama"))
def test_a_ragged_forward_equals_a_forward_of_each_row(
    name: str, counts: tuple[int, ...], widths: tuple[int, ...]
) -> None:
    backend, tokens = backend_of(name), tokens_of(4)
    assert backend.ragged
    backend.reserve(4, 256)
    for slot, context in enumerate(CONTEXTS):
        backend.forward(tokens[slot : slot + 1, :context], [0], first_slot=slot, logits=False)
    segments = [RowSegment(slot, CONTEXTS[slot], count) for slot, count in enumerate(counts)]
    for padding in (0, 3):
        inputs = cut_out(tokens, segments, padding)
        logits = backend.forward_ragged(inputs, segments, widths=widths)
        assert logits.shape == (sum(counts) + padding, VOCAB)
        columns = torch.tensor([sum(counts) - 1, 0])
        selected = backend.forward_ragged(inputs, segments, widths=widths, columns=columns)
        expected = one_by_one(backend, tokens, segments)
        torch.testing.assert_close(logits[: sum(counts)], expected, rtol=1e-4, atol=2e-5)
        torch.testing.assert_close(selected, expected[columns], rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("slots", [(0, 1, 2), (2, 0, 3)])
def test_prompts_read_in_one_forward_score_as_if_read_one_by_one(name: str, slots: tuple[int, ...]) -> None:
    backend, tokens = backend_of(name), tokens_of(3)
    backend.reserve(4, 256)
    segments = [RowSegment(slot, 0, count) for slot, count in zip(slots, (70, 9, 97), strict=True)]
    backend.forward_ragged(cut_out(tokens, segments), segments, widths=None, columns=torch.tensor([0]))
    later = [RowSegment(slot, segment.count, 20) for slot, segment in zip(slots, segments, strict=True)]
    logits = backend.forward_ragged(cut_out(tokens, later, 4), later, widths=None)[:60]
    reference = backend_of(name)
    reference.reserve(4, 256)
    one_by_one(reference, tokens, segments)
    torch.testing.assert_close(logits, one_by_one(reference, tokens, later), rtol=1e-4, atol=2e-5)


def test_a_long_row_attends_on_its_own_where_a_wide_rectangle_would_cost_more() -> None:
    layout = lay_out([RowSegment(i, 10, count) for i, count in enumerate((1, 16, 1, 1, 2, 1, 1, 1))], 24, WIDTHS)
    assert layout.shape == (8, 2) and [(cut.row, cut.width, cut.count) for cut in layout.cuts] == [(1, 16, 16)]
    layout = lay_out([RowSegment(i, 10, 5) for i in range(4)], 20, WIDTHS)
    assert layout.shape == (4, 8) and not layout.cuts


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_only_fused_layers_have_ragged_forwards(name: str) -> None:
    plain, fused = HFBackend(shared(name)), backend_of(name)
    assert isinstance(make_session(plain).layout, Rectangle) and not plain.ragged
    session = make_session(fused)
    assert fused.ragged == any(map(is_fused, fused.model.modules())) == isinstance(session.layout, RaggedLayout)
    unknown = make_session(fused, Shapes((2, 4, 8), 64))  # nothing says which numbers of tokens agree
    assert session.num_tokens(2, 3) == (5 if fused.ragged else None) and unknown.num_tokens(2, 3) is None


def new_row(index: int, tokens: list[int]) -> Row:
    return Row(index, tokens, OPTIONS, seed=0)


def test_a_rectangular_forward_is_chosen_where_it_has_no_more_tokens() -> None:
    backend = RaggedHash()
    session = make_session(backend, Shapes((1, 4, 8, 16), 64, totals=(8, 16)))
    session.reserve(2, 64)
    rows = [new_row(0, [1, 2, 3]), new_row(1, [4, 5])]
    session.prefill(rows)
    backend.forwards.clear(), backend.together.clear()
    for lengths, together in (([3, 3], False), ([0, 7], False), ([3, 0], False), ([0, 8], True), ([15, 0], False)):
        draft = torch.zeros(2, max(lengths), dtype=torch.int64)
        session.score(rows, draft, lengths)
        assert bool(backend.together) == together, lengths
        backend.forwards.clear(), backend.together.clear()


def test_prompts_are_read_together_and_common_beginnings_once() -> None:
    backend = RaggedHash()
    session = make_session(backend, Shapes((1, 4, 8, 16), 64, totals=(8, 16)))
    session.reserve(5, 200)
    common = [5] * 20
    texts = [[*common, *[i] * 30] for i in (1, 2, 3)] + [[6] * 9 + [4] * 40, [*common, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1]]
    session.prefill([new_row(i, text) for i, text in enumerate(texts)])
    # the first text with the one that shares nothing; then what two others lack; the last is read within those
    assert session.prefill_tokens == (49 + 48) + (29 + 29)
    expected = [([48], 48), ([1, 47], 64), ([1], 16), ([29, 19], 64), ([10], 16)]
    assert backend.together == expected


def test_prompts_read_together_are_cut_into_chunks() -> None:
    needs = [RowSegment(3, 5, 30), RowSegment(0, 0, 4), RowSegment(1, 9, 50)]
    assert [*portions(needs, 40)] == [
        [RowSegment(3, 5, 30), RowSegment(0, 0, 4), RowSegment(1, 9, 6)],
        [RowSegment(1, 15, 40)],
        [RowSegment(1, 55, 4)],
    ]
    assert [*portions([], 40)] == []
    assert end_to_end([[1, 2], [], [3]], 5).tolist() == [1, 2, 3, 0, 0]


def test_last_of_each_gives_each_row_its_last_logits_and_repeats_the_final_one() -> None:
    logits = torch.arange(9)[:, None].expand(9, 2)
    last = last_of_each(logits, [2, 4, 1], [1, 3, 1], 3)
    assert last[..., 0].tolist() == [[1, 1, 1], [3, 4, 5], [6, 6, 6]]


@pytest.mark.slow
@pytest.mark.each_value
@pytest.mark.parametrize("drafter", ["none", "ngram", "model"])
@pytest.mark.parametrize("reproducible", [False, True])
def test_a_batch_has_the_texts_its_rows_have_alone(drafter: str, reproducible: bool) -> None:
    texts = prompts((40, 3, 90, 17, 200), seed=2)
    draft = fresh("llama", seed=0) if drafter == "model" else None
    decoder = SpeculativeDecoder(
        fresh("llama"), draft, drafter=drafter, fast=True, reproducible=reproducible, num_draft_tokens="auto"
    )
    assert isinstance(decoder._target_session.layout, RaggedLayout)
    params = [SamplingParams(max_tokens=20 + i, num_draft_tokens=n) for i, n in enumerate((None, 2, 9, 0, None))]
    together = decoder.generate(texts, params)
    for text, options, result in zip(texts, params, together, strict=True):
        decoder.forget()
        assert decoder.generate(text, options).token_ids == result.token_ids


class RaggedRounding(RoundingBackend):
    """Off by a bit in ragged forwards of `odd` tokens and, unless `prompts`, in those of prompts."""

    ragged = True

    def __init__(self, odd: tuple[int, ...] = (), prompts: bool = True, max_length: int = 1000) -> None:
        super().__init__(max_length=max_length)
        self.odd, self.prompts = odd, prompts

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        assert max(segment.start + segment.count for segment in segments) <= self.max_length
        logits = torch.zeros(len(tokens), self.vocab_size, dtype=torch.float64)
        differs, first = (len(tokens) in self.odd) if widths is not None else not self.prompts, 0
        for segment in segments:
            part = tokens[None, first : first + segment.count]
            logits[first : first + segment.count] = self.forward(
                part, [segment.start], first_slot=segment.slot, logits=True
            )[0]
            if differs:
                self.slots[segment.slot, segment.start + segment.count - 1] += BIT
            first += segment.count
        return logits + BIT * differs


@pytest.mark.parametrize("odd", [(), (8,), (24, 40), TOTALS], ids=str)
def test_calibration_keeps_exactly_the_numbers_of_tokens_that_agree(odd: tuple[int, ...]) -> None:
    calibration = calibrate(RaggedRounding(odd), BATCH)
    kept = tuple(total for total in TOTALS if total not in odd)
    assert tuple(calibration.totals) == kept and set(calibration.shapes.totals) <= set(kept)
    assert all(ms > 0 for ms in calibration.totals.values())


@pytest.mark.parametrize("backend", [RaggedRounding(prompts=False), RoundingBackend()], ids=["prompts", "none"])
def test_calibration_keeps_no_number_if_prompts_read_together_differ_or_no_forward_is_ragged(backend: Backend) -> None:
    assert calibrate(backend, BATCH).totals == {}
    assert calibrate(backend, BATCH).prompts


def test_calibration_handles_a_short_context_and_a_batch_of_one() -> None:
    assert calibrate(RaggedRounding(max_length=128), BATCH).agrees
    assert calibrate(RaggedRounding(), 1).totals == {} != calibrate(RaggedRounding(), 2).totals
