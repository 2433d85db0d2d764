"""Logits processors: constraints, bias, penalties, bad words, minimum length and the request's own.

Each kind edits the scores of all rows in place and reads the text so far: position j of a row sees the committed tokens
plus the first j draft tokens. What a row's constraint does not allow gets -inf before anything else. A request's own
processors are called one position at a time, checked, and never trusted. Shapes as in `sampling`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from types import FunctionType
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.constraints.compiled_grammars import constraint_of
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError, UsageError
from slipstream.sampling.params import Processor, SamplingParams
from slipstream.sampling.warpers import NEVER

_ANY = -1  # no token has this id


def params_of(row: Row) -> SamplingParams:
    """The row's options; the loop knows only some of them (`RequestOptions`)."""
    return cast(SamplingParams, row.params)


class BatchProcessor:
    """One kind of processor for a whole batch. Inactive ones are left out of the loop."""

    active = False
    may_fail = False  # it runs the request's own code

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        """Failed rows: index in the batch -> number of draft tokens seen before, and the exception."""
        return {}

    def taken(self, row: int, path: Sequence[int]) -> None:
        """Forget the failures of row number `row` that are not on the path of a tree with these tokens."""

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        """Edit the scores [B, J, V] in place; position j has seen the first `first` + j tokens of the draft [B, K]."""
        raise AssertionError(f"{type(self).__name__} is not active")

    def drafted(self) -> None:
        """Forget the failures so far; only processors that may have some need it."""

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        """Note the tokens that row number `row` committed; only processors with counts need them."""


class FallibleProcessor(BatchProcessor):
    """A processor that may fail in a row; the batch continues, and the row ends where the failure was."""

    def __init__(self) -> None:
        self._failures: dict[int, tuple[int, Exception]] = {}

    @property
    def failures(self) -> Mapping[int, tuple[int, Exception]]:
        return self._failures

    def drafted(self) -> None:
        self._failures.clear()

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        self._failures.pop(row, None)  # what failed on a draft that was rejected says nothing about the next


class ConstraintMasks(FallibleProcessor):
    """Masks every position of the constrained rows by their committed tokens and the draft tokens before it.

    Their drafts are read on the host, which waits for the device.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self._rows, self._vocab_size = rows, vocab_size
        self._constraints = [constraint_of(row) for row in rows]
        self.active = any(constraint is not None for constraint in self._constraints)
        self._bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=device)

    def taken(self, row: int, path: Sequence[int]) -> None:
        self._failures.pop(row, None)
        constraint = self._constraints[row]
        if constraint is not None and (why := constraint.problem([*self._rows[row].output, *path])) is not None:
            self._failures[row] = len(path), SlipstreamError(why)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, (row, constraint) in enumerate(zip(self._rows, self._constraints, strict=True)):
            if constraint is None:
                continue
            drafted: list[int] = draft[i, : first + scores.shape[1] - 1].tolist()
            masks = constraint.masks([*row.output, *drafted[:first]], drafted[first:])
            ends = np.flatnonzero(masks.max(axis=1) == 0)
            if len(ends) and (why := constraint.problem([*row.output, *drafted[: first + ends[0]]])) is not None:
                self._failures[i] = first + int(ends[0]), SlipstreamError(why)
            scores[i].masked_fill_(self._forbidden(torch.from_numpy(masks)), NEVER)

    def _forbidden(self, masks: Tensor) -> Tensor:
        """[J, V] bool from the packed bits of what is allowed."""
        packed = masks.to(self._bits.device, non_blocking=True)
        unset = packed[..., None].bitwise_and(self._bits).eq(0)
        return unset.flatten(1)[:, : self._vocab_size]


class RequestProcessors(FallibleProcessor):
    """The request's own Hugging Face processors, called as `generate` calls them: (input_ids [1, n], scores [1, V])."""

    may_fail = True

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        super().__init__()
        self._rows = rows
        self._checked: set[int] = set()
        self.active = any(params_of(row).logits_processors for row in rows)
        self._texts = [_RowTokens(row, device) for row in rows] if self.active else []

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
                    failure = first + j, error
                    self._failures[i] = min(self._failures.get(i, failure), failure, key=itemgetter(0))
                    break  # what follows this position cannot be committed

    def _call(self, processor: Processor, context: Tensor, scores: Tensor) -> Tensor:
        if id(processor) in self._checked:
            return ask(processor, context, scores)
        answer = check_stateless(processor, context, scores)
        self._checked.add(id(processor))
        return answer


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
    received = f"a {type(answer).__name__}"
    if isinstance(answer, Tensor):
        if answer.shape == scores.shape and answer.dtype == scores.dtype:
            if not (wait or answer.device.type == "cpu") or not bool(answer.isnan().any()):
                return answer
            received = "NaN"
        else:
            received = f"{answer.dtype} of shape {tuple(answer.shape)}"
    raise UsageError(
        f"logits_processors: {_name(processor)} returned {received}; allowed: scores without NaN, {scores.dtype} of "
        f"shape {tuple(scores.shape)} like those it was given"
    )


