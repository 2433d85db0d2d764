"""One round of a batch: draft, verify, accept, commit.

Plain decoding is the same loop with a drafter that proposes nothing. A round leaves a `Round` per row; text, statistics
and everything else are folded from them elsewhere. This module knows neither text nor model formats; who is in the
batch is up to `slipstream.core.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.acceptance import Rule, accept, rule_for
from slipstream.core.interfaces import Drafter, Observer, Policy, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.logprobs import token_logprobs
from slipstream.core.rng import Race
from slipstream.core.rounds import Round, Seconds, TokenLogprobs
from slipstream.core.session import PromptReader, Session
from slipstream.core.types import Draft, Row, Verdict
from slipstream.errors import SlipstreamError, UsageError

_steps = count()  # step numbers are unique in the process, so that rounds of several engines can be told apart
MakeSampler = Callable[[Sequence[Row], Race, int, torch.device], Sampler]  # rows, race, vocabulary size, device


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
    """The rows under way and their sampling options. Row i uses slot i of every session.

    logits: the target's in this round, [B, K + 1, V], if a row asks for log-probabilities.
    """

    rows: list[Row]
    sampler: Sampler
    logits: Tensor | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether a row asks for log-probabilities."""
        return any(row.params.logprobs is not None for row in self.rows)

    def commit(self, draft: Draft, verdict: Verdict, clock: Clock, step: int) -> list[Round]:
        """Append what was accepted and the next token to each row, cut at its end. Waits for the device, once."""
        columns = [draft.tokens, verdict.next_token[:, None], verdict.accepted[:, None]]
        table: list[list[int]] = torch.cat(columns, dim=1).tolist()  # the one transfer of the round
        clock.lap("accept")
        starts = [len(row.tokens) for row in self.rows]
        tokens = [self._commit_row(i, line, draft.width) for i, line in enumerate(table)]
        logprobs = [self._logprobs(i, committed) for i, committed in enumerate(tokens)]
        seconds = clock.stop()
        for i, (row, line, committed) in enumerate(zip(self.rows, table, tokens, strict=True)):
            length, accepted = draft.lengths[i], line[-1]
            row.rounds.append(
                Round(
                    row=row.index,
                    step=step,
                    num_rows=len(self.rows),
                    start=starts[i],
                    draft=tuple(line[:length]),
                    tokens=committed,
                    num_accepted_tokens=min(accepted, len(committed)),
                    rejected=accepted < length and len(committed) > accepted,
                    finish_reason=row.finish_reason,
                    seconds=seconds,
                    num_draft_steps=draft.steps,
                    note=None if draft.notes is None else draft.notes[i],
                    logprobs=logprobs[i],
                )
            )
        return [row.rounds[-1] for row in self.rows]

    def _logprobs(self, i: int, tokens: Sequence[int]) -> tuple[TokenLogprobs, ...] | None:
        count = self.rows[i].params.logprobs
        return None if count is None or self.logits is None else token_logprobs(self.logits[i], tokens, count)

    def _commit_row(self, i: int, line: Sequence[int], width: int) -> tuple[int, ...]:
        """Append row i's part of the table: `width` draft tokens, the next token, how many drafts were accepted.

        A row fails at the position where plain decoding would: what was accepted before it is committed.
        """
        row, (next_token, accepted) = self.rows[i], line[width:]
        position, error = self.sampler.failures.get(i, (width + 1, None))
        if position > accepted:
            position, error = accepted, _no_token() if next_token < 0 else None
        committed = row.commit(line[:position] if error else [*line[:accepted], next_token])
        if error is not None and row.finish_reason is None:
            row.fail(error)
        self.sampler.advance(i, committed)
        return committed


