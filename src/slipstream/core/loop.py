"""One round of a batch: draft, verify, accept, commit.

Plain decoding is the same loop with a drafter that proposes nothing. A round leaves a `Round` per row; text, statistics
and everything else are folded from them elsewhere. This module knows neither text nor model formats; who is in the
batch is up to `slipstream.core.scheduler`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.acceptance import Rule, accept, rule_for
from slipstream.core.interfaces import Backend, Drafter, Observer, Policy, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rng import Race
from slipstream.core.rounds import PREDICTION, Round, Seconds, TokenLogprobs, token_logprobs
from slipstream.core.session import PromptReader, Session
from slipstream.core.trees import arranged, main_chain
from slipstream.core.types import Draft, Row, Verdict
from slipstream.errors import SlipstreamError

STEPS = count()  # step numbers are unique in the process, so that rounds of several engines can be told apart


class Clock:
    """Measures the seconds of one step's parts."""

    def __init__(self) -> None:
        self._started = self._last = perf_counter()
        self._parts: dict[str, float] = {}

    def lap(self, part: str) -> None:
        """Count the time since the last lap as `part`."""
        now = perf_counter()
        self._parts[part] = now - self._last
        self._last = now

    def stop(self) -> Seconds:
        """The parts and the total."""
        return Seconds(**self._parts, total=perf_counter() - self._started)


@dataclass
class Batch:
    """The rows under way and their sampling options. Row i uses slot i of every session.

    logits: the target's in this round, [B, K + 1, V], if a row asks for log-probabilities. longest_short: see
    `LongTexts`; None if texts of any length are read alike.
    """

    rows: list[Row]
    sampler: Sampler
    longest_short: int | None = None
    logits: Tensor | None = None

    @property
    def wants_logprobs(self) -> bool:
        """Whether a row asks for log-probabilities."""
        return any(row.params.logprobs is not None for row in self.rows)

    def commit(self, draft: Draft, verdict: Verdict, clock: Clock, step: int) -> list[Round]:
        """Append what was accepted and the next token to each row, cut at its end. Waits for the device, once."""
        parts = verdict.accepted[:, None], verdict.next_token[:, None], draft.tokens, verdict.path
        # the one transfer of the round
        table: list[list[int]] = torch.cat([part for part in parts if part is not None], dim=1).tolist()
        clock.lap("accept")
        starts = [len(row.tokens) for row in self.rows]
        paths = [None if verdict.path is None else line[2 + draft.width :][: line[0]] for line in table]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(table)
        for i, (line, path) in enumerate(zip(table, paths, strict=True)):
            try:
                self._commit_row(i, line[:2], line[2:] if path is None else [line[2 + node] for node in path])
                logprobs[i] = self._logprobs(i, self.rows[i].tokens[starts[i] :], path)
            except Exception as error:  # a stop check's, say: what is committed cannot be decoded once more
                self.rows[i].fail(error)
        tokens = [tuple(row.tokens[start:]) for row, start in zip(self.rows, starts, strict=True)]
        seconds = clock.stop()
        for i, (row, line, committed, origin) in enumerate(zip(self.rows, table, tokens, draft.records, strict=True)):
            accepted, path, parents = line[0], paths[i], draft.parents[i] if draft.parents else None
            predicted = (draft.lengths[i] - sum(origin.forced)) * (origin.source == PREDICTION)
            row.rounds.append(
                Round(
                    row=row.index,
                    step=step,
                    num_rows=len(self.rows),
                    start=starts[i],
                    draft=tuple(line[2 : 2 + draft.lengths[i]]),
                    tokens=committed,
                    num_accepted_tokens=min(accepted, len(committed)),
                    rejected=len(committed) > accepted
                    and _has_unaccepted_tail(draft.lengths[i], accepted, parents, path),
                    finish_reason=row.finish_reason,
                    seconds=seconds,
                    num_draft_steps=draft.steps,
                    origin=origin,
                    logprobs=logprobs[i],
                    parents=parents,
                    path=None if path is None else tuple(path[: len(committed)]),
                    num_prediction_tokens=predicted if row.prediction else None,
                )
            )
        self.logits = None
        return [row.rounds[-1] for row in self.rows]

    def _logprobs(self, i: int, tokens: Sequence[int], path: Sequence[int] | None) -> tuple[TokenLogprobs, ...] | None:
        count = self.rows[i].params.logprobs
        if count is None or self.logits is None:
            return None
        logits = self.logits[i] if path is None else self.logits[i][[0, *(node + 1 for node in path)]]
        return token_logprobs(logits, tokens, count)

    def _commit_row(self, i: int, verdict: Sequence[int], draft: Sequence[int]) -> None:
        """Append what was accepted of a row's draft, and the next token. verdict: how many, and that token.

        A row fails at the position where plain decoding would: what was accepted before it is committed.
        """
        row, (accepted, next_token) = self.rows[i], verdict
        position, error = self.sampler.failures.get(i, (len(draft) + 1, None))
        if position > accepted:
            position, error = accepted, _no_token(row) if next_token < 0 else None
        tokens = [*draft[:position]] if error else [*draft[:accepted], next_token]
        max_tokens = self._max_tokens(row)
        if max_tokens is not None and position >= max_tokens:  # what follows is for a forward that reads a long text
            tokens, error = tokens[:max_tokens], None
        committed = row.commit(tokens)
        if error is not None and row.finish_reason is None:
            row.fail(error)
        self.sampler.advance(i, committed)

    def _max_tokens(self, row: Row) -> int | None:
        """How many tokens a round may commit: after the one that makes a text long, the model may choose others."""
        short = self.longest_short
        return None if short is None or len(row.tokens) > short else short + 1 - len(row.tokens)


