"""Rows that grow without a model, and the logits of a session with an empty cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from slipstream import Round, SamplingParams
from slipstream.core.interfaces import Backend
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.core.session import Session
from slipstream.core.types import Row

OPTIONS = SamplingParams(max_tokens=10_000)
CAPACITY = 400


def new_row(tokens: Sequence[int], index: int = 0) -> Row:
    return Row(index, list(tokens), OPTIONS, seed=0)


def commit(row: Row, draft: Sequence[int], kept: int, next_token: int) -> None:
    """What the loop does at the end of a round, without a model."""
    start = len(row.tokens)
    tokens = row.commit([*draft[:kept], next_token])
    row.rounds.append(Round(row.index, 0, 1, start, tuple(draft), tokens, kept, kept < len(draft)))


def table(drafts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, list[int]]:
    """[B, longest] tokens of these drafts, padded, and their lengths."""
    width = max(map(len, drafts), default=0)
    padded = torch.tensor([[*d, *[0] * (width - len(d))] for d in drafts]).reshape(len(drafts), width)
    return padded, list(map(len, drafts))


def from_scratch(make: Callable[[], Backend], row: Row, draft: Sequence[int]) -> torch.Tensor:
    """[len(draft) + 1, V] logits of a session with an empty cache."""
    session = Session(make(), EXACT_FIT)
    session.reserve(1, CAPACITY)
    return session.score([row], torch.tensor([list(draft)], dtype=torch.int64).reshape(1, len(draft)), [len(draft)])[0]