@dataclass
class Engine:
    """A target, a drafter, a policy and an acceptance rule: all that a round needs besides its rows.

    draft_session: the draft model's, which grows with the target's. drafts_for: whether the draft model drafts for
    a row, as far as is known beforehand; it reads the prompts of rows beside one that it drafts for.
    """

    target: Session
    drafter: Drafter
    policy: Policy
    make_sampler: MakeSampler
    acceptance: str | Rule = "auto"
    draft_session: PromptReader | None = None
    drafts_for: Callable[[Row], bool] = lambda row: False

    def __post_init__(self) -> None:
        backend = self.target.backend
        self._race = Race(backend.vocab_size, backend.device)
        self._observer = self.drafter if isinstance(self.drafter, Observer) else None

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows that are decoded together, row i in slot i."""
        backend = self.target.backend
        return Batch(list(rows), self.make_sampler(rows, self._race, backend.vocab_size, backend.device))

    def read_ahead(self, running: Sequence[Row], new: Sequence[Row], budget: int) -> None:
        """Read about `budget` prompt tokens of rows that follow the running ones, with each model that needs them."""
        slots = dict(enumerate(new, len(running)))
        self.target.read_ahead(slots, budget)
        if self.draft_session is not None and (
            drafted := {i: row for i, row in slots.items() if self._drafts(row, running)}
        ):
            self.draft_session.settle(running)
            self.draft_session.read_ahead(drafted, budget)

    def has_read(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether every model that needs a new row's prompt has read it but for its last token."""
        draft = self.draft_session
        drafted = draft is None or not self._drafts(row, running) or draft.has_read(row)
        return drafted and self.target.has_read(row)

    def _drafts(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether the draft model will read a new row, as it reads all rows of a batch; what it begins it ends."""
        begun = self.draft_session is not None and self.draft_session.holds(row)
        return begun or any(map(self.drafts_for, (row, *running)))

    @torch.inference_mode()
    def step(self, batch: Batch, clock: Clock, read_ahead: Callable[[], None] | None = None) -> list[Round]:
        """One round of every row. read_ahead: reads prompts of rows that are not in the batch yet.

        Where the forwards that read a prompt say what comes next, a row's first round is that token and drafts nothing:
        always, so that its rounds depend neither on other rows nor on what is cached.
        """
        answer = self.target.prefill(batch.rows, answer=not any(row.rounds for row in batch.rows))
        if read_ahead is not None:
            read_ahead()
        clock.lap("prefill")
        if answer is not None:
            nothing = Draft.empty(len(batch.rows), answer.device)
            rounds = batch.commit(nothing, self._accept(batch, nothing, answer), clock, next(_steps))
        else:
            draft = self.drafter.propose(batch.rows, self._lengths(batch.rows), batch.sampler)
            _check(draft, batch, self.drafter)
            draft = self.policy.worth_verifying(batch.rows, draft)
            clock.lap("draft")
            rounds = batch.commit(draft, self._verdict(batch, draft, clock), clock, next(_steps))
        self.policy.observe(batch.rows)
        return rounds

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        drafting = [row for row in rows if row.rounds or not self.target.answers]  # the policy hears of no other
        lengths = draft_lengths(self.policy, drafting, self.target.longest_draft) if drafting else []
        chosen = {id(row): length for row, length in zip(drafting, lengths, strict=True)}
        return [chosen.get(id(row), 0) for row in rows]

    def _verdict(self, batch: Batch, draft: Draft, clock: Clock) -> Verdict:
        """Verify and accept: in one call where the target can and nothing but its argmax is needed."""
        rule = rule_for(self.acceptance, draft)
        if rule.coupled and batch.sampler.plain and self._observer is None and not batch.wants_logprobs:
            verdict = self.target.verify_greedy(batch.rows, draft.tokens, draft.lengths)
            if verdict is not None:
                clock.lap("verify")
                return verdict
        logits = self.target.score(batch.rows, draft.tokens, draft.lengths)
        clock.lap("verify")
        return self._accept(batch, draft, logits)

    def _accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        batch.logits = logits if batch.wants_logprobs else None
        verdict = accept(rule_for(self.acceptance, draft), logits, draft, batch.sampler)
        if self._observer is not None:
            self._observer.observe(batch.rows, draft, logits, verdict)
        return verdict


def _no_token() -> SlipstreamError:
    return SlipstreamError("the sampling options leave no token to choose from (every logit is -inf)")


def draft_lengths(policy: Policy, rows: Sequence[Row], limit: int | None = None) -> list[int]:
    """The policy's choice, a request's own `num_draft_tokens` in its place, and never past a row's last token.

    A round commits at least one token of the target's own, so a row drafts at most `remaining - 1`. limit: the longest
    draft that the target's forward shapes allow.
    """
    longest = MAX_DRAFT_TOKENS if limit is None else min(limit, MAX_DRAFT_TOKENS)
    chosen = policy.lengths(rows)
    own = [row.params.num_draft_tokens for row in rows]
    return [
        max(0, min(length if mine is None else mine, row.remaining - 1, longest))
        for row, length, mine in zip(rows, chosen, own, strict=True)
    ]


def _check(draft: object, batch: Batch, drafter: Drafter) -> None:
    name, rows = type(drafter).__name__, len(batch.rows)
    if not isinstance(draft, Draft):
        raise UsageError(
            f"drafter {name} returned {type(draft).__name__}; allowed: a Draft, for example "
            "Draft.from_lists(one list of token ids per row, sampler.device)"
        )
    if draft.tokens.shape[0] != rows or len(draft.lengths) != rows or max(draft.lengths, default=0) > draft.width:
        raise UsageError(
            f"drafter {name} returned {draft.tokens.shape[0]} rows and {len(draft.lengths)} lengths "
            f"up to {max(draft.lengths, default=0)}; allowed: {rows} of each, lengths up to the width {draft.width}"
        )
