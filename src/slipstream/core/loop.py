"""One round of a batch: draft, verify, accept, commit.

Plain decoding is the same loop without a source of drafts. A round leaves a `Round` per row, from which text,
statistics and everything else are computed elsewhere. This module knows neither text nor model formats;
`slipstream.core.scheduler` decides which rows are in the batch. Start reading at `Engine.step`: the functions that it
calls follow in the order of the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.acceptance import Rule, accept, rule_for
from slipstream.core.interfaces import Grammar, Observer, PlainTimes, Policy, Sampler, Source, counted_experts
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.rng import Race
from slipstream.core.rounds import PREDICTION, Round, RowDraft, Seconds, TokenLogprobs, token_logprobs
from slipstream.core.session import PromptReader, Session
from slipstream.core.trees import arranged, main_chain
from slipstream.core.types import Draft, Row, Verdict
from slipstream.errors import SlipstreamError

STEPS = count()  # step numbers are unique in the process, so that rounds of several engines can be told apart

MakeSampler = Callable[[Sequence[Row], Race, int, torch.device], Sampler]  # rows, race, vocabulary size, device


@dataclass
class Engine:
    """A target, sources of drafts, a policy and an acceptance rule: all that a round needs besides its rows."""

    target: Session
    sources: Sequence[Source]  # asked in this order
    policy: Policy
    make_sampler: MakeSampler
    acceptance: str | Rule = "auto"
    draft_session: PromptReader | None = None  # the draft model's; its KV cache grows with the target's
    reads_ahead: bool = True  # the draft model reads the prompts of rows that wait
    grammar: Grammar | None = None  # proposes what constraints force, and cuts what they forbid
    make_race: Callable[[int, torch.device], Race] = Race  # (vocabulary size, device) -> the source of random draws
    now: Callable[[], float] = perf_counter  # seconds

    def __post_init__(self) -> None:
        backend = self.target.backend
        self._race = self.make_race(backend.vocab_size, backend.device)
        self._experts = counted_experts(backend)
        drafters = [source.drafter for source in self.sources]
        self._observers = [drafter for drafter in drafters if isinstance(drafter, Observer)]

    @torch.inference_mode()
    def step(self, batch: Batch, read_ahead: Callable[[], None] | None = None) -> list[Round]:
        """One round of every row: draft, verify, accept, commit.

        read_ahead: reads prompts of rows that are not in the batch yet.
        If the target returns the logits after a prompt when it reads it, a row's first round takes its token from them.
        Such a round never drafts, so that a row's rounds depend neither on other rows nor on what is cached.
        """
        rows, started = batch.rows, self.now()
        prompt_logits = self.target.prefill(rows, logits=not any(row.rounds for row in rows))
        if read_ahead is not None:
            read_ahead()
        prefilled = drafted = verified = self.now()
        experts_read: float | None = None
        if prompt_logits is not None:
            draft = Draft.empty(len(rows), prompt_logits.device)
            verdict = self._accept(batch, draft, prompt_logits)
        else:
            draft = self._draft(batch)
            read_before = 0 if self._experts is None else self._experts.num_read()
            drafted = self.now()
            if batch.is_greedy and draft.parents is None and rule_for(self.acceptance, draft).distributions is None:
                verdict = self.target.verify_greedy(rows, draft)  # the argmax alone decides
                verified = self.now()
            else:
                if draft.parents is None:
                    logits = self.target.score(rows, draft.tokens, draft.lengths)
                else:
                    logits = self.target.score_tree(rows, draft)
                verified = self.now()
                verdict = self._accept(batch, draft, logits)
            if self._experts is not None:
                experts_read = (self._experts.num_read() - read_before) / self._experts.layers
        rounds = batch.commit(draft, verdict, Times(started, prefilled, drafted, verified), experts_read)
        self.policy.observe(rows)
        return rounds

    def _draft(self, batch: Batch) -> Draft:
        """The draft to verify: tokens that a constraint forces, and the best that the sources propose after them."""
        rows, draft = batch.rows, Draft.empty(len(batch.rows), self.target.backend.device)
        sources = [source for source in self.sources if batch.has_predictions or not source.of_predictions]
        forced = self.grammar.forced(rows) if self.grammar is not None and batch.has_constraints else None
        if not sources and forced is None:
            return draft
        for row, tokens in zip(rows, forced or (), strict=False):
            row.tokens += tokens  # the sources read forced tokens as if they had been committed
        try:
            room = self._room(rows, forced)
            for source in sources:
                lengths = self.policy.lengths(rows, source, draft, room)
                for place, row in enumerate(rows):
                    if row.params.num_draft_tokens is not None and not draft.lengths[place]:
                        lengths[place] = room[place]  # the request's own length, until a source proposes something
                if any(lengths):  # tuples, so that a drafter cannot change the batch
                    proposed = source.drafter.propose(tuple(rows), tuple(lengths), batch.sampler)
                    kept = [not length for length in lengths]
                    if draft.width and not source.takes_forwards and proposed.probs is None:
                        # keep the draft that promises more; but one of a model replaces earlier ones: it is asked only
                        # where it promises more, and dropping a sampled one for its tokens would bias the text
                        promised = zip(draft.promised, proposed.promised, strict=True)
                        promises_more = [before >= after and before > 0 for before, after in promised]
                        kept = [keeps or more for keeps, more in zip(kept, promises_more, strict=True)]
                    draft = Draft.where(kept, draft, proposed)
            draft = self.policy.worth_verifying(rows, draft)
        finally:
            for row, tokens in zip(rows, forced or (), strict=False):
                del row.tokens[len(row.tokens) - len(tokens) :]
        batch.sampler.drafted()
        if self.grammar is not None and forced is not None:
            draft = self.grammar.around(rows, forced, draft)
        if draft.parents is None:
            return draft
        tree = arranged(draft)
        return tree if batch.sampler.branching and self.target.fits_tree(rows, tree) else main_chain(tree)

    def _room(self, rows: Sequence[Row], forced: Sequence[Sequence[int]] | None) -> list[int]:
        """The most tokens that each row may draft: one fewer than it may commit, as a round adds one of the target's.

        The row's own `num_draft_tokens`, the target's forward shapes and forced tokens limit it, too. It is 0 in a
        first round whose token comes from the prompt's logits.
        """
        table = self.target.table
        longest = table.longest_draft(rows)
        limit = MAX_DRAFT_TOKENS if longest is None else min(longest, MAX_DRAFT_TOKENS)
        first_drafts = not table.returns_prompt_logits
        room = [max(0, min(limit, row.remaining - 1)) if row.rounds or first_drafts else 0 for row in rows]
        for place, row in enumerate(rows):
            if row.params.num_draft_tokens is not None:
                room[place] = min(room[place], row.params.num_draft_tokens)
        if self.grammar is not None and forced is not None:
            room = list(map(min, room, self.grammar.room_after(rows, forced)))
        return room

    def _accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        # a copy, because a user's rule or drafter may write to what it is shown
        batch.logits = logits.clone() if batch.wants_logprobs else None
        verdict = accept(rule_for(self.acceptance, draft), logits, draft, batch.sampler)
        for observer in self._observers:
            observer.observe(tuple(batch.rows), draft, logits, verdict)
        return verdict

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows that are decoded together, row i in slot i."""
        backend = self.target.backend
        sampler = self.make_sampler(rows, self._race, backend.vocab_size, backend.device)
        longest_short, plain_times = self.target.table.longest_short, self.policy.plain_times
        return Batch(list(rows), sampler, longest_short, bool(self._observers), self.now, plain_times)

    def read_ahead(self, running: Sequence[Row], slots: Mapping[int, Row], budget: int) -> None:
        """Read about `budget` prompt tokens of new rows with each model that needs them. slots: the rows by slot."""
        self.target.read_ahead(slots, budget)
        if self.draft_session is None:
            return
        if read := {slot: row for slot, row in slots.items() if self._model_reads(row, running)}:
            self.draft_session.move_to_slots(running)
            self.draft_session.read_ahead(read, budget)

    def has_read(self, row: Row, running: Sequence[Row]) -> bool:
        """True if every model that needs a new row's prompt has read it except for its last token."""
        draft = self.draft_session
        if draft is not None and self._model_reads(row, running) and not draft.has_read(row):
            return False
        return self.target.has_read(row)

    def _model_reads(self, row: Row, running: Sequence[Row]) -> bool:
        """True if the draft model will read a new row: it has begun to, or the batch will probably use its drafts."""
        has_begun = self.draft_session is not None and self.draft_session.holds(row)
        return has_begun or (self.reads_ahead and any(map(self._expects_drafts, (row, *running))))

    def _expects_drafts(self, row: Row) -> bool:
        requested = row.params.num_draft_tokens
        return self.policy.expects_drafts(row) if requested is None else requested > 0


