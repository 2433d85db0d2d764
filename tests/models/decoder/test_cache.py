"""The slot cache holds the positions that forwards have reached, and growing changes no logits and loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.interfaces import set_attended_lengths
from slipstream.core.trees import segments_of
from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cuda.indexed_cache import SPARE
from slipstream.models.decoder import cache
from slipstream.models.decoder.cache import ATTENDED_UNIT, FIRST_POSITIONS, SlotCache
from slipstream.models.hf.backend import HFBackend
from tests.support.graph_cases import Case
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.tiny_models import VOCAB, fast, fresh, prompts, ragged_logits, shared

END = 3 * FIRST_POSITIONS
ALL = list(range(VOCAB))  # every token is a stop token, so the text ends after its first
PROMPT = 20
WIDTHS = (1, 4, 7, 3, 16, 1, 33)


def num_bytes_held(cache: SlotCache) -> int:
    parts = [part for layer in cache.layers for part in (layer.keys, layer.values) if part is not None]
    return sum(part.untyped_storage().nbytes() for part in parts)


@pytest.mark.parametrize("drafter", ["none", "ngram"])
def test_a_high_max_tokens_that_is_not_reached_takes_no_memory(drafter: str) -> None:
    def generate_with_limit(limit: int) -> tuple[int, list[list[int]]]:
        model = fresh("llama", max_position_embeddings=9000)
        with SpeculativeDecoder(model, drafter=drafter, reproducible=False, max_batch_size=8) as decoder:
            limits = [SamplingParams(max_tokens=20, ignore_eos=True)] * 7
            texts = decoder.generate(prompts([30] * 8), [SamplingParams(max_tokens=limit, stop_token_ids=ALL), *limits])
            return num_bytes_held(decoder.target.backend.cache), [text.token_ids for text in texts]

    bytes_of_low_limit, texts = generate_with_limit(20)
    bytes_of_high_limit, same_texts = generate_with_limit(8000)
    assert bytes_of_high_limit == bytes_of_low_limit and texts == same_texts
    per_position = bytes_of_low_limit // (8 * FIRST_POSITIONS)
    assert bytes_of_low_limit == per_position * 8 * FIRST_POSITIONS


def test_slots_that_no_row_has_used_take_no_memory() -> None:
    backend = HFBackend(shared("llama"))
    backend.reserve(16, 600)
    backend.forward(torch.ones(1, 9, dtype=torch.int64), [0], first_slot=0, logits=False)
    assert backend.cache.held == (1, FIRST_POSITIONS)
    backend.forward(torch.ones(1, 9, dtype=torch.int64), [0], first_slot=4, logits=False)
    assert backend.cache.held == (5, FIRST_POSITIONS)
    backend.copy(0, 9, 9)
    assert backend.cache.held == (10, FIRST_POSITIONS) and backend.cache.shape[0] == 16


@torch.inference_mode()
def test_keys_and_values_in_float16_take_half_the_memory_and_change_logits_by_their_rounding() -> None:
    def logits_and_bytes(dtype: torch.dtype | None) -> tuple[Tensor, int]:
        backend = fast("llama")
        backend.cache.release()  # what trials have written
        backend.cache.store_as(dtype)
        return ragged_logits(backend), num_bytes_held(backend.cache)

    (expected, wide), (logits, narrow) = logits_and_bytes(None), logits_and_bytes(torch.float16)
    assert wide == 2 * narrow
    assert 0 < (logits - expected).abs().max() < 0.05 * expected.abs().max()


def backend_of(name: str, is_fast: bool, dtype: torch.dtype) -> HFBackend:
    sizes: dict[str, Any] = {"max_position_embeddings": 2 * END} | ({"head_dim": 64} if is_fast else {})
    return fast(name, dtype, **sizes) if is_fast else HFBackend(fresh(name, dtype=dtype, **sizes))


CASES = [
    (name, is_fast, dtype)
    for name in ("llama", "gemma3")
    for is_fast in (False, True)
    for dtype in (torch.float32, torch.bfloat16)
]


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "is_fast", "dtype"),
    [
        *mostly_slow(CASES[::3], CASES[0], CASES[3]),
        *mostly_exhaustive(case for case in CASES if case not in CASES[::3]),
    ],
)
def test_growth_changes_no_logits(name: str, is_fast: bool, dtype: torch.dtype) -> None:
    """Rows at different positions, with the end of the held memory close to what they attend to, or far behind it."""
    if is_fast and kernels() is None:
        pytest.skip("needs a C compiler and a processor with AVX2")
    growing, full = (backend_of(name, is_fast, dtype) for _ in range(2))
    for backend in (growing, full):
        backend.reserve(3, 2 * END)
    full.cache.hold(*full.cache.shape)
    generator, sizes = torch.Generator().manual_seed(0), set()
    text = torch.randint(0, growing.vocab_size, (3, END + 40), generator=generator)
    starts = [5, 0, 0]
    for backend in (growing, full):
        backend.forward(text[:1, :5], [0], first_slot=0, logits=False)
    turn = 0
    while max(starts) < END:
        width, rows = WIDTHS[turn % len(WIDTHS)], (3, 1, 2)[turn % 3]
        if (
            turn % 5 == 4 and starts[0] % FIRST_POSITIONS < FIRST_POSITIONS - 64
        ):  # up to the next end of the held memory
            width = FIRST_POSITIONS - 40 - starts[0] % FIRST_POSITIONS
        inputs = torch.stack([text[row, start : start + width] for row, start in enumerate(starts[:rows])])
        of_both = [backend.forward(inputs, starts[:rows], first_slot=0, logits=True) for backend in (growing, full)]
        assert torch.equal(*of_both), (turn, starts)
        starts = [start + width if row < rows else start for row, start in enumerate(starts)]
        sizes.add(growing.cache.held)
        turn += 1
    assert len({positions for _, positions in sizes}) > 2 and growing.cache.shape == full.cache.shape


@torch.inference_mode()
def test_ragged_forwards_and_trees_grow_the_cache_for_their_padding_and_nodes() -> None:
    if kernels() is None:
        pytest.skip("needs a C compiler and a processor with AVX2")
    backend = backend_of("llama", True, torch.bfloat16)
    backend.release()  # drops what the trials of its layers held
    backend.reserve(4, 2 * END)
    text = torch.ones(600, dtype=torch.int64)
    backend.forward(text[None, : FIRST_POSITIONS - 2], [0], first_slot=0, logits=False)
    assert backend.cache.held == (1, FIRST_POSITIONS)
    segments = [RowSegment(0, FIRST_POSITIONS - 2, 2)]
    backend.forward_ragged(text[:16], segments, widths=(1, 2, 4, 8, 16))  # the last row's padding reaches further
    assert backend.cache.held == (1, 2 * FIRST_POSITIONS)
    backend.release()
    backend.reserve(4, 2 * END)
    backend.forward(text[None, : FIRST_POSITIONS - 4], [0], first_slot=0, logits=False)
    wide = segments_of(0, FIRST_POSITIONS - 4, FIRST_POSITIONS - 4, (-1,) * 9)
    backend.forward_tree(text[:9], wide, widths=(1, 2, 4, 8, 16))
    assert backend.cache.held[1] >= FIRST_POSITIONS - 4 + 9


@pytest.mark.slow
def test_growing_copies_less_in_all_than_the_cache_holds_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []

    def counting(cached: Tensor, *size: int) -> Tensor:
        moved.append(cached.shape[0] * cached.shape[2])
        return enlarged(cached, *size)

    enlarged = cache.enlarged
    monkeypatch.setattr(cache, "enlarged", counting)
    backend = HFBackend(fresh("llama", max_position_embeddings=1 << 15, num_hidden_layers=1))
    backend.reserve(2, 1 << 14)
    for start in range(0, 1 << 14, 64):
        backend.forward(torch.ones(1, 1, dtype=torch.int64), [start], first_slot=start // 64 % 2, logits=False)
    assert 0 < sum(moved) / 2 <= backend.cache.held[0] * backend.cache.held[1]
    assert len(moved) / 2 <= 6


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_growth_that_finds_no_memory_loses_nothing(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def enlarged(cached: Tensor, *size: int) -> Tensor:
        calls.append(1)
        if len(calls) == failing + 1:
            raise torch.OutOfMemoryError("out of memory")
        return enlarge(cached, *size)

    enlarge = cache.enlarged
    text = torch.tensor(prompts([FIRST_POSITIONS + 9]))
    whole = HFBackend(shared("llama"))
    whole.reserve(1, 900)
    expected = whole.forward(text, [0], first_slot=0, logits=True)
    backend = HFBackend(shared("llama"))
    backend.reserve(1, 900)
    backend.forward(text[:, :500], [0], first_slot=0, logits=False)
    monkeypatch.setattr(cache, "enlarged", enlarged)
    with pytest.raises(torch.OutOfMemoryError):
        backend.forward(text[:, 500:], [500], first_slot=0, logits=True)
    logits = backend.forward(text[:, 500:], [500], first_slot=0, logits=True)
    assert (logits - expected[:, 500:]).abs().max() < 1e-4


def test_the_cache_has_whole_attended_units_however_it_grew() -> None:
    """Attention over a shorter length than its unit would round differently."""
    backend = HFBackend(fresh("llama", max_position_embeddings=4000))
    for unit, length in ((512, 1100), (512, 1600), (768, 1700), (256, 2000), (1024, 2000)):
        set_attended_lengths(backend, unit, ())
        backend.reserve(1, length)
        assert backend.cache.shape[1] >= length and backend.cache.shape[1] % unit == 0
        moves = backend.cache.moves
        backend.reserve(1, length)
        assert backend.cache.moves == moves
    assert backend.cache.shape[1] % ATTENDED_UNIT == 0


def test_graphs_are_captured_again_after_the_cache_has_moved() -> None:
    case = Case("llama", length=1000)
    expected, got = case.both(case.tokens(2, 4), case.starts(2))
    assert torch.equal(expected, got) and case.tape.captured == 1
    case.both(case.tokens(1, 500), [PROMPT], first_slot=3)  # eagerly reads another row's prompt
    assert case.graphed.cache.held[1] > FIRST_POSITIONS
    expected, got = case.both(case.tokens(2, 4), case.starts(2))
    assert torch.equal(expected, got) and case.tape.captured == 2
    for start in range(20, 900, 110):  # captured forwards that grow the cache themselves
        expected, got = case.both(case.tokens(2, 4), [start, start // 2])
        assert torch.equal(expected, got), start


def test_padding_of_captured_forwards_overwrites_no_text() -> None:
    """A forward of three rows is padded to four, and the fourth slot may hold a text up to the end of the cache."""
    case = Case("llama", length=1000)
    text = case.tokens(1, FIRST_POSITIONS - 3)
    for backend in (case.eager, case.graphed):
        backend.forward(text, [0], first_slot=3, logits=False)
    assert case.graphed.cache.held[1] >= text.shape[1] + SPARE
    expected, got = case.both(case.tokens(3, 2), [9, 8, 7])
    assert case.tape.captured and torch.equal(expected, got)
    expected, got = case.both(case.tokens(1, 2), [text.shape[1]], first_slot=3)
    assert torch.equal(expected, got)
