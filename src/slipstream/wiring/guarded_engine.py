"""An engine in which an exception ends the row that caused it, and no other.

A round that raises is repeated row by row: rows that succeed get the tokens they would have had, and a row that fails
alone ends with its error. Nothing is lost by that, because before its tokens are committed a round changes only caches,
which are trusted as far as they hold committed tokens, and random draws are keyed by seed and position. If all rows
fail, decoding a plain row shows whether they or the engine are at fault. What a signal handler raises is no row's fault
and reaches the caller.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from traceback import walk_tb

import torch

from slipstream.core.kv_slots import SlotState
from slipstream.core.loop import STEPS, Batch, Engine
from slipstream.core.rounds import Round
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.errors import first_line, with_class
from slipstream.sampling.params import SamplingParams

log = logging.getLogger("slipstream")

NO_ROWS_FAULT = (KeyboardInterrupt, SystemExit, GeneratorExit)
PROBE_PROMPT = 16  # tokens, so that a prompt is read as well
PROBE = SamplingParams(max_tokens=4, ignore_eos=True)  # long enough to be drafted for


@dataclass
class GuardedEngine(Engine):
    """`Engine`, whose `step` raises only if the engine itself has failed. sessions: the target's and the draft model's.

    A step's rounds include those of rows that failed: without tokens, with finish reason "error".
    """

    sessions: Sequence[Session] = ()
    _ended: list[Round] = field(default_factory=list, init=False)  # to be reported with the next step

    def batch(self, rows: Sequence[Row]) -> Batch:
        """The rows' batch; an empty one if a row's options cannot be prepared, which `step` then reports."""
        try:
            return super().batch(rows)
        except Exception as error:
            if _is_from_signal_handler(error) or not self._end_failing(
                rows, lambda place: super(GuardedEngine, self).batch(rows[place : place + 1])
            ):
                raise
            return super().batch([])

    def read_ahead(self, running: Sequence[Row], new: Sequence[Row], budget: int) -> None:
        read_ahead = super().read_ahead
        try:
            read_ahead(running, new, budget)
        except Exception as error:
            self._tidy(running)
            if _is_from_signal_handler(error):
                raise
            self._end_failing(new, lambda place: read_ahead([*running, *new[:place]], new[place : place + 1], budget))

    @torch.inference_mode()
    def step(self, batch: Batch, read_ahead: Callable[[], None] | None = None) -> list[Round]:
        num_rounds = [len(row.rounds) for row in batch.rows]
        try:
            rounds = super().step(batch, read_ahead) if batch.rows else []
        except BaseException as error:
            if isinstance(error, NO_ROWS_FAULT) or _is_from_signal_handler(error):
                raise
            rounds = self._one_by_one(batch, num_rounds, error)
        if self._ended:
            rounds, self._ended = rounds + self._ended, []
        return rounds

    def _one_by_one(self, batch: Batch, num_rounds: Sequence[int], error: BaseException) -> list[Round]:
        """Repeat a step that has raised. num_rounds: how many rounds each row had before it."""
        rows, batch.rows = batch.rows, []  # a new batch will be made, as this one's sampler is in an unknown state
        self._tidy(rows)
        for place, row in enumerate(rows):
            if row.finish_reason is None:
                self._end_on_failure(row, partial(self._alone, rows, place, num_rounds[place], error))
        if all(row.error is not None for row in rows):
            try:
                self.check(error)
            except BaseException:
                for row in rows:  # the error is not the rows', and another engine may continue them
                    if not row.rounds[-1].tokens:
                        row.rounds.pop()
                    row.finish_reason = row.error = None
                raise
        return [round for row, count in zip(rows, num_rounds, strict=True) for round in row.rounds[count:]]

    def _alone(self, rows: Sequence[Row], place: int, num_rounds: int, error: BaseException) -> None:
        """One row's part of the step, in slot 0, whose content is kept elsewhere meanwhile."""
        row = rows[place]
        if len(rows) == 1:
            raise error
        if len(row.rounds) > num_rounds:  # the round is committed; it failed when the policy learned from it
            self.policy.observe([row])
            return
        for session in self.sessions:
            exchange(session, place, len(rows))
        try:
            super().step(super().batch([row]))
        finally:
            for session in self.sessions:
                exchange(session, place, len(rows))

    def _end_failing(self, rows: Sequence[Row], work: Callable[[int], object]) -> bool:
        """Do some work for each row, by its place, and end those that fail; returns whether any did."""
        for place, row in enumerate(rows):
            self._end_on_failure(row, partial(work, place))
        failed = [row.rounds[-1] for row in rows if row.error is not None]
        self._ended += failed
        return bool(failed)

    def _end_on_failure(self, row: Row, work: Callable[[], object]) -> None:
        """Do some work for a row, which is ended if it fails."""
        try:
            work()
        except BaseException as error:
            if isinstance(error, NO_ROWS_FAULT) or _is_from_signal_handler(error):
                raise
            self._tidy([])
            if not isinstance(error, Exception):  # a panic in Rust
                error = RuntimeError(with_class(error))
            row.fail(error)
            start, step = len(row.tokens), next(STEPS)
            row.rounds.append(Round(row.index, step, 1, start, (), (), 0, rejected=False, finish_reason="error"))

    def _tidy(self, rows: Sequence[Row]) -> None:
        """After an interrupted round: keep only committed tokens cached, those of a batch's rows in the rows' slots."""
        for session in self.sessions:
            forget_round(session)
        with suppress(Exception):  # a row that is not moved is read again
            for reader in filter(None, (self.target, self.draft_session)):
                reader.move_to_slots(rows)

    @torch.inference_mode()
    def check(self, error: BaseException) -> None:
        """Raise `error`, with which a step failed, unless a plain row can be decoded, if need be with empty caches."""
        try:
            self._decode_probe()
        except Exception:  # perhaps of the same cause, with other figures: the first is the one to report
            log.warning("the engine starts again with empty caches: %s", first_line(error))
            for session in self.sessions:
                session.forget()
            try:
                self._decode_probe()
            except Exception:
                raise error from None

    def _decode_probe(self) -> None:
        row = Row(-1, [0] * PROBE_PROMPT, PROBE, 0, group="probe")
        for session in (self.target, self.draft_session):
            if session is not None:
                session.reserve(1, len(row.tokens) + PROBE.max_tokens)
        batch = super().batch([row])
        while row.finish_reason is None:
            super().step(batch)
        if row.error is not None:
            raise row.error