class Times(NamedTuple):
    """The times, in seconds, at which a step began and its parts ended."""

    started: float
    prefilled: float
    drafted: float
    verified: float


@dataclass
class Batch:
    """The rows that are being decoded and their sampling options. Row i uses slot i of every session."""

    rows: list[Row]
    sampler: Sampler
    longest_short: int | None = None  # see `LongTexts`; None if texts of any length are read alike
    is_observed: bool = False  # a drafter reads the target's logits
    now: Callable[[], float] = perf_counter
    plain_times: PlainTimes | None = None
    logits: Tensor | None = None  # the target's in this round, [B, K + 1, V], if a row asks for log-probabilities

    def __post_init__(self) -> None:
        self.wants_logprobs = any(row.params.logprobs is not None for row in self.rows)
        self.has_constraints = any(row.constraint is not None for row in self.rows)
        self.has_predictions = any(row.prediction for row in self.rows)
        # if the rule takes the target's own choice, the argmax at each position is all that is needed of the logits
        self.is_greedy = self.sampler.plain and not self.is_observed and not self.wants_logprobs

    def commit(self, draft: Draft, verdict: Verdict, times: Times, experts_read: float | None = None) -> list[Round]:
        """Append what was accepted and the next token to each row, cut at its end. Waits for the device, once."""
        outcomes, step = RowOutcome.read(draft, verdict), next(STEPS)
        accepted = self.now()
        starts = [len(row.tokens) for row in self.rows]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(outcomes)
        failures = self.sampler.failures
        for place, (row, outcome) in enumerate(zip(self.rows, outcomes, strict=True)):
            try:
                self._commit_row(place, outcome, failures.get(place))
                if self.logits is not None and row.params.logprobs is not None:
                    logits = self.logits[place]
                    if outcome.path is not None:
                        logits = logits[[0, *(node + 1 for node in outcome.path)]]
                    logprobs[place] = token_logprobs(logits, row.tokens[starts[place] :], row.params.logprobs)
            except Exception as error:  # from a stop check, for example; what is committed stays, so the row ends here
                row.fail(error)
        self.logits = None
        seconds = Seconds(
            prefill=times.prefilled - times.started,
            draft=times.drafted - times.prefilled,
            verify=times.verified - times.drafted,
            accept=accepted - times.verified,
            total=self.now() - times.started,
        )
        plain_seconds = None
        if self.plain_times is not None and seconds.verify:
            plain_seconds = self.plain_times.plain_seconds(draft.lengths, seconds)
        for row, start, outcome, row_logprobs in zip(self.rows, starts, outcomes, logprobs, strict=True):
            tokens, origin, path = tuple(row.tokens[start:]), outcome.origin, outcome.path
            predicted = (len(outcome.draft) - sum(origin.forced)) * (origin.source == PREDICTION)
            row.rounds.append(
                Round(
                    row=row.index,
                    step=step,
                    num_rows=len(self.rows),
                    start=start,
                    draft=outcome.draft,
                    tokens=tokens,
                    num_accepted_tokens=min(len(outcome.accepted), len(tokens)),
                    rejected=len(tokens) > len(outcome.accepted) and outcome.has_unaccepted_tail,
                    finish_reason=row.finish_reason,
                    seconds=seconds,
                    num_draft_steps=draft.steps,
                    origin=origin,
                    logprobs=row_logprobs,
                    parents=outcome.parents,
                    path=None if path is None else path[: len(tokens)],
                    num_prediction_tokens=predicted if row.prediction else None,
                    experts_read=experts_read,
                    plain_seconds=plain_seconds,
                )
            )
        return [row.rounds[-1] for row in self.rows]

    def _commit_row(self, place: int, outcome: RowOutcome, failure: tuple[int, Exception] | None) -> None:
        """Append what was accepted of a row's draft, and the next token.

        failure: the first position at which the row's own logits processors raised, and what they raised. The row fails
        there, as in plain decoding; tokens accepted before it are committed.
        """
        row, accepted = self.rows[place], outcome.accepted
        position, error = failure or (len(outcome.draft) + 1, None)
        if row.error is not None:  # its drafter has failed
            row.fail(row.error)
            return
        if position > len(accepted):
            position, error = len(accepted), _no_token(row) if outcome.next_token < 0 else None
        tokens = accepted[:position] if error else [*accepted, outcome.next_token]
        if self.longest_short is not None and len(row.tokens) <= self.longest_short:
            max_tokens = self.longest_short + 1 - len(row.tokens)  # the next forward reads the text as a long one
            if position >= max_tokens:
                tokens, error = tokens[:max_tokens], None
        committed = row.commit(tokens)
        if error is not None and row.finish_reason is None:
            row.fail(error)
        self.sampler.advance(place, committed)


