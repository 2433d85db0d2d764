"""The rows of a round, and what follows the verdict: tokens are committed and facts written down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from slipstream.core.interfaces import Sampler
from slipstream.core.logprobs import token_logprobs
from slipstream.core.rounds import Round, Seconds, TokenLogprobs
from slipstream.core.types import Draft, Row, Verdict
from slipstream.errors import SlipstreamError


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
            except Exception as error:  # of its stop check or the like; what is committed can be no more repeated
                self.rows[i].fail(error)
        tokens = [tuple(row.tokens[start:]) for row, start in zip(self.rows, starts, strict=True)]
        seconds = clock.stop()
        for i, (row, line, committed) in enumerate(zip(self.rows, table, tokens, strict=True)):
            accepted, path, parents = line[0], paths[i], draft.parents[i] if draft.parents else None
            row.rounds.append(
                Round(
                    row=row.index,
                    step=step,
                    num_rows=len(self.rows),
                    start=starts[i],
                    draft=tuple(line[2 : 2 + draft.lengths[i]]),
                    tokens=committed,
                    num_accepted_tokens=min(accepted, len(committed)),
                    rejected=len(committed) > accepted and _goes_on(draft.lengths[i], accepted, parents, path),
                    finish_reason=row.finish_reason,
                    seconds=seconds,
                    num_draft_steps=draft.steps,
                    note=None if draft.notes is None else draft.notes[i],
                    logprobs=logprobs[i],
                    parents=parents,
                    path=None if path is None else tuple(path[: len(committed)]),
                    num_prediction_tokens=(draft.predicted[i] if draft.predicted else 0) if row.prediction else None,
                    forced=(0, 0) if draft.forced is None else draft.forced[i],
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
        most = self._most(row)
        if most is not None and position >= most:  # what follows is for a forward that reads a long text
            tokens, error = tokens[:most], None
        committed = row.commit(tokens)
        if error is not None and row.finish_reason is None:
            row.fail(error)
        self.sampler.advance(i, committed)

    def _most(self, row: Row) -> int | None:
        """The most tokens a round may commit: behind the one that makes a text long, others would be chosen."""
        short = self.longest_short
        return None if short is None or len(row.tokens) > short else short + 1 - len(row.tokens)


def _goes_on(length: int, accepted: int, parents: Sequence[int] | None, path: Sequence[int] | None) -> bool:
    """Whether the draft has tokens after those that were accepted."""
    if parents is None or path is None:
        return accepted < length
    return (path[-1] if path else -1) in parents


def _no_token(row: Row) -> SlipstreamError:
    what = "sampling options leave" if row.constraint is None else "constraint and the other sampling options leave"
    return SlipstreamError(f"the {what} no token to choose from (every logit is -inf, or the model's own are NaN)")
