"""The thread that owns the decoders: requests come in through a mailbox, events leave once per step.

No other thread touches language models, caches and drafters, so no thread waits for a lock, the event loop never
computes, and two models never compete for the cores: they take turns, a step each. (Vision towers compute where prompts
are rendered.) Callers take turns, each caller's requests in order of arrival. While rows are under way, a step reads
only as many prompt tokens as they can wait for.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import sys
import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic
from typing import TypeVar

from slipstream.apps.server.live_request import Committed, Ended, Event, Job, LiveRequest, Scored, Started, notify_all
from slipstream.apps.server.thread_call import ThreadCall
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError, with_class
from slipstream.text.detokenizer import new_text
from slipstream.wiring.prompt_scores import PromptScores

log = logging.getLogger("slipstream.server")
PROMPT_SECONDS = 0.05  # that a step may spend on prompts while rows are under way
FIRST_TOKENS = 128  # prompt tokens of a step before anything has been measured
MIN_TOKENS, MAX_TOKENS = 32, 2048  # below the minimum each token costs much more
LEARNING_RATE = 0.3  # how far one step moves the average
GATHER_SECONDS = 0.02  # that the first request after idleness waits at most for the rest of its burst
SHORT_ROW_TOKENS = 256  # rows up to this length soon free their place
T = TypeVar("T")
SPARE_SLOTS = 1  # beyond a full batch, so that a new row need not overwrite the cached text of one that has ended


def collect() -> None:
    """Free the memory of models, which hold circles of references, and of loading them."""
    gc.collect()
    if sys.platform == "linux":
        with suppress(AttributeError):  # other C libraries than glibc, which keeps much of what is freed
            ctypes.CDLL(None).malloc_trim(0)


class PromptBudget:
    """Learns what a prompt token costs on this machine."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    @property
    def tokens(self) -> int:
        """Prompt tokens that take about `PROMPT_SECONDS`."""
        if self._seconds_per_token is None:
            return FIRST_TOKENS
        return round(max(MIN_TOKENS, min(MAX_TOKENS, PROMPT_SECONDS / self._seconds_per_token)))

    def learn(self, tokens: int, seconds: float) -> None:
        """Learn from a step that read `tokens` of prompts in `seconds`."""
        if tokens < MIN_TOKENS or seconds <= 0:
            return
        cost, average = seconds / tokens, self._seconds_per_token
        self._seconds_per_token = cost if average is None else average + LEARNING_RATE * (cost - average)


class FairQueue:
    """Jobs that wait for a place in the batch: callers in turn, and the requests of each caller in turn."""

    def __init__(self) -> None:
        self._callers: OrderedDict[str, OrderedDict[LiveRequest, deque[Job]]] = OrderedDict()

    def __len__(self) -> int:
        return sum(len(line) for requests in self._callers.values() for line in requests.values())

    def add(self, job: Job) -> None:
        """Queue a job after the others of its request."""
        requests = self._callers.setdefault(job.request.caller, OrderedDict())
        requests.setdefault(job.request, deque()).append(job)

    def take(self, may_begin: Callable[[Job], bool] = lambda job: True) -> Job | None:
        """The next job that may begin; its caller, and its request among the caller's, go to the end of the line."""
        jobs = (line[0] for requests in self._callers.values() for line in requests.values())
        job = next(filter(may_begin, jobs), None)
        if job is not None:
            self.remove(job)
            if (requests := self._callers.get(job.request.caller)) is not None:
                self._callers.move_to_end(job.request.caller)
                if job.request in requests:
                    requests.move_to_end(job.request)
        return job

    def remove(self, job: Job) -> None:
        requests = self._callers.get(job.request.caller, OrderedDict())
        line = requests.get(job.request, deque())
        if job in line:
            line.remove(job)
            if not line:
                del requests[job.request]
            if not requests:
                del self._callers[job.request.caller]


Events = list[tuple[LiveRequest, Event]]
OnStep = Callable[[list[Round]], None]  # called on the event loop with the rounds of every step
OnEnd = Callable[[BaseException | None], None]  # called on the event loop, with the error if one is the reason