@dataclass(frozen=True)
class RowOutcome:
    """The verdict on one row's draft, on the host."""

    draft: tuple[int, ...]
    accepted: tuple[int, ...]  # tokens of it
    next_token: int  # the one that follows them
    has_unaccepted_tail: bool  # a draft token follows them, which the next token replaces
    origin: RowDraft
    parents: tuple[int, ...] | None  # of a tree's nodes
    path: tuple[int, ...] | None  # a tree's accepted nodes

    @staticmethod
    def read(draft: Draft, verdict: Verdict) -> list[RowOutcome]:
        """The rows' outcomes; the one transfer of a round, unless it verified a tree."""
        parts = [verdict.accepted[:, None], verdict.next_token[:, None], draft.tokens]
        if verdict.path is not None:
            parts.append(verdict.path)
        table: list[list[int]] = torch.cat(parts, dim=1).tolist()
        outcomes = []
        for row, (line, length, origin) in enumerate(zip(table, draft.lengths, draft.records, strict=True)):
            num_accepted, next_token, tokens = line[0], line[1], tuple(line[2 : 2 + length])
            parents = path = None
            accepted, has_unaccepted_tail = tokens[:num_accepted], num_accepted < length
            if draft.parents is not None:
                parents, path = draft.parents[row], tuple(line[2 + draft.width :][:num_accepted])
                accepted = tuple(tokens[node] for node in path)
                has_unaccepted_tail = (path[-1] if path else -1) in parents
            outcomes.append(RowOutcome(tokens, accepted, next_token, has_unaccepted_tail, origin, parents, path))
        return outcomes


def _no_token(row: Row) -> SlipstreamError:
    what = "sampling options leave" if row.constraint is None else "constraint and the other sampling options leave"
    return SlipstreamError(f"the {what} no token to choose from (every logit is -inf, or the model's own are NaN)")
