"""No work is done twice: shared beginnings are read once, and a round does not walk the whole text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.kv_slots import CATCH_UP, EXACT_FIT, Shapes
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.ngram import NgramDrafter
from slipstream.models.hf.backend import HFBackend
from tests.support.engine_parts import engine, run
from tests.support.session_cases import commit, from_scratch, new_row, table
from tests.support.tiny_models import HashBackend, fresh, shared

COMMON = [(7 * i + i // 5) % 7 for i in range(300)]
TAILS = [[1, 2, 3], [4], [5, 5, 6, 0, 1], [4, 2]]
AGREEING = Shapes((4, 8, 16, 32), 64, 64)
CHUNKS = Shapes((4, 8, 16, 32), 64, 64, reuse=64)


@pytest.mark.parametrize(
    ("shapes", "shared_tokens"), [(EXACT_FIT, 300), (AGREEING, 300), (CHUNKS, 256)], ids=["exact", "agreeing", "chunks"]
)
def test_rows_that_enter_together_read_their_common_beginning_once(shapes: Shapes, shared_tokens: int) -> None:
    session = Session(HashBackend(), shapes)
    session.reserve(4, 400)
    rows = [new_row([*COMMON, *tail], i) for i, tail in enumerate(TAILS)]
    logits = session.score(rows, *table([[1], [], [2, 3], [0]]))
    first, *others = [len(row.tokens) - 1 for row in rows]
    # a row that lacks only a few tokens is not read ahead: they are fed with its first draft
    lacking = [count - shared_tokens for count in others]
    assert session.prefill_tokens == first + sum(count for count in lacking if count >= CATCH_UP)
    for row, draft, got in zip(rows, [[1], [], [2, 3], [0]], logits, strict=True):
        torch.testing.assert_close(got[: len(draft) + 1], from_scratch(HashBackend, row, draft), rtol=0, atol=0)


@pytest.mark.parametrize("reproducible", [False, True])
def test_a_common_system_prompt_is_read_once_and_changes_no_text(reproducible: bool) -> None:
    common = [3 + i * i % 50 for i in range(600)]
    prompts = [[*common, 5 + i, 9, 20 + i] for i in range(5)]
    decoder = SpeculativeDecoder(
        shared("llama"), drafter="ngram", num_draft_tokens=3, reproducible=reproducible, max_batch_size=4
    )
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=3)
    alone = []
    for prompt in prompts:
        decoder.forget()
        alone.append(decoder.generate(prompt, params).token_ids)
    decoder.forget()
    before = decoder.num_prefilled_tokens
    together = [result.token_ids for result in decoder.generate(prompts, params)]
    assert together == alone
    whole_chunks = 600 - 600 % 256
    # the first prompt is read whole; of the others at most what follows the last whole chunk
    max_tokens_read = 603 + 4 * (602 - whole_chunks)
    assert 602 <= decoder.num_prefilled_tokens - before <= (max_tokens_read if reproducible else 603)


def test_a_row_that_moves_keeps_its_cached_tokens() -> None:
    """It takes the slot of a finished row of the same text, whose cached tokens it may share in whole chunks only."""
    backend = HashBackend()
    session = Session(backend, CHUNKS)
    session.reserve(2, 400)
    twins = [new_row(COMMON[:100], i) for i in range(2)]
    for i in range(12):
        session.score(twins, *table([[], []]))
        for row in twins:
            commit(row, [], 0, i % 7)
    before = session.prefill_tokens
    session.score(twins[1:], *table([[]]))
    assert session.prefill_tokens == before and backend.forwards[-1] == (1, 4, True)


def test_a_long_prompt_is_read_in_chunks() -> None:
    session = Session(HashBackend(), Shapes((), 128))
    session.reserve(1, 2100)
    session.prefill([new_row([i % 7 for i in range(2000)])])
    backend = session.backend
    assert isinstance(backend, HashBackend)
    assert backend.forwards == [(1, 128, False)] * 15 + [(1, 79, False)]  # 1999 tokens, no logits


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor made meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


def test_reading_a_prompt_makes_no_tensor_of_prompt_squared_or_prompt_times_vocabulary() -> None:
    length, vocab, chunk = 3000, 4000, 128
    backend = HFBackend(fresh("llama", max_position_embeddings=4096, vocab_size=vocab))
    session = Session(backend, Shapes((), chunk))
    session.reserve(1, length + 1)
    with torch.inference_mode(), Largest() as largest:
        session.prefill([new_row([i * i % 61 for i in range(length)])])
    view = -(-length // 256) * 256
    assert chunk * (length - chunk) < largest.numbers <= chunk * view  # the last chunk's mask
    assert largest.numbers < length * length // 20 and largest.numbers < length * vocab // 20


class Watched(list[int]):
    """A list that counts how many of its items are read by slices, sums, comparisons and walks."""

    read = 0

    def __getitem__(self, index: Any) -> Any:
        items = super().__getitem__(index)
        Watched.read += len(items) if isinstance(index, slice) else 1
        return items

    def __iter__(self) -> Iterator[int]:
        Watched.read += len(self)
        return super().__iter__()

    def __add__(self, other: Any) -> Any:
        Watched.read += len(self)
        return super().__add__(other)

    def __eq__(self, other: object) -> bool:
        Watched.read += len(self)
        return super().__eq__(other)


def items_read_per_round(length: int, params: SamplingParams) -> float:
    """By rounds of two rows with `length` tokens each, after the first rounds."""
    backend = HashBackend(vocab_size=11)
    loop_engine = engine(Session(backend), NgramDrafter(), Fixed(3))
    rows = [Row(i, [(i + j) % 5 for j in range(length)], params, seed=i) for i in range(2)]
    for row in rows:
        row.tokens = Watched(row.tokens)
    rounds = run(loop_engine, rows, 2)
    list(islice(rounds, 4))
    Watched.read = 0
    assert len(list(islice(rounds, 20))) == 20
    return Watched.read / 10


class Repeats:
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores


OPTIONS: Sequence[dict[str, Any]] = [
    {},
    {"temperature": 0.9, "top_p": 0.9, "top_k": 7},
    {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    {"bad_words": [[1, 2, 3], [4]], "min_tokens": 40, "logit_bias": {1: 0.5}},
    {"logits_processors": [Repeats()]},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "+".join(options) or "greedy")
def test_a_round_reads_as_much_of_a_long_text_as_of_a_short_one(options: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=200, **options)
    short, long = items_read_per_round(60, params), items_read_per_round(900, params)
    assert long < 200 and long <= 2 * short


def test_the_watched_list_counts_the_items_read() -> None:
    Watched.read = 0
    tokens = Watched(range(50))
    assert [*tokens[10:], *tokens] and tokens + [1] and tokens == tokens[:]  # noqa: RUF005
    assert Watched.read == 40 + 50 + 50 + 50 + 50
