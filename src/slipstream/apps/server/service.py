"""The server's state on the event loop: whether it serves, who waits, and what is under way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from slipstream.apps.server.batch_store import BatchStore
from slipstream.apps.server.engine_room import EngineRoom
from slipstream.apps.server.engine_thread import EngineThread
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Event, Job, LiveRequest, Started
from slipstream.apps.server.model_facts import facts_of
from slipstream.apps.server.process_figures import add_process_figures
from slipstream.apps.server.request_rows import RowMaker
from slipstream.apps.server.server_metrics import ServerMetrics
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.step_totals import StepTotals
from slipstream.apps.server.text_pool import TextPool
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder

if TYPE_CHECKING:
    from slipstream.apps.server.batch_runner import BatchRunner

log = logging.getLogger("slipstream.server")
STALLED = 60.0  # seconds; see `Service.stalled`
MOST_SHARES = 4  # times a limit that all callers together may have waiting
ENGINE_STOPS = 10.0  # seconds that a step under way may take to end
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
