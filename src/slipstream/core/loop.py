"""The loop: draft, verify, accept, commit.

Plain decoding is the same loop with a drafter that proposes nothing. The loop yields `Round`s; text, statistics and
everything else are folded from them elsewhere. This module knows neither text nor model formats.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.acceptance import Rule, accept, rule_for
from slipstream.core.interfaces import Drafter, Observer, Policy
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rng import Race
from slipstream.core.session import Session
from slipstream.core.types import Draft, Round, Row, Seconds, Verdict
from slipstream.errors import SlipstreamError, UsageError
from slipstream.sampling.sampler import Sampler

_steps = count()


class Clock:
    """Takes the times of one step's parts."""

    def __init__(self) -> None:
        self._started = self._last = perf_counter()
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Book the time since the last lap under `part`."""
        now = perf_counter()
        self._parts[part] = now - self._last
        self._last = now

    def stop(self) -> Seconds:
        """The parts and the total."""
        return Seconds(**self._parts, total=perf_counter() - self._started)


@dataclass
class Batch:
    """The rows under way and their sampling options. Row i uses slot i of every session."""

    rows: list[Row]
    sampler: Sampler

    @property
    def unfinished(self) -> bool:
        """Whether every row can take part in another round."""
        return all(row.finish_reason is None for row in self.rows)

    def commit(self, draft: Draft, verdict: Verdict, clock: Clock) -> list[Round]:
        """Append what was kept and the next token to each row, cut at its end; here the device's answer is awaited."""
        columns = [draft.tokens, verdict.next_token[:, None], verdict.accepted[:, None]]
        table: list[list[int]] = torch.cat(columns, dim=1).tolist()  # the one transfer of the round
        clock.lap("accept")
        starts = [len(row.tokens) for row in self.rows]
        tokens = [self._commit_row(i, line, draft.width) for i, line in enumerate(table)]
        step, seconds = next(_steps), clock.stop()
        for i, (row, line, committed) in enumerate(zip(self.rows, table, tokens, strict=True)):
            length, kept = draft.lengths[i], line[-1]
            row.rounds.append(
                Round(
                    row=row.index,
                    step=step,
                    num_rows=len(self.rows),
                    start=starts[i],
                    draft=tuple(line[:length]),
                    tokens=committed,
                    num_accepted_tokens=min(kept, len(committed)),
                    rejected=kept < length and len(committed) > kept,
                    finish_reason=row.finish_reason,
                    seconds=seconds,
                    num_draft_steps=draft.steps,
                )
            )
        return [row.rounds[-1] for row in self.rows]

    def _commit_row(self, i: int, line: Sequence[int], width: int) -> tuple[int, ...]:
        """Append row i's part of the table: `width` draft tokens, the next token, how many drafts were kept."""
        next_token, kept = line[width:]
        if next_token < 0:
            raise SlipstreamError("the sampling options leave no token to choose from (every logit is -inf)")
        committed = self.rows[i].commit([*line[:kept], next_token])
        self.sampler.advance(i, committed)
        return committed


