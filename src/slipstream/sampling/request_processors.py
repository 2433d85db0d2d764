"""Logits processors that a request brings with it: called one position at a time, checked, and never trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FunctionType

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.sampling.batch_processor import BatchProcessor, params_of
from slipstream.sampling.params import Processor


class RequestProcessors(BatchProcessor):
    """The request's own Hugging Face processors, called as `generate` calls them: (input_ids [1, n], scores [1, V])."""

    may_fail = True

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self._checked: set[int] = set()
        self.active = any(params_of(row).logits_processors for row in rows)
        self._texts = [_RowTokens(row, device) for row in rows] if self.active else []
        self._failures: dict[int, tuple[int, Exception]] = {}

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        return self._failures

    def drafted(self) -> None:
        self._failures.clear()

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        self._failures.pop(row, None)  # what failed on a draft that was rejected says nothing about the next

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, row in enumerate(self._rows):
            if not params_of(row).logits_processors:
                continue
            text = self._texts[i].followed_by(draft[i, : first + scores.shape[1] - 1])
            for j in range(scores.shape[1]):
                context = text[:, : len(row.tokens) + first + j]
                try:
                    for processor in params_of(row).logits_processors:
                        scores[i, j] = self._call(processor, context, scores[i : i + 1, j])[0]
                except Exception as error:  # a user's code may raise anything; it ends its own row alone
                    self._failures[i] = min(
                        self._failures.get(i, (first + j, error)), (first + j, error), key=_position
                    )
                    break  # what follows this position cannot be committed

    def _call(self, processor: Processor, context: Tensor, scores: Tensor) -> Tensor:
        if id(processor) in self._checked:
            return ask(processor, context, scores)
        answer = check_stateless(processor, context, scores)
        self._checked.add(id(processor))
        return answer


def _position(failure: tuple[int, Exception]) -> int:
    return failure[0]


class _RowTokens:
    """A row's tokens on the device; each is sent once."""

    def __init__(self, row: Row, device: torch.device) -> None:
        self._row, self._sent = row, 0
        self._ids = torch.empty(1, 0, dtype=torch.int64, device=device)

    def followed_by(self, draft: Tensor) -> Tensor:
        """[1, n + K]: the committed tokens and then the draft [K]; valid until the next call."""
        new, count = self._row.tokens[self._sent :], len(self._row.tokens)
        if count + len(draft) > self._ids.shape[1]:
            self._ids = pad(self._ids, (0, 2 * (count + len(draft)) - self._ids.shape[1]))
        self._ids[0, self._sent : count] = torch.tensor(new, dtype=torch.int64).to(draft.device, non_blocking=True)
        self._ids[0, count : count + len(draft)] = draft
        self._sent = count
        return self._ids[:, : count + len(draft)]


def ask(processor: Processor, context: Tensor, scores: Tensor, *, wait: bool = False) -> Tensor:
    """The processor's answer; UsageError if its shape or type differs from that of the scores, or it has NaN.

    wait: look for NaN even on a device that would have to be waited for.
    """
    answer = processor(context, scores.clone())
    found = f"a {type(answer).__name__}"
    if isinstance(answer, Tensor):
        if answer.shape == scores.shape and answer.dtype == scores.dtype:
            if not (wait or answer.device.type == "cpu") or not bool(answer.isnan().any()):
                return answer
            found = "NaN"
        else:
            found = f"{answer.dtype} of shape {tuple(answer.shape)}"
    raise UsageError(
        f"logits_processors: {_name(processor)} returned {found}; allowed: scores without NaN, {scores.dtype} of shape "
        f"{tuple(scores.shape)} like those it was given"
    )


def _name(processor: Processor) -> str:
    """A function's own name, else the name of its class."""
    return processor.__qualname__ if isinstance(processor, FunctionType) else type(processor).__name__


def check_stateless(processor: Processor, context: Tensor, scores: Tensor) -> Tensor:
    """The processor's answer, or a refusal if asking twice gives two answers.

    Drafts are scored at positions that may be rejected, so a processor that remembers what it was asked would have to
    be rolled back.
    """
    first = ask(processor, context, scores, wait=True)
    second = ask(processor, context, scores)
    ask(processor, context[:, :-1] if context.shape[1] > 1 else context, scores)
    if not torch.equal(first, second) or not torch.equal(first, ask(processor, context, scores)):
        raise UsageError(
            f"logits_processors: {_name(processor)} keeps state between calls, which drafting would corrupt; "
            "allowed: processors whose answer depends on input_ids and scores alone"
        )
    return first