class EngineThread:
    """Loads and unloads models, and decodes their jobs, until it is stopped.

    is_more_coming: returns True while more requests are being prepared.
    """

    def __init__(self, on_end: OnEnd, is_more_coming: Callable[[], bool] = lambda: False) -> None:
        self._on_end, self._is_more_coming, self._loop = on_end, is_more_coming, asyncio.get_running_loop()
        self._mail: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._line: list[ModelEngine] = []  # the model whose last step is longest ago comes first
        self._step_begun: float | None = None
        self._thread = threading.Thread(target=self._run, name="slipstream-engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def post(self, function: Callable[[], None]) -> None:
        """Call a function in this thread, before the next step."""
        with self._wake:
            self._mail.append(function)
            self._wake.notify()

    def call(self, function: Callable[[], T]) -> asyncio.Future[T]:
        """The outcome of a function that is called in this thread, before the next step."""
        call = ThreadCall(function)
        self.post(call.run)
        return call.result

    def stop(self) -> None:
        """End the thread after the step under way."""
        with self._wake:
            self._stopping = True
            self._wake.notify()

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def step_seconds(self) -> float:
        """For how long the step under way has been; 0 between steps."""
        begun = self._step_begun
        return 0.0 if begun is None else monotonic() - begun

    def add(self, decoder: SpeculativeDecoder, on_step: OnStep, on_end: OnEnd) -> ModelEngine:
        """An engine for a decoder; called in this thread. on_end: called if the engine fails, which removes it."""
        engine = ModelEngine(decoder, self.tell, on_step, on_end)
        self._line.append(engine)
        return engine

    def remove(self, engine: ModelEngine) -> None:
        """Close an engine's decoder; called in this thread."""
        if engine in self._line:  # else it has failed
            self._line.remove(engine)
        engine.close()
        frozen = gc.get_freeze_count()
        gc.unfreeze()
        collect()
        if frozen:
            gc.freeze()

    def tell(self, function: Callable[..., None], *arguments: object) -> None:
        """Call a function on the event loop."""
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop is closed: there is no one to notify
            log.debug("the event loop has ended before the engine")

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            while self._read_mail():
                engine = next((engine for engine in self._line if engine.has_work), None)
                if engine is not None:
                    self._line.remove(engine)
                    self._line.append(engine)
                    self._step(engine)
        except BaseException as reason:
            log.error("the engine has stopped", exc_info=reason)
            error = reason
        self.tell(self._on_end, error)

    def _step(self, engine: ModelEngine) -> None:
        self._step_begun = monotonic()
        try:
            engine.step()
        except BaseException as error:  # whatever it is, every request must learn of it, and other models go on
            if not isinstance(error, SlipstreamError):  # its message is enough
                log.error("the engine has stopped", exc_info=error)
            self.remove(engine)
            self.tell(engine.on_end, error)
        self._step_begun = None

    def _read_mail(self) -> bool:
        """Make the calls that were posted; wait if there is nothing to do. False once the thread must end."""
        with self._wake:
            while not (self._stopping or self._mail or any(engine.has_work for engine in self._line)):
                self._wake.wait()
                # rows that begin together share all their rounds, so wait a moment for the rest of a burst
                deadline = monotonic() + GATHER_SECONDS
                while not self._stopping and self._is_more_coming() and (remaining := deadline - monotonic()) > 0:
                    self._wake.wait(remaining)
            if self._stopping:
                return False
            mail, self._mail = self._mail, deque()
        for function in mail:
            function()
        return True


class ModelEngine:
    """Decodes the jobs of one model, a step at a time; used only in the engine's thread.

    tell: calls a function on the event loop.
    """

    def __init__(self, decoder: SpeculativeDecoder, tell: Callable[..., None], on_step: OnStep, on_end: OnEnd) -> None:
        self._decoder, self._tell, self._on_step, self.on_end = decoder, tell, on_step, on_end
        self._scheduler = decoder.scheduler()
        self._scheduler.num_slots = self._scheduler.max_batch_size + SPARE_SLOTS
        self._queue = FairQueue()
        self._running: dict[int, Job] = {}
        self._scoring: list[Job] = []
        self._scores: dict[Job, PromptScores] = {}
        self._num_rows = 0
        self._events: Events = []
        self._budget = PromptBudget()
        self._is_closed = False

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._scoring or self._events or self._queue)

    def submit(self, job: Job) -> None:
        """Decode a job as soon as there is a place; if the engine has failed, its requests have been told."""
        self._queue.add(job)

    def cancel(self, job: Job) -> None:
        """End a job before its next round, waiting or not."""
        if job.over or self._is_closed:
            return
        self._queue.remove(job)
        self._scheduler.cancel(job.row)
        if self._running.get(job.row.index) is job:
            del self._running[job.row.index]
        if job in self._scoring:
            self._scoring.remove(job)
            self._scores.pop(job, None)
        self._end(job, Ended(job.choice, "cancelled", monotonic()))

    def step(self) -> None:
        """One round of every row."""
        self._start_waiting_jobs()
        self._publish([])  # clients learn at once that their rows have begun, however long the step takes
        rounds = self._decode_step() if self._running else []
        self._end_finished_rows(rounds)
        self._score_prompt()
        self._publish(rounds)

    def close(self) -> None:
        self._is_closed = True
        self._decoder.close()
        del self._decoder, self._scheduler

    def _start_waiting_jobs(self) -> None:
        """Give free places to the jobs that have waited longest, each caller in turn."""
        while len(self._running) + len(self._scoring) < self._scheduler.max_batch_size:
            job = self._queue.take(self._may_begin)
            if job is None:
                return
            job.started = True
            self._add_event(job, Started(job.choice, self._decoder.num_cached_tokens(job.row), monotonic()))
            if job.echo is not None:
                self._scoring.append(job)
            else:
                self._decode(job)

    def _fail(self, job: Job, error: Exception) -> None:
        """End a job with its error; the other jobs go on."""
        job.row.fail(error)
        self._running.pop(job.row.index, None)
        self._end(job, Ended(job.choice, "error", monotonic(), error))

    def _may_begin(self, job: Job) -> bool:
        """True if a job may take a place: the last one is not for a long row of a request that has rows under way.

        Otherwise it could take minutes until another caller gets a place.
        """
        under_way = [*self._running.values(), *self._scoring]
        if len(under_way) + 1 < self._scheduler.max_batch_size or job.row.params.max_tokens <= SHORT_ROW_TOKENS:
            return True
        return all(other.request is not job.request for other in under_way)

    def _decode(self, job: Job) -> None:
        if not job.generate:
            job.row.finish_reason = "length"
            self._end(job, Ended(job.choice, "length", monotonic()))
            return
        self._num_rows += 1
        job.row.index = self._num_rows
        self._running[job.row.index] = job
        self._scheduler.add(job.row)

    def _decode_step(self) -> list[Round]:
        """One round of every row; reads as much of new prompts as the rows can wait for."""
        tokens_before = self._decoder.num_prefilled_tokens
        self._scheduler.prompt_budget = self._budget.tokens
        num_tokens = sum(len(job.row.tokens) for job in self._running.values())
        begun = monotonic()
        try:
            rounds = self._scheduler.step()
        except BaseException as error:  # a panic of Rust code is no `Exception`
            self._decoder.next_logits([0])  # raises if the target itself has failed, which ends this thread
            log.error("a step has failed", exc_info=error)
            jobs = list(self._running.values())
            has_committed = num_tokens < sum(len(job.row.tokens) for job in jobs)
            new = [job for job in jobs if not job.row.rounds]
            if new and not has_committed:  # the longest new row is to blame, probably: for want of memory, say
                jobs = [max(new, key=lambda job: job.row.prompt_length + job.row.params.max_tokens)]
            for job in jobs:
                self._fail(job, error if isinstance(error, Exception) else RuntimeError(with_class(error)))
            return []
        seconds = rounds[0].seconds.prefill if rounds else monotonic() - begun  # without rounds, prompts were read
        self._budget.learn(self._decoder.num_prefilled_tokens - tokens_before, seconds)
        return rounds

    def _end_finished_rows(self, rounds: list[Round]) -> None:
        now = monotonic()
        for round in rounds:
            job = self._running.get(round.row)
            if job is None:
                continue
            try:
                self._add_event(job, Committed(job.choice, round, now, new_text(job.row, self._decoder.tokenizer)))
            except Exception as error:  # from a tokenizer in Python, say
                self._fail(job, error)
                continue
            if round.finish_reason is not None:
                del self._running[round.row]
                self._end(job, Ended(job.choice, round.finish_reason, now, job.row.error))

    def _score_prompt(self) -> None:
        """Score a part of a prompt, no longer than a step may read prompts."""
        if not self._scoring:
            return
        job = self._scoring[0]
        assert job.echo is not None
        try:
            scores = self._decoder.score_prompt(self._scores.get(job), job.row, job.echo, self._budget.tokens)
        except Exception as error:
            self._scoring.pop(0)
            self._scores.pop(job, None)
            self._fail(job, error)
            return
        self._scores[job] = scores
        if scores.finished:
            self._scoring.pop(0)
            del self._scores[job]
            self._add_event(job, Scored(job.choice, tuple(scores.values)))
            self._decode(job)

    def _add_event(self, job: Job, event: Event) -> None:
        self._events.append((job.request, event))

    def _end(self, job: Job, event: Ended) -> None:
        job.over = True
        self._add_event(job, event)

    def _publish(self, rounds: list[Round]) -> None:
        """Hand all events of a step to the event loop in one call."""
        if self._events or rounds:
            events, self._events = self._events, []
            self._tell(self._add_events, events, rounds)

    def _add_events(self, events: Events, rounds: list[Round]) -> None:
        for request, event in events:
            try:
                request.add_event(event)
            except Exception as error:  # else the requests after it would wait forever
                request.fail(error)
        notify_all(dict.fromkeys(request for request, _ in events))
        if rounds:
            self._on_step(rounds)