@dataclass
class Engine:
    """A target, a drafter, a policy and an acceptance rule, run over any number of rows."""

    target: Session
    drafter: Drafter
    policy: Policy
    acceptance: str | Rule = "auto"
    max_batch_size: int = 8
    draft_session: Session | None = None

    def __post_init__(self) -> None:
        self._race = Race(self.target.backend.vocab_size, self.target.backend.device)
        self._observer = self.drafter if isinstance(self.drafter, Observer) else None

    def run(self, rows: Iterable[Row]) -> Iterator[Round]:
        """Decode all rows, at most `max_batch_size` at a time; a finished row makes room for the next."""
        waiting = deque(rows)
        self._reserve(waiting)
        active: list[Row] = []
        while waiting or active:
            while waiting and len(active) < self.max_batch_size:
                active.append(waiting.popleft())
            batch = self._batch(active)
            while batch.unfinished:
                yield from self.step(batch)
            _compact(active, waiting)

    @torch.inference_mode()
    def step(self, batch: Batch) -> list[Round]:
        """One round of every row.

        Where the forwards that read a prompt say what comes next, a row's first round is that token and drafts nothing:
        always, so that its rounds depend neither on other rows nor on what the memory holds.
        """
        clock = Clock()
        answer = self.target.prefill(batch.rows, answer=not any(row.rounds for row in batch.rows))
        clock.lap("prefill")
        if answer is not None:
            nothing = Draft.empty(len(batch.rows), answer.device)
            return batch.commit(nothing, self._accept(batch, nothing, answer), clock)
        lengths = self._lengths(batch.rows)
        draft = self.drafter.propose(batch.rows, lengths, batch.sampler)
        _check(draft, batch, self.drafter)
        draft = self.policy.worth_verifying(batch.rows, draft)
        clock.lap("draft")
        return batch.commit(draft, self._verdict(batch, draft, clock), clock)

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        drafting = [row for row in rows if row.rounds or not self.target.answers]  # the policy hears of no other
        lengths = lengths_for(self.policy, drafting, self.target.longest_draft) if drafting else []
        chosen = {id(row): length for row, length in zip(drafting, lengths, strict=True)}
        return [chosen.get(id(row), 0) for row in rows]

    def _verdict(self, batch: Batch, draft: Draft, clock: Clock) -> Verdict:
        """Verify and accept: in one call where the target can and nothing but its argmax is needed."""
        rule = rule_for(self.acceptance, draft)
        if rule.coupled and batch.sampler.plain and self._observer is None:
            verdict = self.target.verify_greedy(batch.rows, draft.tokens, draft.lengths)
            if verdict is not None:
                clock.lap("verify")
                return verdict
        logits = self.target.score(batch.rows, draft.tokens, draft.lengths)
        clock.lap("verify")
        return self._accept(batch, draft, logits)

    def _accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        verdict = accept(rule_for(self.acceptance, draft), logits, draft, batch.sampler)
        if self._observer is not None:
            self._observer.observe(batch.rows, draft, logits, verdict)
        return verdict

    def _batch(self, rows: list[Row]) -> Batch:
        backend = self.target.backend
        return Batch(rows, Sampler(rows, self._race, backend.vocab_size, backend.device))

    def _reserve(self, rows: Collection[Row]) -> None:
        length = max((row.prompt_length + row.params.max_tokens for row in rows), default=0)
        for session in (self.target, self.draft_session):
            if session is not None:
                session.reserve(min(len(rows), self.max_batch_size), length)


def _check(draft: Draft, batch: Batch, drafter: Drafter) -> None:
    rows = len(batch.rows)
    if draft.tokens.shape[0] != rows or len(draft.lengths) != rows or max(draft.lengths, default=0) > draft.width:
        raise UsageError(
            f"drafter {type(drafter).__name__} returned {draft.tokens.shape[0]} rows and {len(draft.lengths)} lengths "
            f"up to {max(draft.lengths, default=0)}; allowed: {rows} of each, lengths up to the width {draft.width}"
        )


def _compact(active: list[Row], waiting: deque[Row]) -> None:
    """Finished rows leave; the next prompt, or else the last row, takes a place that became free.

    Rows thus only ever move to lower places, which sessions rely on.
    """
    place = 0
    while place < len(active):
        if active[place].finish_reason is None:
            place += 1
        elif waiting:
            active[place] = waiting.popleft()
        elif place == len(active) - 1:
            active.pop()
        else:
            active[place] = active.pop()


def lengths_for(policy: Policy, rows: Sequence[Row], limit: int | None = None) -> list[int]:
    """The policy's choice, a request's own `num_draft_tokens` in its place, and never past a row's last token.

    A round commits at least one token of the target's own, so a row drafts at most `remaining - 1`. limit: the longest
    draft that the target's forward shapes allow.
    """
    longest = MAX_DRAFT_TOKENS if limit is None else min(limit, MAX_DRAFT_TOKENS)
    chosen = policy.num_draft_tokens(rows)
    own = [row.params.num_draft_tokens for row in rows]
    return [
        max(0, min(length if mine is None else mine, row.remaining - 1, longest))
        for row, length, mine in zip(rows, chosen, own, strict=True)
    ]