def _is_from_signal_handler(error: BaseException) -> bool:
    """Whether a signal handler has raised the error, such as a caller's alarm, which may interrupt any code."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(handler, "__func__", handler) for handler in handlers if callable(handler)]
    codes = {
        getattr(function, "__code__", getattr(type(function).__call__, "__code__", None)) for function in functions
    }
    return any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__))


def forget_round(session: Session) -> None:
    """After a round that did not reach its end: keep only committed tokens cached."""
    table = session.table
    for slot, state in enumerate(table.states):
        if state.row is not None and state.round == len(state.row.rounds):
            state.base = state.written = table.checkpoint(slot, min(state.base, len(state.row.tokens)))
            state.branches = 0


def exchange(session: Session, place: int, num_rows: int) -> None:
    """Exchange what slot 0 and another one hold, through an idle slot after those of the batch's rows.

    If there is no memory for that, nothing is done, and the rows are read again.
    """
    if not place:
        return
    table = session.table
    with suppress(Exception):
        free = [slot for slot in range(num_rows, len(table.states)) if table.states[slot].is_idle]
        spare = free[-1] if free else len(table.states)
        session.reserve(spare + 1, 0)
        for slot in (0, place):
            if (row := table.states[slot].row) is not None:
                table.assign_slot(slot, row)  # moves the accepted nodes of a tree to their positions
        for source, slot in ((0, spare), (place, 0), (spare, place)):
            table.copy(source, slot, table.states[source])
        table.states[spare] = SlotState()
