"""Decides which rows are decoded together: rows are added, cancelled and finished at any step, each on its own.

Running rows occupy slots 0, 1, ... of every session; rows whose long prompts are still being read follow them. Rows
only ever move to lower slots, which sessions rely on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext

from slipstream.core.loop import Batch, Engine
from slipstream.core.rounds import Round
from slipstream.core.types import Row

PROMPT_BUDGET = 512  # prompt tokens read per step while other rows wait
IDLE_BUDGETS = 2  # budgets that a step reads while no row is being decoded, but others may come
QUICK_SHARE = 4  # every other step begins with a row that lacks at most a quarter of the tokens the first row lacks


class Scheduler:
    """Decodes any number of rows, at most `max_batch_size` at a time; a row that ends makes room for the next.

    prompt_budget: tokens of new prompts that each model reads in a step while other rows are being decoded, rounded up
    to a whole chunk, and multiplied where more rows are new than running. A longer prompt is read over several steps,
    so it delays the others by a bounded time in each.
    num_slots: the least number of KV cache slots; those without a row keep the prompts of ended rows, long and recently
    used ones longest. With more slots than places, rows are expected to come at any time: prompts are read in the last
    slots, so that rows with little to read can pass them, and in several steps even while no row is decoded.
    lock, turn: make the contexts that a step enters (turn) and every other call (lock), for schedulers and models that
    several threads use.
    """

    def __init__(
        self,
        engine: Engine,
        max_batch_size: int = 8,
        prompt_budget: int = PROMPT_BUDGET,
        lock: Callable[[], AbstractContextManager[None]] = nullcontext,
        turn: Callable[[], AbstractContextManager[None]] = nullcontext,
        num_slots: int = 0,
    ) -> None:
        self.engine, self.max_batch_size, self.prompt_budget = engine, max_batch_size, prompt_budget
        self.num_slots, self._lock, self._turn = num_slots, lock, turn
        self._waiting: deque[Row] = deque()
        self._running: list[Row] = []
        self._reading: list[Row] = []
        self._reading_slots: dict[Row, int] = {}
        self._may_pass = False  # the next step reads a row that has little to read before the first one
        self._reserved: list[Row] = []
        self._room = prompt_budget  # prompt tokens that the current step may still read
        self._batch: Batch | None = None

    @property
    def _expects_rows(self) -> bool:
        """True if rows may come at any time."""
        return self.num_slots > self.max_batch_size

    def add(self, row: Row) -> None:
        """Queue a row; it is decoded as soon as there is a place."""
        with self._lock():
            self._waiting.append(row)

    def cancel(self, row: Row) -> None:
        """End a row before its next round, wherever it is; what it has committed stays. Ended rows stay as they are."""
        with self._lock():
            row.finish_reason = row.finish_reason or "cancelled"

    @property
    def unfinished(self) -> bool:
        """True if a row is waiting or being decoded."""
        with self._lock():
            places = (self._running, self._reading, self._waiting)
            return any(row.finish_reason is None for rows in places for row in rows)

    def step(self) -> list[Round]:
        """One round of every running row, in the order of their places; nothing if no row is left."""
        with self._turn():
            self._admit()
            if not self._running:
                if self._reading:
                    self._reserve()
                    self._read_ahead()
                return []
            if self._reserved != self._running + self._reading:
                self._reserve()
            if self._batch is None or self._batch.rows != self._running:
                self._batch = self.engine.batch(self._running)
            try:
                return self.engine.step(self._batch, self._read_ahead if self._reading else None)
            except BaseException:  # the rows may go on from their committed tokens
                self._batch = None
                for session in filter(None, (self.engine.target, self.engine.draft_session)):
                    session.forget_round()
                raise

    def run(self, rows: Iterable[Row]) -> Iterator[Round]:
        """Add rows and step until none is left."""
        for row in rows:
            self.add(row)
        while (rounds := self.step()) or (self._expects_rows and self.unfinished):  # a step may only read prompts
            yield from rounds

    def _admit(self) -> None:
        """Ended rows leave, and rows that wait take their places."""
        if not self._waiting and not self._reading and all(row.finish_reason is None for row in self._running):
            return
        self._waiting = deque(row for row in self._waiting if row.finish_reason is None)
        self._reading = [row for row in self._reading if row.finish_reason is None]
        running = sum(row.finish_reason is None for row in self._running)
        new = min(len(self._waiting) + len(self._reading), self.max_batch_size - running)
        self._room = self.prompt_budget * max(1, new // max(1, running))
        if self._expects_rows and not running:
            self._room = self.prompt_budget * max(IDLE_BUDGETS, new)
        self._fill_places_of_ended()
        self._begin_waiting()
        if not any(row.rounds for row in self._running) and not self._expects_rows:
            # no running row would be delayed, so all rows that have a place begin together
            self._running, self._reading = self._running + self._reading, []

    def _fill_places_of_ended(self) -> None:
        place = 0
        while place < len(self._running):
            if self._running[place].finish_reason is None:
                place += 1
            elif self._waiting and self._is_short(self._waiting[0]):
                self._running[place] = self._waiting.popleft()
                self._room -= self._unread(self._running[place])
            elif place == len(self._running) - 1:
                self._running.pop()
            else:  # running rows occupy the first slots, so the last one moves down
                self._running[place] = self._running.pop()

    def _begin_waiting(self) -> None:
        for row in list(self._reading):
            if self.engine.has_read(row, self._running):
                self._reading.remove(row)
                self._running.append(row)
            elif not self._expects_rows:  # the row after it is in the next slot
                break
        while self._waiting and len(self._running) + len(self._reading) < self.max_batch_size:
            row = self._waiting.popleft()
            is_short = self._is_short(row)
            self._room -= self._unread(row) if is_short else 0
            (self._running if is_short else self._reading).append(row)

    def _unread(self, row: Row) -> int:
        """Tokens of a row's prompt that are not cached."""
        return row.prompt_length - (self.engine.target.num_cached(row) if self._expects_rows else 0)

    def _is_short(self, row: Row) -> bool:
        """True if the current step can read the row's whole prompt in addition to those of the rows it has admitted."""
        if not self._reading:
            return self._unread(row) <= self._room
        # it may pass rows that are read in pieces if it does not take their slots and leaves them half of the step
        return self._expects_rows and self._unread(row) <= self._room - self.prompt_budget // 2

    def _read_ahead(self) -> None:
        rows = self._reading
        if not self._expects_rows:
            self.engine.read_ahead(self._running, dict(enumerate(rows, len(self._running))), self._room)
            return
        kept = {row: slot for row, slot in self._reading_slots.items() if row in rows and slot >= len(self._running)}
        free = [slot for slot in range(self.num_slots) if slot not in kept.values()]
        self._reading_slots = {row: kept[row] if row in kept else free.pop() for row in rows}
        # rows that lack a common beginning lack about the same, so none passes the one that reads it for all
        limit = self._unread(rows[0]) // QUICK_SHARE
        quick = next((row for row in rows if self._may_pass and self._unread(row) <= limit), rows[0])
        self._may_pass = not self._may_pass
        ordered = [quick, *(row for row in rows if row is not quick)]
        self.engine.read_ahead(self._running, {self._reading_slots[row]: row for row in ordered}, self._room)

    def _reserve(self) -> None:
        """Make room in the caches for the admitted rows."""
        rows = self._running + self._reading
        length = max(row.prompt_length + row.params.max_tokens for row in rows)
        for session in filter(None, (self.engine.target, self.engine.draft_session)):
            session.reserve(max(len(rows), self.num_slots), length)
        self._reserved = rows
