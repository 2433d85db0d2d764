"""Drafts of rows with constraints: forced tokens before and after the drafter's, and no illegal ones.

A token that is the only legal one is accepted with certainty. So forced tokens are proposed first, and the drafter
continues as if they had been committed. A one-hot draft is cut before its first illegal token. A sampled draft is cut
*after* it, and the target rejects it: dropping it would choose among the draft's tokens and change the distribution of
the text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.constraints.compiled_grammars import constraint_of
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rounds import RowDraft
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row


class _Line(NamedTuple):
    """One row's draft: forced tokens, the first `kept` tokens of the drafter's draft, forced tokens again."""

    before: Sequence[int]
    kept: int
    after: Sequence[int]

    @property
    def length(self) -> int:
        return len(self.before) + self.kept + len(self.after)


@dataclass(frozen=True)
class ForcedDrafts:
    """The `Grammar` of an engine: forced tokens of rows with constraints, and what constraints leave of drafts."""

    target: Session  # verifies the drafts

    def forced(self, rows: Sequence[Row]) -> list[list[int]]:
        return [self._run(row) for row in rows]

    def room_after(self, rows: Sequence[Row], forced: Sequence[Sequence[int]]) -> list[int]:
        longest = self._longest
        return [0 if _ends(row, run) else longest - len(run) for row, run in zip(rows, forced, strict=True)]

    def around(self, rows: Sequence[Row], forced: Sequence[Sequence[int]], draft: Draft) -> Draft:
        if draft.parents is not None:  # the target never chooses the illegal nodes of a tree
            return _tree_after(forced, draft)
        longest, drafted = self._longest, draft.tokens.tolist()
        lines = [
            self._line(row, run, line[:length], longest, sampled=draft.probs is not None)
            for row, run, line, length in zip(rows, forced, drafted, draft.lengths, strict=True)
        ]
        return _assembled(draft, lines)

    @property
    def _longest(self) -> int:
        limit = self.target.longest_draft
        return MAX_DRAFT_TOKENS if limit is None else min(limit, MAX_DRAFT_TOKENS)

    def _run(self, row: Row) -> list[int]:
        """The forced tokens that come next."""
        constraint = constraint_of(row)
        # neither a row that drafts nothing nor the round whose token comes from the prompt's logits may have any
        if (
            constraint is None
            or row.params.num_draft_tokens == 0
            or (self.target.table.returns_prompt_logits and not row.rounds)
        ):
            return []
        return constraint.forced(row.output, max(0, min(self._longest, row.remaining - 1)))

    def _line(self, row: Row, run: Sequence[int], drafted: list[int], longest: int, *, sampled: bool) -> _Line:
        constraint = constraint_of(row)
        if constraint is None:
            return _Line(run, len(drafted), ())
        text = [*row.output, *run]
        legal = constraint.num_legal(text, drafted)
        if legal < len(drafted):
            kept = legal + sampled
            return _Line(run, kept, self._after(row, run, drafted[:kept], longest) if not sampled else ())
        return _Line(run, legal, self._after(row, run, drafted, longest))

    def _after(self, row: Row, run: Sequence[int], drafted: Sequence[int], longest: int) -> list[int]:
        """The forced tokens that follow the drafter's."""
        constraint = constraint_of(row)
        # without drafted tokens the run has all forced tokens already
        if constraint is None or not drafted or _ends(row, drafted):
            return []
        limit = min(longest, row.remaining - 1) - len(run) - len(drafted)
        return constraint.forced([*row.output, *run, *drafted], max(0, limit))


def _ends(row: Row, tokens: Sequence[int]) -> bool:
    return bool(tokens) and tokens[-1] in row.end_ids


def _assembled(draft: Draft, lines: Sequence[_Line]) -> Draft:
    """The draft that the lines describe. A forced token's distribution is that token."""
    lengths = tuple(line.length for line in lines)
    forced = tuple((len(line.before), len(line.after)) for line in lines)
    if not any(map(any, forced)):
        return draft.cut(lengths)
    tokens = draft.tokens.new_zeros(len(lines), max(lengths))
    probs = None if draft.probs is None else draft.probs.new_zeros(*tokens.shape, draft.probs.shape[2])
    for i, line in enumerate(lines):
        begin = len(line.before)
        end = begin + line.kept
        tokens[i, begin:end] = draft.tokens[i, : line.kept]
        tokens[i, :begin], tokens[i, end : line.length] = _on(tokens, line.before), _on(tokens, line.after)
        if probs is not None and draft.probs is not None:
            probs[i] = one_hot(tokens[i], probs.shape[2]).to(probs.dtype)
            probs[i, begin:end] = draft.probs[i, : line.kept]
    return Draft(tokens, lengths, probs, draft.steps, rows=_with_forced(draft, forced))


def _tree_after(runs: Sequence[Sequence[int]], draft: Draft) -> Draft:
    """Each row's tree, after a chain of its forced tokens."""
    assert draft.parents is not None
    if not any(runs):
        return draft
    lengths = tuple(len(run) + length for run, length in zip(runs, draft.lengths, strict=True))
    tokens = draft.tokens.new_zeros(len(runs), max(lengths))
    for i, (run, length) in enumerate(zip(runs, draft.lengths, strict=True)):
        tokens[i, : len(run)], tokens[i, len(run) : lengths[i]] = _on(tokens, run), draft.tokens[i, :length]
    parents = tuple(
        (*range(-1, len(run) - 1), *(parent + len(run) for parent in row_parents[:length]))
        for run, row_parents, length in zip(runs, draft.parents, draft.lengths, strict=True)
    )
    rows = _with_forced(draft, [(len(run), 0) for run in runs])
    return replace(draft, tokens=tokens, lengths=lengths, parents=parents, rows=rows)


def _with_forced(draft: Draft, forced: Sequence[tuple[int, int]]) -> tuple[RowDraft, ...]:
    """The records of a draft with forced tokens; without acceptance probabilities, so that it is not cut any more."""
    return tuple(
        replace(row, acceptance_probs=None, forced=counts) for row, counts in zip(draft.records, forced, strict=True)
    )


def _on(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    return torch.tensor(list(ids), dtype=torch.int64).to(tokens.device, non_blocking=True)
