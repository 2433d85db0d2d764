"""Checks what a user's drafter returns; messages name the drafter and what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.checks import is_number, is_whole
from slipstream.core.interfaces import Backend, Drafter, Observer, Sampler
from slipstream.core.rounds import RowDraft
from slipstream.core.trees import arranged, check_parents
from slipstream.core.types import Draft, Row, Verdict
from slipstream.core.user_objects import texts_kept
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler as RowSampler

INTEGERS = torch.int64, torch.int32  # allowed types of token ids, and of probabilities; messages name the first
FLOATS = torch.float32, torch.float64, torch.bfloat16, torch.float16
NEAR_ONE = 0.02  # how far probabilities and their sums may be beyond 1 in half precision


def checked(drafter: Drafter, backend: Backend) -> Drafter:
    """The drafter, with its drafts checked."""
    return CheckedObserver(drafter, backend) if isinstance(drafter, Observer) else CheckedDrafter(drafter, backend)


@dataclass(frozen=True)
class CheckedDrafter:
    """A user's drafter, whose drafts are checked. A row for which it fails ends with that error, alone."""

    drafter: Drafter
    backend: Backend  # the target's

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        try:
            return self._valid_draft(rows, lengths, sampler)
        except Exception as failure:
            error = failure
        return self._drafts_one_by_one(rows, lengths, sampler, error)

    def _drafts_one_by_one(
        self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler, error: Exception
    ) -> Draft:
        """Ask for one row at a time, after `error`; a row for which the drafter fails again ends with that failure.

        If it fails for none, the error was no row's fault: a signal handler may have raised it.
        """
        count = len(rows)
        drafts = Draft.empty(count, sampler.device)
        for place, row in enumerate(rows):
            own_sampler = RowSampler([row], sampler.race, self.backend.vocab_size, sampler.device)
            try:
                draft = self._valid_draft((row,), (lengths[place],), own_sampler)
            except Exception as failure:
                row.error = failure
                continue
            drafts = Draft.where([i == place for i in range(count)], _repeated(draft, count), drafts)
        if all(row.error is None for row in rows):
            raise error
        return drafts

    def _valid_draft(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """The drafter's draft; UsageError if it is not valid, or if the drafter has changed a text."""
        name = type(self.drafter).__name__
        with texts_kept(f"drafter {name}", rows):
            draft = self.drafter.propose(rows, lengths, sampler)
        check_draft(draft, lengths, name, self.backend)
        if any(parent > node for parents in draft.parents or () for node, parent in enumerate(parents)):
            draft = arranged(draft)
        drafted = torch.arange(draft.width, device=draft.tokens.device) < draft.lengths_on_device
        tokens, vocab_size = draft.tokens[drafted], self.backend.vocab_size
        wrong_tokens = tokens[(tokens < 0) | (tokens >= vocab_size)]
        if len(wrong_tokens):
            raise UsageError(f"drafter {name} drafted token {int(wrong_tokens[0])}; allowed: 0 to {vocab_size - 1}")
        if draft.probs is not None:
            probs = draft.probs[drafted].float()
            sums = probs.sum(-1)
            wrong = (sums - 1).abs() > NEAR_ONE
            wrong = (wrong & (sums != 0)) | (probs.amin(-1) < 0) | sums.isnan()  # 0: no token was left to draft
            if wrong.any():
                total = float(sums[wrong][0])
                raise UsageError(
                    f"drafter {name} returned probs with the sum {total:g}; allowed: none below 0, with the sum 1"
                )
        # what stands beyond a row's length does not count, and need not be a token
        return replace(draft, tokens=draft.tokens.clamp(0, vocab_size - 1))


class CheckedObserver(CheckedDrafter):
    """A user's drafter that sees what the target makes of its drafts."""

    def observe(self, rows: Sequence[Row], draft: Draft, logits: Tensor, verdict: Verdict) -> None:
        assert isinstance(self.drafter, Observer)
        # copies of what the commit reads, so that a drafter cannot change it
        draft = replace(draft, tokens=draft.tokens.clone())
        path = None if verdict.path is None else verdict.path.clone()
        verdict = Verdict(verdict.accepted.clone(), verdict.next_token.clone(), path)
        with texts_kept(f"drafter {type(self.drafter).__name__}", rows):
            self.drafter.observe(rows, draft, logits, verdict)


def _repeated(draft: Draft, count: int) -> Draft:
    """A single row's draft for each of `count` rows."""
    return replace(
        draft,
        tokens=draft.tokens.expand(count, -1),
        lengths=draft.lengths * count,
        probs=None if draft.probs is None else draft.probs.expand(count, -1, -1),
        parents=None if draft.parents is None else draft.parents * count,
        rows=draft.rows * count,
    )


def check_draft(draft: object, max_lengths: Sequence[int], name: str, backend: Backend) -> None:
    """Raise UsageError, which names the drafter, unless this is a draft of at most max_lengths[i] tokens per row."""
    rows = len(max_lengths)
    if not isinstance(draft, Draft):
        raise UsageError(
            f"drafter {name} returned {type(draft).__name__}; allowed: a Draft, for example "
            "Draft.from_lists(one list of token ids per row, sampler.device)"
        )
    _check_tensor(f"drafter {name} returned tokens", draft.tokens, (None, None), INTEGERS, backend)
    if not isinstance(draft.lengths, tuple | list) or not all(type(length) is int for length in draft.lengths):
        raise UsageError(f"drafter {name} returned lengths={draft.lengths!r:.80}; allowed: a tuple of whole numbers")
    if draft.tokens.shape[0] != rows or len(draft.lengths) != rows or max(draft.lengths, default=0) > draft.width:
        raise UsageError(
            f"drafter {name} returned {draft.tokens.shape[0]} rows and {len(draft.lengths)} lengths "
            f"up to {max(draft.lengths, default=0)}; allowed: {rows} of each, lengths up to the width {draft.width}"
        )
    for i, (length, max_length) in enumerate(zip(draft.lengths, max_lengths, strict=True)):
        if not 0 <= length <= max_length:
            raise UsageError(
                f"drafter {name} returned {length} tokens for row {i}; allowed: 0 to the {max_length} asked for"
            )
    if draft.probs is not None:
        shape = (rows, draft.width, backend.vocab_size)
        _check_tensor(f"drafter {name} returned probs", draft.probs, shape, FLOATS, backend)
    if not is_whole(draft.steps):
        raise UsageError(f"drafter {name} returned steps={draft.steps!r:.80}; allowed: a whole number from 0")
    for field, records, kind in (
        ("rows", draft.rows, RowDraft),
        ("parents", () if draft.parents is None else draft.parents, Sequence),
    ):
        is_list = isinstance(records, tuple | list) and all(isinstance(record, kind) for record in records)
        if not is_list or len(records) not in (0, rows):
            allowed = f"none, or a {kind.__name__} for each of {rows} rows"
            raise UsageError(f"drafter {name} returned {field}={records!r:.80}; allowed: {allowed}")
    for length, probs in zip(draft.lengths, draft.acceptance_probs, strict=True):
        is_list = isinstance(probs, tuple | list) and all(is_number(prob, 0, 1 + NEAR_ONE) for prob in probs)
        if probs is not None and not (is_list and len(probs) == length):
            raise UsageError(
                f"drafter {name} returned acceptance_probs={probs!r:.80} for {length} tokens; "
                "allowed: None, or a list of as many numbers from 0 to 1"
            )
    if draft.parents is not None:
        check_parents(draft, name)


def _check_tensor(
    what: str, value: object, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], backend: Backend
) -> None:
    """Raise UsageError unless this is such a tensor on the target's device. shape: None for any size."""
    if not isinstance(value, Tensor):
        raise UsageError(f"{what} of type {type(value).__name__}; allowed: a tensor")
    has_shape = len(value.shape) == len(shape) and all(
        n in (size, None) for n, size in zip(shape, value.shape, strict=True)
    )
    if not has_shape or value.dtype not in dtypes or value.device.type != backend.device.type:
        returned = f"{list(value.shape)} of {value.dtype} on {value.device}"
        sizes_allowed = ", ".join("any" if n is None else str(n) for n in shape)
        raise UsageError(f"{what} {returned}; allowed: [{sizes_allowed}] of {dtypes[0]} on {backend.device}")
