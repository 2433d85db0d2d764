"""One round of a batch: draft, verify, accept, commit.

Plain decoding is the same loop with a drafter that proposes nothing. A round leaves a `Round` per row; text, statistics
and everything else are folded from them elsewhere. This module knows neither text nor model formats; who is in the
batch is up to `slipstream.core.scheduler`. To be read from `Engine.step` on: what it calls follows in that order.
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

Propose = Callable[[Sequence[int] | None], Draft]  # further limits of the rows' drafts, or None
AskDrafter = Callable[[Sequence[int]], Draft]  # the rows' draft lengths
Predict = Callable[[Sequence[Row], Sequence[int], Sequence[int], AskDrafter], Draft]  # rows, lengths, room, the drafter
Check = Callable[[object, Sequence[int], Drafter, Backend], None]  # raises unless it is a draft up to these lengths
MakeSampler = Callable[[Sequence[Row], Race, int, torch.device], Sampler]  # rows, race, vocabulary size, device


@dataclass
class Engine:
    """A target, a drafter, a policy and an acceptance rule: all that a round needs besides its rows.

    draft_session: the draft model's; its cache grows with the target's. drafts_for: whether the draft model is expected
    to draft for a row; it then reads the prompts of all rows of the batch. predict: drafts from the rows' predictions,
    as many tokens as there is room for, and asks the drafter where a prediction has nothing to propose.
    constrain: calls `Propose`, and edits the drafts of rows with constraints. make_race: (vocabulary size, device) ->
    the source of random draws.
    """

    target: Session
    drafter: Drafter
    policy: Policy
    make_sampler: MakeSampler
    acceptance: str | Rule = "auto"
    draft_session: PromptReader | None = None
    drafts_for: Callable[[Row], bool] = lambda row: False
    predict: Predict = lambda rows, lengths, room, ask_drafter: ask_drafter(lengths)
    constrain: Callable[[Sequence[Row], Propose], Draft] = lambda rows, propose: propose(None)
    make_race: Callable[[int, torch.device], Race] = Race
    check_draft: Check = lambda draft, max_lengths, drafter, backend: None

    def __post_init__(self) -> None:
        backend = self.target.backend
        self._race = self.make_race(backend.vocab_size, backend.device)
        self._observer = self.drafter if isinstance(self.drafter, Observer) else None

    @torch.inference_mode()
    def step(self, batch: Batch, clock: Clock, read_ahead: Callable[[], None] | None = None) -> list[Round]:
        """One round of every row: draft, verify, accept, commit.

        read_ahead: reads prompts of rows that are not in the batch yet.
        If the target can return the logits after a prompt while reading it, a row's first round draws from them. It
        never drafts then, so that a row's rounds depend neither on other rows nor on what is cached.
        """
        prompt_logits = self.target.prefill(batch.rows, logits=not any(row.rounds for row in batch.rows))
        if read_ahead is not None:
            read_ahead()
        clock.lap("prefill")
        if prompt_logits is not None:
            draft = Draft.empty(len(batch.rows), prompt_logits.device)
            verdict = self._accept(batch, draft, prompt_logits)
        else:
            draft = self._draft(batch)
            clock.lap("draft")
            if self._argmax_decides(batch, draft):
                verdict = self.target.verify_greedy(batch.rows, draft.tokens, draft.lengths)
                clock.lap("verify")
            else:
                logits = self._verify(batch, draft)
                clock.lap("verify")
                verdict = self._accept(batch, draft, logits)
        rounds = batch.commit(draft, verdict, clock, next(STEPS))
        self.policy.observe(batch.rows)
        return rounds

    def _draft(self, batch: Batch) -> Draft:
        """The draft to verify: a tree's nodes in chain order, or its main chain where branches cannot be verified."""
        draft = self.constrain(batch.rows, partial(self._propose, batch))
        batch.sampler.drafted()
        if draft.parents is None:
            return draft
        tree = arranged(draft)
        return tree if batch.sampler.branching and self.target.fits_tree(batch.rows, tree) else main_chain(tree)

    def _propose(self, batch: Batch, limits: Sequence[int] | None) -> Draft:
        """The draft of the prediction or the drafter, cut to what is worth verifying."""
        rows, ask_drafter = batch.rows, partial(self._ask_drafter, batch)
        room = self._room(rows, limits)
        lengths = self._lengths(rows, room)
        if any(row.prediction for row in rows):
            draft = self.predict(rows, lengths, room, ask_drafter)
        else:
            draft = ask_drafter(lengths)
        return self.policy.worth_verifying(rows, draft)

    def _room(self, rows: Sequence[Row], limits: Sequence[int] | None) -> list[int]:
        """How many tokens each row may draft: one less than it may still commit, as a round adds the target's own.

        The row's own `num_draft_tokens` and the target's forward shapes limit it too. 0 in a first round whose token
        comes from the prompt's logits.
        """
        longest = self.target.table.longest_draft(rows)
        room = []
        for row, limit in zip(rows, limits or [MAX_DRAFT_TOKENS] * len(rows), strict=True):
            bounds = MAX_DRAFT_TOKENS, limit, longest, row.params.num_draft_tokens, row.remaining - 1
            room.append(max(0, min(bound for bound in bounds if bound is not None)) if self._may_draft(row) else 0)
        return room

    def _lengths(self, rows: Sequence[Row], room: Sequence[int]) -> list[int]:
        """The policy's choice, or a request's own `num_draft_tokens`, as far as there is room."""
        drafting = list(filter(self._may_draft, rows))  # the policy is asked about these rows only
        chosen = iter(self.policy.lengths(drafting) if drafting else [])
        lengths = [next(chosen) if self._may_draft(row) else 0 for row in rows]
        return [
            row_room if row.params.num_draft_tokens is not None else min(length, row_room)
            for row, length, row_room in zip(rows, lengths, room, strict=True)
        ]

    def _may_draft(self, row: Row) -> bool:
        return bool(row.rounds) or not self.target.returns_prompt_logits

    def _ask_drafter(self, batch: Batch, lengths: Sequence[int]) -> Draft:
        # tuples, so that a drafter cannot change the batch
        draft = self.drafter.propose(tuple(batch.rows), tuple(lengths), batch.sampler)
        self.check_draft(draft, lengths, self.drafter, self.target.backend)
        return draft

    def _argmax_decides(self, batch: Batch, draft: Draft) -> bool:
        """Whether the target's argmax alone decides what is accepted, and nobody needs the logits."""
        coupled = draft.parents is None and rule_for(self.acceptance, draft).coupled
        return coupled and batch.sampler.plain and self._observer is None and not batch.wants_logprobs

    def _verify(self, batch: Batch, draft: Draft) -> Tensor:
        """[B, K + 1, V] logits of the target after the committed tokens and after each draft token."""
        if draft.parents is not None:
            return self.target.score_tree(batch.rows, draft)
        return self.target.score(batch.rows, draft.tokens, draft.lengths)

    def _accept(self, batch: Batch, draft: Draft, logits: Tensor) -> Verdict:
        batch.logits = logits if batch.wants_logprobs else None
        verdict = accept(rule_for(self.acceptance, draft), logits, draft, batch.sampler)
        if self._observer is not None:
            self._observer.observe(tuple(batch.rows), draft, logits, verdict)
        return verdict

    def batch(self, rows: Sequence[Row]) -> Batch:
        """Rows that are decoded together, row i in slot i."""
        backend = self.target.backend
        sampler = self.make_sampler(rows, self._race, backend.vocab_size, backend.device)
        return Batch(list(rows), sampler, self.target.table.longest_short)

    def read_ahead(self, running: Sequence[Row], new: Sequence[Row], budget: int) -> None:
        """Read about `budget` prompt tokens of rows that follow the running ones, with each model that needs them."""
        slots = dict(enumerate(new, len(running)))
        self.target.read_ahead(slots, budget)
        if self.draft_session is None:
            return
        if read := {slot: row for slot, row in slots.items() if self._model_reads(row, running)}:
            self.draft_session.move_to_slots(running)
            self.draft_session.read_ahead(read, budget)

    def has_read(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether every model that needs a new row's prompt has read it but for its last token."""
        draft = self.draft_session
        if draft is not None and self._model_reads(row, running) and not draft.has_read(row):
            return False
        return self.target.has_read(row)

    def _model_reads(self, row: Row, running: Sequence[Row]) -> bool:
        """Whether the draft model will read a new row: it finishes what it began, and reads all rows of a batch."""
        has_begun = self.draft_session is not None and self.draft_session.holds(row)
        return has_begun or any(map(self.drafts_for, (row, *running)))


@dataclass
class Batch:
    """The rows that are being decoded and their sampling options. Row i uses slot i of every session.

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
        # per row: how many tokens are accepted, the next token, the draft, the accepted path of a tree;
        # this is the one transfer of a round, unless it verified a tree
        table: list[list[int]] = torch.cat([part for part in parts if part is not None], dim=1).tolist()
        clock.lap("accept")
        starts = [len(row.tokens) for row in self.rows]
        paths = [None if verdict.path is None else line[2 + draft.width :][: line[0]] for line in table]
        logprobs: list[tuple[TokenLogprobs, ...] | None] = [None] * len(table)
        for i, (line, path) in enumerate(zip(table, paths, strict=True)):
            try:
                self._commit_row(i, line[:2], line[2:] if path is None else [line[2 + node] for node in path])
                logprobs[i] = self._logprobs(i, self.rows[i].tokens[starts[i] :], path)
            except Exception as error:  # from a stop check, say; committed tokens cannot be decoded again
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
        if max_tokens is not None and position >= max_tokens:  # the next forward reads the text as a long one
            tokens, error = tokens[:max_tokens], None
        committed = row.commit(tokens)
        if error is not None and row.finish_reason is None:
            row.fail(error)
        self.sampler.advance(i, committed)

    def _max_tokens(self, row: Row) -> int | None:
        """How many tokens a round may commit: up to the one that makes a text long (`LongTexts`); None for no limit."""
        short = self.longest_short
        return None if short is None or len(row.tokens) > short else short + 1 - len(row.tokens)


def _has_unaccepted_tail(length: int, accepted: int, parents: Sequence[int] | None, path: Sequence[int] | None) -> bool:
    if parents is None or path is None:
        return accepted < length
    return (path[-1] if path else -1) in parents


def _no_token(row: Row) -> SlipstreamError:
    what = "sampling options leave" if row.constraint is None else "constraint and the other sampling options leave"
    return SlipstreamError(f"the {what} no token to choose from (every logit is -inf, or the model's own are NaN)")


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
