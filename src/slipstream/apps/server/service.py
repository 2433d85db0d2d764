"""The server's state on the event loop: whether it serves, who waits, and what is under way.

Texts are tokenised and rendered by threads beside the engine, each with a tokenizer of its own: they cannot be shared.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.batch_store import BatchStore
from slipstream.apps.server.engine_thread import EngineThread
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Ended, Event, Job, LiveRequest, Started
from slipstream.apps.server.request_rows import RowMaker
from slipstream.apps.server.server_metrics import ServerMetrics, StepTotals, add_process_figures
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.planner import MODEL
from slipstream.text.detokenizer import Tokenizer
from slipstream.text.results import Stats
from slipstream.wiring.model_fingerprint import fingerprint_of

if TYPE_CHECKING:
    from slipstream.apps.server.batch_runner import BatchRunner

WINDOW = 10.0  # seconds of the figures that speak of now
T = TypeVar("T")
THREADS = 2
MOST_THREADS = 8  # where those there are do not come back
PATIENCE = 5.0  # seconds that a call waits before another thread is begun
STALLED = 60.0  # seconds; see `Service.stalled`
MOST_SHARES = 4  # times a limit that all callers together may have waiting
ENGINE_STOPS = 10.0  # seconds that a step under way may take to end


class EngineRoom:
    """Folds events. Lanes are numbered as rows come and go; a freed lane is taken again."""

    def __init__(self) -> None:
        self._lanes: dict[Job, int] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._prompt_tokens = self._cached_tokens = 0

    def event(self, live: LiveRequest, event: Event) -> None:
        """Rows take lanes and leave them."""
        job = live.jobs[event.choice]
        if isinstance(event, Started):
            taken = set(self._lanes.values())
            self._lanes[job] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
            self._prompt_tokens += job.row.prompt_length
            self._cached_tokens += event.cached
        elif isinstance(event, Ended):
            self._lanes.pop(job, None)

    def stepped(self, at: float, tokens: int) -> None:
        """Note how many tokens a step has committed, and when."""
        self._recent.append((at, tokens))
        self._trim(at)

    def _trim(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    @property
    def num_running(self) -> int:
        """Rows under way."""
        return len(self._lanes)

    def state(self, totals: StepTotals) -> dict[str, Any]:
        """Everything, for JSON."""
        self._trim(monotonic())
        tokens = sum(count for _, count in self._recent)
        stats = totals.stats
        seconds = {part: getattr(stats, f"{part}_seconds") for part in ("prefill", "draft", "verify", "accept")}
        seconds["overhead"] = stats.overhead_seconds
        total = sum(seconds.values())
        return {
            "running": [self._lane(job, lane) for job, lane in sorted(self._lanes.items(), key=lambda pair: pair[1])],
            "tokens_per_second": tokens / WINDOW,
            "acceptance_by_source": {
                source: {"drafted": count, "accepted": totals.accepted[source], "rate": totals.accepted[source] / count}
                for source, count in sorted(totals.drafted.items())
            },
            "acceptance_by_position": [
                accepted / drafted
                for accepted, drafted in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
            ],
            "round_shares": {part: spent / total if total else 0.0 for part, spent in seconds.items()},
            "cache": {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens},
        }

    def _lane(self, job: Job, lane: int) -> dict[str, Any]:
        stats = Stats.of(list(job.row.rounds))
        return {
            "lane": lane,
            "id": job.request.id[:8],
            "prompt_tokens": job.row.prompt_length,
            "tokens": stats.num_output_tokens,
            "max_tokens": job.row.params.max_tokens,
            "acceptance_rate": stats.acceptance_rate,
        }


def facts_of(decoder: SpeculativeDecoder, name: str) -> ModelFacts:
    """The facts of a decoder. name: by which it is served, "" for the target's own."""
    return ModelFacts(
        name or decoder.target.name,
        fingerprint_of(decoder),
        decoder.reproducible and decoder.coupled,
        partial(source_of, decoder.drafter_name, decoder.traits.needs_costs),
        decoder.lossless,
        copy.deepcopy(decoder.tokenizer),
    )


def source_of(drafter: str, mixed: bool, done: Round) -> str:
    """The decoder's drafter in a round. mixed: it takes turns with a draft model."""
    if mixed:
        return MODEL if done.origin.source == MODEL else "retrieval"
    return drafter.partition(":")[0]


