"""What every backend must do: the logits of a position depend on the tokens before it and on nothing else."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.interfaces import Backend
from slipstream.models.decoder.cache import ATTENDED_UNIT
from slipstream.models.hf.backend import HFBackend
from slipstream.models.toy import ToyBackend
from tests.support.tiny_models import ARCHITECTURES, HashBackend, prompts, shared

MAKERS: dict[str, Callable[[], Any]] = {"toy": ToyBackend, "hash": HashBackend} | {
    name: (lambda name=name: HFBackend(shared(name))) for name in ARCHITECTURES
}
everywhere = pytest.mark.parametrize("name", MAKERS)
LENGTH = 23


def make(name: str, rows: int = 1, length: int = 64) -> Backend:
    backend = MAKERS[name]()
    backend.reserve(rows, length)
    return backend


def text(backend: Backend, length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.tensor(prompts([length], vocab=min(backend.vocab_size, 61), seed=seed))


def whole(name: str, tokens: Tensor) -> Tensor:
    """[n, V] logits of one forward from an empty memory."""
    backend = make(name, length=tokens.shape[1])
    return backend.forward(tokens, [0], first_slot=0, logits=True)[0]


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.each_value
@everywhere
@pytest.mark.parametrize("widths", [[1] * LENGTH, [LENGTH - 1, 1], [5, 7, 11], [2, 1, 20]])
def test_any_split_into_forwards_gives_the_same_logits(name: str, widths: list[int]) -> None:
    backend = make(name)
    tokens, at, parts = text(backend), 0, []
    for width in widths:
        parts.append(backend.forward(tokens[:, at : at + width], [at], first_slot=0, logits=True)[0])
        at += width
    logits = torch.cat(parts)
    assert logits.shape == (LENGTH, backend.vocab_size) and backend.vocab_size > 0
    close(logits, whole(name, tokens))


@everywhere
def test_a_forward_without_logits_still_writes_the_cache(name: str) -> None:
    backend = make(name)
    tokens = text(backend)
    assert backend.forward(tokens[:, :20], [0], first_slot=0, logits=False).numel() == 0
    close(backend.forward(tokens[:, 20:], [20], first_slot=0, logits=True)[0], whole(name, tokens)[20:])


@everywhere
def test_leftovers_and_padding_do_not_affect_logits(name: str) -> None:
    backend = make(name)
    tokens, other = text(backend), text(backend, seed=1)
    backend.forward(other.repeat(1, 2), [0], first_slot=0, logits=False)  # stale entries follow
    padded = torch.cat([tokens[:, :9], other[:, :5]], dim=1)
    close(backend.forward(padded, [0], first_slot=0, logits=True)[0, :9], whole(name, tokens)[:9])
    close(backend.forward(tokens[:, 9:], [9], first_slot=0, logits=True)[0], whole(name, tokens)[9:])


@everywhere
def test_rows_with_ragged_starts_are_independent(name: str) -> None:
    backend = make(name, rows=3)
    rows = [text(backend, seed=seed) for seed in (1, 2, 3)]
    starts = [0, 7, 15]
    for slot, (row, start) in enumerate(zip(rows, starts, strict=True)):
        if start:
            backend.forward(row[:, :start], [0], first_slot=slot, logits=False)
    step = torch.cat([row[:, start : start + 6] for row, start in zip(rows, starts, strict=True)])
    logits = backend.forward(step, starts, first_slot=0, logits=True)
    for i, (row, start) in enumerate(zip(rows, starts, strict=True)):
        close(logits[i], whole(name, row)[start : start + 6])


@everywhere
def test_first_slot_selects_the_slots_to_write(name: str) -> None:
    backend = make(name, rows=3)
    rows = [text(backend, seed=seed) for seed in (1, 2, 3)]
    for slot in (2, 0, 1):
        backend.forward(rows[slot][:, :10], [0], first_slot=slot, logits=False)
    logits = backend.forward(torch.cat([rows[1][:, 10:13], rows[2][:, 10:13]]), [10, 10], first_slot=1, logits=True)
    close(logits[0], whole(name, rows[1])[10:13])
    close(logits[1], whole(name, rows[2])[10:13])
    close(backend.forward(rows[0][:, 10:], [10], first_slot=0, logits=True)[0], whole(name, rows[0])[10:])


@everywhere
def test_copy_copies_the_beginning_of_another_slot(name: str) -> None:
    backend = make(name, rows=2)
    tokens, other = text(backend), text(backend, seed=1)
    backend.forward(tokens[:, :12], [0], first_slot=1, logits=False)
    backend.forward(other, [0], first_slot=0, logits=False)
    backend.copy(1, 0, 10)
    mixed = torch.cat([tokens[:, :10], other[:, 10:]], dim=1)
    close(backend.forward(mixed[:, 10:], [10], first_slot=0, logits=True)[0], whole(name, mixed)[10:])
    close(backend.forward(tokens[:, 12:], [12], first_slot=1, logits=True)[0], whole(name, tokens)[12:])


@pytest.mark.each_value
@everywhere
@pytest.mark.parametrize("size", [(3, 10), (1, ATTENDED_UNIT * 2 + 1), (4, ATTENDED_UNIT + 9)])
def test_reserve_keeps_the_cached_tokens(name: str, size: tuple[int, int]) -> None:
    backend = make(name, rows=1, length=LENGTH)
    tokens = text(backend)
    backend.forward(tokens[:, :12], [0], first_slot=0, logits=False)
    backend.reserve(*size)
    backend.reserve(1, 5)  # asking for less memory frees none
    close(backend.forward(tokens[:, 12:], [12], first_slot=0, logits=True)[0], whole(name, tokens)[12:])
    if size[0] > 1:
        backend.forward(tokens, [0], first_slot=size[0] - 1, logits=False)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mistral"])
def test_crossing_the_boundary_of_the_attended_view_does_not_change_logits(name: str) -> None:
    backend = make(name, length=2 * ATTENDED_UNIT)
    tokens = text(backend, ATTENDED_UNIT + 8)
    backend.forward(tokens[:, : ATTENDED_UNIT - 3], [0], first_slot=0, logits=False)
    parts = [
        backend.forward(tokens[:, at : at + 1], [at], first_slot=0, logits=True)[0]
        for at in range(ATTENDED_UNIT - 3, ATTENDED_UNIT + 8)
    ]
    close(torch.cat(parts), whole(name, tokens)[ATTENDED_UNIT - 3 :])


def test_the_specification_gives_the_models_logits() -> None:
    tokens = text(HFBackend(shared("gemma3")), 40)
    with torch.inference_mode():
        close(whole("gemma3", tokens), shared("gemma3")(input_ids=tokens).logits[0])