def _name(processor: Processor) -> str:
    """A function's own name, else the name of its class."""
    return processor.__qualname__ if isinstance(processor, FunctionType) else type(processor).__name__


def check_stateless(processor: Processor, context: Tensor, scores: Tensor) -> Tensor:
    """The processor's answer; UsageError if two calls give different answers.

    Drafts are scored at positions that may be rejected, so a processor that keeps state would have to be rolled back.
    """
    first = ask(processor, context, scores, wait=True)
    second = ask(processor, context, scores)
    with suppress(Exception):  # it may refuse a text that the row never has
        ask(processor, context[:, :-1] if context.shape[1] > 1 else context, scores)
    if not torch.equal(first, second) or not torch.equal(first, ask(processor, context, scores)):
        raise UsageError(
            f"logits_processors: {_name(processor)} keeps state between calls, which drafting would corrupt; "
            "allowed: processors whose answer depends on input_ids and scores alone"
        )
    return first


class FixedBias(BatchProcessor):
    """logit_bias, and bad words of one token (a bias of -inf)."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        biases: dict[tuple[int, int], float] = {}
        for i, row in enumerate(rows):
            biases.update({(i, token): bias for token, bias in params_of(row).logit_bias.items()})
            biases.update({(i, word[0]): NEVER for word in _words(row) if len(word) == 1})
        self.active = bool(biases)
        if self.active:
            self._rows, self._tokens = torch.tensor(list(biases), device=device).T
            self._bias = torch.tensor(list(biases.values()), dtype=torch.float32, device=device)[:, None]

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        scores[self._rows, :, self._tokens] += self._bias


class Penalties(BatchProcessor):
    """Repetition (Keskar et al. 2019, section 4.1; prompt and output), presence and frequency penalty (output only).

    Only tokens that have occurred are edited: those of the draft, and those of the text, which each row lists.
    """

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        params = [params_of(row) for row in rows]
        used = [(p.repetition_penalty, p.presence_penalty, p.frequency_penalty) for p in params]
        self._penalised = [values != (1.0, 0.0, 0.0) for values in used]
        self.active = any(self._penalised)
        if not self.active:
            return
        self._device = device
        numbers = torch.tensor(used, dtype=torch.float32, device=device)
        self._repetition, self._presence, self._frequency = numbers.T[:, :, None, None]
        self._seen = torch.zeros(len(rows), vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(len(rows), vocab_size, dtype=torch.float32, device=device)
        self._places: list[dict[int, int]] = [{} for _ in rows]  # token -> its index in the row's list
        self._ids = torch.zeros(len(rows), 0, dtype=torch.int64, device=device)  # the lists, padded with any token
        # row, index in the row's list, token, further occurrences in the output
        self._new: list[tuple[int, int, int, int]] = []
        for i, row in enumerate(rows):
            self._record(i, row.tokens, Counter(row.output))

    def advance(self, row: int, tokens: Sequence[int]) -> None:
        self._record(row, tokens, Counter(tokens))

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        self._send_new()
        drafted = draft[:, : first + scores.shape[1] - 1]
        ids = torch.cat([self._ids, drafted], dim=1)
        drafted_counts = self._occurrences(ids, drafted)[:, first:]
        counts = self._counts.gather(1, ids)[:, None] + drafted_counts
        seen = self._seen.gather(1, ids)[:, None] | (drafted_counts > 0)
        index = ids[:, None].expand_as(counts)
        s = scores.gather(2, index)
        repeated = torch.where(s < 0, s * self._repetition, s / self._repetition)
        s = torch.where(seen, repeated, s) - self._presence * (counts > 0) - self._frequency * counts
        scores.scatter_(2, index, s)  # a token that is listed twice has the same score twice

    @staticmethod
    def _occurrences(ids: Tensor, drafted: Tensor) -> Tensor:
        """Counts of each of `ids` [B, U] among the first 0, 1, ... K draft tokens [B, K]: [B, K + 1, U]."""
        return pad((ids[:, None] == drafted[..., None]).cumsum(1), (0, 0, 1, 0))

    def _record(self, row: int, tokens: Sequence[int], counts: Counter[int]) -> None:
        if self._penalised[row]:
            places = self._places[row]
            for token in dict.fromkeys(tokens):
                self._new.append((row, places.setdefault(token, len(places)), token, counts[token]))

    def _send_new(self) -> None:
        """Send what was noted since the last call to the device, all rows at once."""
        if not self._new:
            return
        rows, places, tokens, counts = torch.tensor(self._new).T.to(self._device, non_blocking=True)
        missing = max(map(len, self._places)) - self._ids.shape[1]
        if missing > 0:
            self._ids = pad(self._ids, (0, missing + self._ids.shape[1] // 4))
        self._ids[rows, places] = tokens
        self._seen[rows, tokens] = True
        self._counts.index_put_((rows, tokens), counts.float(), accumulate=True)
        self._new.clear()


class BadWords(BatchProcessor):
    """Bad words of several tokens: the last one is forbidden where the others have just appeared."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        words = [(i, word) for i, row in enumerate(rows) for word in _words(row) if len(word) > 1]
        self.active = bool(words)
        if self.active:
            self._reach = max(len(word) for _, word in words) - 1
            begins = [[_ANY] * (self._reach + 1 - len(word)) + [*word[:-1]] for _, word in words]
            self._begins = torch.tensor(begins, device=device)[:, None]  # [words, 1, reach]
            self._row = torch.tensor([i for i, _ in words], device=device)
            self._last = torch.tensor([word[-1] for _, word in words], device=device)

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        tails = [row.tokens[-self._reach :] for row in self._rows]
        padded = torch.tensor([[_ANY] * (self._reach - len(tail)) + tail for tail in tails])
        context = torch.cat([padded.to(draft.device, non_blocking=True), draft[:, : first + scores.shape[1] - 1]], 1)
        windows = context[:, first:].unfold(1, self._reach, 1)  # [B, J, reach]: what precedes each position
        has_begun = ((windows[self._row] == self._begins) | (self._begins == _ANY)).all(-1)
        bias = torch.zeros_like(has_begun, dtype=scores.dtype).masked_fill_(has_begun, NEVER)
        positions = torch.arange(scores.shape[1], device=scores.device)
        index = self._row[:, None], positions, self._last[:, None].expand_as(bias)
        scores.index_put_(index, bias, accumulate=True)


class MinTokens(BatchProcessor):
    """No end token before the minimum length."""

    def __init__(self, rows: Sequence[Row], vocab_size: int, device: torch.device) -> None:
        self._rows = rows
        self.active = any(params_of(row).min_tokens and row.end_ids for row in rows)
        self._ends = [torch.tensor(sorted(row.end_ids), device=device) for row in rows] if self.active else []

    def apply(self, scores: Tensor, draft: Tensor, first: int) -> None:
        for i, row in enumerate(self._rows):
            missing = params_of(row).min_tokens - row.num_output_tokens - first
            if missing > 0 and row.end_ids:
                scores[i, :missing].index_fill_(-1, self._ends[i], NEVER)


def _words(row: Row) -> list[Sequence[int]]:
    return [word for word in params_of(row).bad_words if not isinstance(word, str)]


# constraints, then the order of Hugging Face `generate`
KINDS = (ConstraintMasks, FixedBias, Penalties, BadWords, MinTokens, RequestProcessors)