def _has_unaccepted_tail(length: int, accepted: int, parents: Sequence[int] | None, path: Sequence[int] | None) -> bool:
    if parents is None or path is None:
        return accepted < length
    return (path[-1] if path else -1) in parents


def _no_token(row: Row) -> SlipstreamError:
    what = "sampling options leave" if row.constraint is None else "constraint and the other sampling options leave"
    return SlipstreamError(f"the {what} no token to choose from (every logit is -inf, or the model's own are NaN)")


Propose = Callable[[Sequence[int] | None], Draft]  # how many tokens a row may draft at most, if that is less
Drafts = Callable[[Sequence[int]], Draft]  # the drafter's, of so many tokens
Predict = Callable[[Sequence[Row], Sequence[int], Sequence[int], Drafts], Draft]  # rows, lengths, room, the drafter
Check = Callable[[object, Sequence[int], Drafter, Backend], None]  # raises unless it is a draft up to these lengths
MakeSampler = Callable[[Sequence[Row], Race, int, torch.device], Sampler]  # rows, race, vocabulary size, device


@dataclass
class Engine:
    """A target, a drafter, a policy and an acceptance rule: all that a round needs besides its rows.

    draft_session: the draft model's, which grows with the target's. drafts_for: whether the draft model drafts for
    a row, as far as is known beforehand; it then reads the prompts of all rows of the batch. predict: calls the drafter
    for the rows whose predictions are silent; a prediction may have as many tokens as there is room for.
    constrain: calls the drafter, and edits the drafts of rows with constraints. make_race: (vocabulary, device) -> how
    random draws are made.
    """

    target: Session
    drafter: Drafter
    policy: Policy
    make_sampler: MakeSampler
    acceptance: str | Rule = "auto"
    draft_session: PromptReader | None = None
    drafts_for: Callable[[Row], bool] = lambda row: False
    predict: Predict = lambda rows, lengths, room, drafts: drafts(lengths)
    constrain: Callable[[Sequence[Row], Propose], Draft] = lambda rows, propose: propose(None)
    make_race: Callable[[int, torch.device], Race] = Race
    check_draft: Check = lambda draft, max_lengths, drafter, backend: None

    def __post_init__(self) -> None:
        backend = self.target.backend
        self._race = self.make_race(backend.vocab_size, backend.device)
        self._observer = self.drafter if isinstance(self.drafter, Observer) else None

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows that are decoded together, row i in slot i."""
        backend = self.target.backend
        sampler = self.make_sampler(rows, self._race, backend.vocab_size, backend.device)
        return Batch(list(rows), sampler, self.target.table.longest_short)

    def read_ahead(self, running: Sequence[Row], new: Sequence[Row], budget: int) -> None:
        """Read about `budget` prompt tokens of rows that follow the running ones, with each model that needs them."""
        slots = dict(enumerate(new, len(running)))
        self.target.read_ahead(slots, budget)
        if self.draft_session is not None and (
            drafted := {i: row for i, row in slots.items() if self._drafts(row, running)}
        ):
            self.draft_session.move_to_slots(running)
            self.draft_session.read_ahead(drafted, budget)

    def has_read(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether every model that needs a new row's prompt has read it but for its last token."""
        draft = self.draft_session
        drafted = draft is None or not self._drafts(row, running) or draft.has_read(row)
        return drafted and self.target.has_read(row)

    def _drafts(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether the draft model will read a new row: it finishes what it has begun, and reads all rows of a batch."""
        has_begun = self.draft_session is not None and self.draft_session.holds(row)
        return has_begun or any(map(self.drafts_for, (row, *running)))

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
            rounds = batch.commit(nothing, self._accept(batch, nothing, answer), clock, next(STEPS))
        else:
            draft = self._verifiable(batch, self.constrain(batch.rows, partial(self._propose, batch)))
            batch.sampler.drafted()
            clock.lap("draft")
            rounds = batch.commit(draft, self._verdict(batch, draft, clock), clock, next(STEPS))
        self.policy.observe(batch.rows)
        return rounds

    def _propose(self, batch: Batch, limits: Sequence[int] | None) -> Draft:
        """The draft of the prediction or the drafter, cut to what is worth verifying."""
        rows, drafts = batch.rows, partial(self._drafts_of, batch)
        room = [
            min(n, limit) for n, limit in zip(self._room(rows), limits or [MAX_DRAFT_TOKENS] * len(rows), strict=True)
        ]
        lengths = list(map(min, self._lengths(rows), room))
        draft = self.predict(rows, lengths, room, drafts) if any(row.prediction for row in rows) else drafts(lengths)
        return self.policy.worth_verifying(rows, draft)

    def _drafts_of(self, batch: Batch, lengths: Sequence[int]) -> Draft:
        draft = self.drafter.propose(tuple(batch.rows), tuple(lengths), batch.sampler)  # which it cannot rearrange
        self.check_draft(draft, lengths, self.drafter, self.target.backend)
        return draft

    def _room(self, rows: Sequence[Row]) -> list[int]:
        """How many tokens each row may draft: none in a first round that a prompt's forward has answered."""
        limit = self.target.table.longest_draft(rows)
        return [self._may_draft(row) * room_of(row, limit) for row in rows]

    def _may_draft(self, row: Row) -> bool:
        return bool(row.rounds) or not self.target.answers

    def _lengths(self, rows: Sequence[Row]) -> list[int]:
        drafting = list(filter(self._may_draft, rows))  # the policy hears of no other
        lengths = iter(draft_lengths(self.policy, drafting) if drafting else [])
        return [next(lengths) if self._may_draft(row) else 0 for row in rows]

    def _verifiable(self, batch: Batch, draft: Draft) -> Draft:
        """The draft with a tree's nodes in chain order; only its main chain where branches cannot be verified."""
        if draft.parents is None:
            return draft
        tree = arranged(draft)
        return tree if batch.sampler.branching and self.target.fits_tree(batch.rows, tree) else main_chain(tree)

    def _verdict(self, batch: Batch, draft: Draft, clock: Clock) -> Verdict:
        """Verify and accept the draft, in one call where only the target's argmax is needed."""
        if draft.parents is not None:
            logits = self.target.score_tree(batch.rows, draft)
            clock.lap("verify")
            return self._accept(batch, draft, logits)
        rule = rule_for(self.acceptance, draft)
        if rule.coupled and batch.sampler.plain and self._observer is None and not batch.wants_logprobs:
            verdict = self.target.verify_greedy(batch.rows, draft.tokens, draft.lengths)
            clock.lap("verify")
            return verdict
        logits = self.target.score(batch.rows, draft.tokens, draft.lengths)
        clock.lap("verify")
        return self._accept(batch, draft, logits)

    def _accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        batch.logits = logits if batch.wants_logprobs else None
        verdict = accept(rule_for(self.acceptance, draft), logits, draft, batch.sampler)
        if self._observer is not None:
            self._observer.observe(tuple(batch.rows), draft, logits, verdict)
        return verdict


def room_of(row: Row, limit: int | None = None) -> int:
    """How many tokens a row may draft; one less than it may still commit, as a round adds one of the target's own.

    limit: the longest draft that the target's forward shapes allow. A request's own `num_draft_tokens` is kept to.
    """
    limits = MAX_DRAFT_TOKENS, limit, row.params.num_draft_tokens, row.remaining - 1
    return max(0, min(bound for bound in limits if bound is not None))


def draft_lengths(policy: Policy, rows: Sequence[Row], limit: int | None = None) -> list[int]:
    """The policy's choice, or a request's own `num_draft_tokens`, as far as there is room."""
    return [
        min(length if row.params.num_draft_tokens is None else row.params.num_draft_tokens, room_of(row, limit))
        for row, length in zip(rows, policy.lengths(rows), strict=True)
    ]