log = logging.getLogger("slipstream.server")


@dataclass(eq=False)
class _Call:
    function: Callable[[Tokenizer | None], Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    since: float = field(default_factory=monotonic)


class TextPool:
    """A few calls at a time; more wait their turn, callers one after the other, and none waits for the engine.

    A call that does not come back keeps its thread: another takes its place, and the process does not wait for it when
    it ends.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)  # nobody's, to be copied
        self._news = threading.Condition()
        self._lines: OrderedDict[str, deque[_Call]] = OrderedDict()
        self._threads = self._idle = 0
        self._closed = False
        for _ in range(THREADS):
            self._begin()

    async def run(self, function: Callable[[Tokenizer | None], T], caller: str = "") -> T:
        """What a function makes of a tokenizer. caller: with whom calls take turns."""
        loop = asyncio.get_running_loop()
        call = _Call(function, loop, loop.create_future())
        with self._news:
            self._lines.setdefault(caller, deque()).append(call)
            self._news.notify()
        relief = loop.call_later(PATIENCE, self._relieve, call)
        try:
            result: T = await call.result
            return result
        finally:
            relief.cancel()
            with self._news:
                if call in self._lines.get(caller, ()):  # whoever waited has left
                    self._remove(caller, call)

    @property
    def waiting_seconds(self) -> float:
        """For how long the call that waits longest has waited for a thread."""
        with self._news:
            return max((monotonic() - line[0].since for line in self._lines.values()), default=0.0)

    def close(self) -> None:
        """End the threads; calls that wait are dropped."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _begin(self) -> None:
        self._threads += 1
        threading.Thread(target=self._work, name="slipstream-text", daemon=True).start()

    def _relieve(self, call: _Call) -> None:
        """A call has waited long."""
        with self._news:
            waits = any(call in line for line in self._lines.values())
            if waits and not self._idle and self._threads < MOST_THREADS:
                log.warning("texts are waited for since %g s: one more thread", PATIENCE)
                self._begin()

    def _work(self) -> None:
        with self._news:  # copies are made one at a time
            tokenizer = copy.deepcopy(self._tokenizer)
        while (call := self._next()) is not None:
            try:
                value = call.function(tokenizer)
            except BaseException as error:  # whoever waits must be told
                failure = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                _tell(call, call.result.set_exception, failure)
            else:
                _tell(call, call.result.set_result, value)

    def _next(self) -> _Call | None:
        with self._news:
            self._idle += 1
            while not (self._lines or self._closed):
                self._news.wait()
            self._idle -= 1
            if self._closed:
                return None
            caller, line = next(iter(self._lines.items()))
            call = line[0]
            self._remove(caller, call)
            if caller in self._lines:
                self._lines.move_to_end(caller)
            return call

    def _remove(self, caller: str, call: _Call) -> None:
        line = self._lines[caller]
        line.remove(call)
        if not line:
            del self._lines[caller]


def _tell(call: _Call, outcome: Callable[[Any], None], value: Any) -> None:
    def tell() -> None:
        if not call.result.done():
            outcome(value)

    with suppress(RuntimeError):  # the event loop has ended, and nobody waits
        call.loop.call_soon_threadsafe(tell)


State = Literal["loading", "ready", "draining", "ended"]


class Service:
    """Takes requests in, within limits, and hands them to the engine. Used on the event loop alone.

    on_ready: called once the models are loaded; on_end: called when the engine has ended, with its error if it had one.
    """

    def __init__(
        self,
        settings: ServerSettings,
        on_ready: Callable[[Service], None] = lambda service: None,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.settings, self.metrics = settings, ServerMetrics()
        add_process_figures(self.metrics.registry)
        self.state: State = "loading"
        self.room, self.totals = EngineRoom(), StepTotals(self._counted)
        self.live: set[LiveRequest] = set()
        self.unknown_fields: set[str] = set()  # of requests, that the log has named
        self.engine: EngineThread | None = None
        self._on_ready, self._on_end = on_ready, on_end
        self._waiting: dict[LiveRequest, int] = {}  # prompt tokens that have not begun, by request
        self._preparing: set[LiveRequest] = set()  # those whose prompts are being rendered
        self._begun: set[LiveRequest] = set()  # those that the engine knows
        self._pool: TextPool | None = None
        self._compiling_pool: TextPool | None = None
        self.batches: BatchRunner | None = None
        folder = settings.batch_folder
        self._store = BatchStore(Path(folder).expanduser(), settings.max_stored_bytes) if folder else None
        self._background: set[LiveRequest] = set()
        self._timers: dict[LiveRequest, list[asyncio.TimerHandle]] = {}
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, load: Callable[[], SpeculativeDecoder]) -> None:
        """Begin to load the models, in the engine's thread."""

        def loading() -> SpeculativeDecoder:
            decoder = load()
            self.facts = facts_of(decoder, self.settings.served_model_name)
            self.rows = RowMaker.of(decoder, self.settings)
            self._pool, self._compiling_pool = TextPool(decoder.tokenizer), TextPool(decoder.tokenizer)
            return decoder

        self.engine = EngineThread(loading, self._ready, self._ended, self._stepped, lambda: bool(self._preparing))
        self.engine.start()

    def _ready(self, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        self.metrics.describe(self.facts.name, decoder)
        if self.state == "loading":
            self.state = "ready"
            if self.settings.batch_folder:
                self._begin_batches()
        self._on_ready(self)

    def _ended(self, error: BaseException | None) -> None:
        self.state = "ended"
        self._stop_batches(orderly=error is None)
        for live in self.live | self._background:
            live.fail(ApiError(500, "the engine has stopped"))
        self._on_end(error)

    def _stepped(self, rounds: Sequence[Round]) -> None:
        self.totals.step(rounds, self.facts)

    def _counted(self, at: float, tokens: int) -> None:
        self.metrics.stepped(tokens)
        self.room.stepped(at, tokens)

    @property
    def pool(self) -> TextPool:
        """The threads that tokenise."""
        self.check_ready()
        assert self._pool is not None
        return self._pool

    @property
    def compiling_pool(self) -> TextPool:
        """Further such threads, for requests whose constraints take seconds to compile: quick ones pass them."""
        self.check_ready()
        assert self._compiling_pool is not None
        return self._compiling_pool

    @property
    def stalled(self) -> bool:
        """Whether a step, or a text that waits to be read, takes longer than anything that gets on."""
        if self.state != "ready" or self.engine is None or self._pool is None:
            return False
        return max(self.engine.step_seconds, self._pool.waiting_seconds) > STALLED

    @property
    def num_waiting(self) -> int:
        """Requests of which no row has begun."""
        return len(self._waiting)

    def check_ready(self) -> None:
        """Refuse for now while models are loaded and while the server shuts down."""
        if self.state != "ready":
            why = {"loading": "the model is being loaded", "draining": "the server is shutting down"}
            raise ApiError(503, why.get(self.state, "the engine has stopped"), code="not_ready")

    def enter(self, endpoint: str, owner: str, salt: str | None, caller: str = "") -> LiveRequest:
        """A new request, counted before any work is done for it; refused where too many of its caller's wait."""
        self.check_ready()
        caller = caller or owner
        waiting, share = self._share(caller, self.settings.max_queued_requests)
        if len(waiting) >= share or len(self._waiting) >= MOST_SHARES * self.settings.max_queued_requests:
            self.metrics.rejected("requests")
            raise ApiError(429, f"{len(waiting)} requests wait already; try again later", code="queue_full")
        live = self._live(endpoint, owner, salt, caller=caller)
        self.live.add(live)
        self._idle.clear()
        self._waiting[live] = 0
        self._preparing.add(live)
        late = ApiError(503, "no place became free in time; try again later", code="queue_timeout")
        over = ApiError(408, f"the request took over {self.settings.request_timeout:g} seconds", code="timeout")
        loop = asyncio.get_running_loop()
        self._timers[live] = [
            loop.call_later(self.settings.queue_timeout, self._fail_waiting, live, late),
            loop.call_later(self.settings.request_timeout, self._fail, live, over),
        ]
        return live

    def _share(self, caller: str, limit: int) -> tuple[list[LiveRequest], int]:
        """The requests of a caller that wait, and its part of a limit: all of it while no other's wait."""
        callers = {live.caller for live in self._waiting} | {caller}
        return [live for live in self._waiting if live.caller == caller], max(1, limit // len(callers))

    def _live(
        self, endpoint: str, owner: str, salt: str | None, *, caller: str = "", background: bool = False
    ) -> LiveRequest:
        group = "" if self.settings.share_learning else owner
        group = group if salt is None else f"{group}\n{salt}"
        return LiveRequest(endpoint, owner, group, background=background, caller=caller or owner, watch=self._watch)

    def submit(self, live: LiveRequest, jobs: list[Job]) -> None:
        """Queue the rows of a request; refused where too many prompt tokens of its caller's wait."""
        if live.error is not None:  # it came too late
            raise live.error
        tokens = sum(job.row.prompt_length for job in jobs)
        others, share = self._share(live.caller, self.settings.max_queued_tokens)
        waiting = sum(self._waiting[other] for other in others)
        if waiting and waiting + tokens > share:
            self.metrics.rejected("tokens")
            raise ApiError(429, f"{waiting} prompt tokens wait already; try again later", code="queue_full")
        self._waiting[live] = tokens
        self._preparing.discard(live)
        live.jobs = jobs
        self._begun.add(live)
        assert self.engine is not None
        for job in jobs:
            self.engine.submit(job)

    def _fail_waiting(self, live: LiveRequest, error: ApiError) -> None:
        if live in self._waiting:
            self._fail(live, error)

    def _fail(self, live: LiveRequest, error: ApiError) -> None:
        """End a request; its handler may hang in a send to a client that does not read, so its rows end here."""
        live.fail(error)
        self._end_rows(live)

    def _watch(self, live: LiveRequest, event: Event) -> None:
        if isinstance(event, Started):
            self._waiting.pop(live, None)
        self.metrics.event(live, event)
        self.room.event(live, event)

    def _begin_batches(self) -> None:
        from slipstream.apps.server.batch_runner import BatchRunner  # which calls what answers requests

        assert self._store is not None
        self.batches = BatchRunner(self, self._store)
        self.batches.start()

    def _stop_batches(self, *, orderly: bool) -> None:
        if self.batches is not None:
            self.batches.stop(orderly=orderly)

    def enter_background(self, endpoint: str, owner: str, id: str, salt: str | None) -> LiveRequest:
        """A request that nobody waits for: it counts for no limit and is decoded behind all others."""
        self.check_ready()
        live = self._live(endpoint, owner, salt, background=True)
        live.id = id
        self._background.add(live)
        return live

    def submit_background(self, live: LiveRequest) -> None:
        """Queue its rows."""
        self.check_ready()
        self._begun.add(live)
        assert self.engine is not None
        for job in live.jobs:
            self.engine.submit(job)

    def _end_rows(self, live: LiveRequest) -> None:
        """What a request has left to decode ends before its next round."""
        self._preparing.discard(live)
        was_waiting = self._waiting.pop(live, None) is not None
        unfinished = [job for job in live.jobs if not job.over] if live in self._begun else []
        self._begun.discard(live)
        for job in unfinished:
            assert self.engine is not None
            self.engine.cancel(job)
        if unfinished and not live.background:
            self.metrics.cancelled("queued" if was_waiting else "running")

    def release(self, live: LiveRequest) -> None:
        """A request is over, however it ended."""
        for timer in self._timers.pop(live, []):
            timer.cancel()
        self._end_rows(live)
        self._background.discard(live)
        self.live.discard(live)
        if not self.live:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse what is new and wait for what runs; what is left after the timeout ends with an error."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
        self._stop_batches(orderly=True)
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.drain_timeout)
        except TimeoutError:
            log.warning("drain_timeout=%g is over: %d requests end", self.settings.drain_timeout, len(self.live))
            for live in self.live:
                self._fail(live, ApiError(503, "the server is shutting down", code="not_ready"))
            for _ in range(50):  # their answers are being written
                if not self.live:
                    break
                await asyncio.sleep(0.02)

    def close(self, patience: float = ENGINE_STOPS) -> None:
        """End the engine, after the step under way if that ends in time, and the threads."""
        if self.engine is not None:
            self.engine.stop()
            self.engine.join(patience)
        for pool in filter(None, (self._pool, self._compiling_pool)):
            pool.close()
        if self._store is not None:
            self._store.close()
