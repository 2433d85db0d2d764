"""A model's state on the event loop: whether it is loaded, waiting requests, and requests in progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import monotonic
from typing import Literal

from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.answers import AnswerWriter
from slipstream.apps.server.engine_thread import EngineThread, ModelEngine
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Event, LiveRequest, Started
from slipstream.apps.server.request_reading import name_ignored
from slipstream.apps.server.request_rows import MakeWriter, RowMaker, compiles_slowly, writer_of
from slipstream.apps.server.schemas import ChatFields, CompletionFields, Fields
from slipstream.apps.server.server_metrics import EngineStatus, ModelMetrics, ServerMetrics, StepTotals
from slipstream.apps.server.server_settings import USUAL_WINDOW, ServerSettings
from slipstream.apps.server.text_pool import TextPool
from slipstream.decoder import SpeculativeDecoder

STALLED_SECONDS = 60.0  # see `Service.is_stalled`
MAX_SHARES = 4  # all callers together may have this many times `max_queued_requests` waiting
log = logging.getLogger("slipstream.server")


class Admission:
    """The requests that wait for their first round; callers with waiting requests share each limit equally."""

    def __init__(self, settings: ServerSettings, metrics: ModelMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self.limits = settings.limits(settings.max_model_len or USUAL_WINDOW)  # until the model has been loaded
        self._prompt_tokens: dict[LiveRequest, int] = {}  # of every request that waits

    def __len__(self) -> int:
        return len(self._prompt_tokens)

    def __contains__(self, live: LiveRequest) -> bool:
        return live in self._prompt_tokens

    def check_room(self, caller: str) -> None:
        """Refuse a request of a caller that has used its share of the queue."""
        limit = self._settings.max_queued_requests
        waiting, share = self._share(caller, limit)
        if len(waiting) >= share or len(self) >= MAX_SHARES * limit:
            self._metrics.add("slipstream:rejected", label="requests")
            raise ApiError(429, f"requests that wait already: {len(waiting)}; try again later", code="queue_full")

    def enter(self, live: LiveRequest) -> None:
        """Count a waiting request, before the length of its prompts is known."""
        self._prompt_tokens[live] = 0

    def add_tokens(self, live: LiveRequest, num_tokens: int) -> None:
        """Count the prompt tokens of a waiting request; refused if too many of its caller's wait already."""
        others, share = self._share(live.caller, self.limits.max_queued_tokens)
        waiting = sum(self._prompt_tokens[other] for other in others)
        if waiting and waiting + num_tokens > share:
            self._metrics.add("slipstream:rejected", label="tokens")
            raise ApiError(429, f"{waiting} prompt tokens wait already; try again later", code="queue_full")
        self._prompt_tokens[live] = num_tokens

    def leave(self, live: LiveRequest) -> bool:
        """Remove a request that has begun or is over; returns True if it waited."""
        return self._prompt_tokens.pop(live, None) is not None

    def _share(self, caller: str, limit: int) -> tuple[list[LiveRequest], int]:
        """A caller's waiting requests, and its share of a limit: all of it while no other caller waits."""
        callers = {live.caller for live in self._prompt_tokens} | {caller}
        return [live for live in self._prompt_tokens if live.caller == caller], max(1, limit // len(callers))


@dataclass(frozen=True)
class ModelSource:
    """A model that a server can load."""

    load: Callable[[], SpeculativeDecoder]  # called in the engine's thread
    settings: ServerSettings  # the server's, with the model's own values
    # downloads its files, and returns about how many bytes of memory it needs; None if that is unknown
    fetch: Callable[[], int | None] = lambda: 0
    device: str = "cpu"  # whose memory it needs: cpu or cuda


@dataclass(frozen=True)
class LoadedModel:
    """The parts of a service that exist only while its model is loaded."""

    decoder: SpeculativeDecoder
    engine: ModelEngine
    rows: RowMaker
    text_pool: TextPool  # renders prompts
    slow_pool: TextPool  # the same, with constraints that take seconds to compile


class Service:
    """Takes the requests for a model and hands them to its engine; used only on the event loop.

    on_end: called when the model's engine has failed, with its error.
    """

    def __init__(
        self,
        source: ModelSource,
        metrics: ServerMetrics,
        thread: EngineThread,
        on_end: Callable[[Service, BaseException | None], None],
    ) -> None:
        self.source, self.settings, self.metrics = source, source.settings, ModelMetrics(metrics)
        if self.settings.served_model_name:
            self.metrics.name(self.settings.served_model_name[0])
        self.engine_status, self.totals = EngineStatus(), StepTotals(self._counted)
        self.live: set[LiveRequest] = set()
        self.admission = Admission(self.settings, self.metrics)
        self.limits = self.admission.limits
        self.state: Literal["unloaded", "loading", "loaded"] = "unloaded"
        self.is_leaving = False  # it is unloaded as soon as it is idle, to make room for another model
        self.idle = asyncio.Event()  # set while no user needs the model in memory
        self.idle.set()
        self.waiting: dict[object, asyncio.Future[None]] = {}  # users that wait until it is loaded
        self.last_used = 0.0
        self.num_bytes: int | None = 0  # of memory that it needs, about; None if that is unknown
        self._facts: ModelFacts | None = None  # they stay when the model is unloaded
        self._loaded: LoadedModel | None = None
        self._users: set[object] = set()
        self._thread, self._on_end = thread, on_end
        self._ignored_fields: set[str] = set()  # those that the log has named
        self._preparing: set[LiveRequest] = set()  # those whose prompts are being rendered
        self._submitted: dict[LiveRequest, ModelEngine] = {}  # those that an engine knows
        self._timers: dict[LiveRequest, list[asyncio.TimerHandle]] = {}
        self._idle_timer: asyncio.TimerHandle | None = None

    async def load(self) -> None:
        """Load the model in the engine's thread, and admit the users that wait for it."""
        self.state = "loading"
        begun = monotonic()
        try:
            self._facts, self._loaded = await self._thread.call(self._load)
        except BaseException:
            self.state = "unloaded"
            raise
        self.state = "loaded"
        self.limits = self.admission.limits = self.loaded.rows.limits
        self.metrics.name(self.facts.name)
        self.metrics.describe(self.loaded.decoder)
        log.info("loaded %s in %.1f s", self.names[0], monotonic() - begun)
        self._begin_idle_time()

    def _load(self) -> tuple[ModelFacts, LoadedModel]:
        """Called in the engine's thread."""
        decoder = self.source.load()
        facts = ModelFacts.of(decoder, "".join(self.settings.served_model_name[:1]))
        rows = RowMaker.for_decoder(decoder, self.settings)
        text_pool, slow_pool = TextPool(decoder.tokenizer), TextPool(decoder.tokenizer)
        engine = self._thread.add(decoder, partial(self.totals.step, facts=facts), self._ended)
        return facts, LoadedModel(decoder, engine, rows, text_pool, slow_pool)

    def unload(self) -> None:
        """Free the model's memory, unless it is in use."""
        if self._loaded is not None and not self._users:
            engine = self._loaded.engine
            self._forget_loaded()  # first: the thread returns the memory of what nothing holds
            self._thread.post(partial(self._thread.remove, engine))
            log.info("unloaded %s", self.names[0])

    def _forget_loaded(self) -> None:
        self.close()
        self._loaded, self.state = None, "unloaded"

    def _ended(self, error: BaseException | None) -> None:
        self._forget_loaded()
        for live in self.live.difference(self.waiting):
            live.fail(ApiError(500, "the engine has stopped"))
        self._on_end(self, error)

    def _counted(self, time: float, tokens: int) -> None:
        self.metrics.stepped(tokens)
        self.engine_status.stepped(time, tokens)

    def keep(self, user: object) -> bool:
        """Keep the model in memory until `leave` is called for this user; False if it must be loaded first."""
        if self.state != "loaded" or self.is_leaving:
            return False
        self._users.add(user)
        self.idle.clear()
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        return True

    def admit(self) -> None:
        """Let the users in that wait for the model."""
        for user, arrival in self.waiting.items():
            if not arrival.done() and self.keep(user):
                arrival.set_result(None)

    def leave(self, user: object) -> None:
        """Note that a user no longer needs the model in memory."""
        if user in self._users:
            self._users.remove(user)
            if not self._users:
                self._begin_idle_time()

    def _begin_idle_time(self) -> None:
        self.last_used = monotonic()
        self.idle.set()
        if self.settings.idle_minutes:
            self._idle_timer = asyncio.get_running_loop().call_later(60 * self.settings.idle_minutes, self.unload)

    @property
    def idle_seconds_left(self) -> float | None:
        """Seconds until the model is unloaded if no request comes; None if it stays."""
        if not self.settings.idle_minutes:
            return None
        if self._idle_timer is None or not self.idle.is_set():
            return 60 * self.settings.idle_minutes
        return self._idle_timer.when() - asyncio.get_running_loop().time()

    @property
    def loaded(self) -> LoadedModel:
        if self._loaded is None:  # it has failed since the request was admitted
            raise ApiError(503, "the engine has stopped", code="not_ready")
        return self._loaded

    @property
    def known_facts(self) -> ModelFacts | None:
        """The facts about the model; None until it has been loaded once."""
        return self._facts

    @property
    def facts(self) -> ModelFacts:
        assert self._facts is not None
        return self._facts

    @property
    def is_preparing(self) -> bool:
        """True while prompts are being rendered."""
        return bool(self._preparing)

    @property
    def is_stalled(self) -> bool:
        """True if a step, or a string that waits for a thread, has taken longer than any healthy one does."""
        if self._loaded is None:
            return False
        return max(self._thread.step_seconds, self._loaded.text_pool.waiting_seconds) > STALLED_SECONDS

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row that has begun."""
        return len(self.admission)

    def update_metrics(self) -> None:
        """Bring the server's metrics up to date."""
        running = self.engine_status.num_running
        places = 1 if self._loaded is None else self._loaded.decoder.config.max_batch_size
        gauges = {
            "vllm:num_requests_running": running,
            "vllm:num_requests_waiting": self.num_waiting,
            "vllm:kv_cache_usage_perc": running / places,
            "slipstream:model_loaded": self._loaded is not None,
        }
        self.metrics.update(self.totals.fold(), gauges)

    def enter(self, owner: str, salt: str | None, caller: str = "") -> LiveRequest:
        """Count a new request before any work is done for it; refused if too many of its caller's wait."""
        self.admission.check_room(caller or owner)
        group = "" if self.settings.share_learning else owner
        group = group if salt is None else f"{group}\n{salt}"
        live = LiveRequest(owner, group, model=self.names[0], caller=caller or owner, observer=self._on_event)
        self.admission.enter(live)
        self.live.add(live)
        self.set_deadlines(live)
        return live

    def set_deadlines(self, live: LiveRequest) -> None:
        """Limit a request's time, again once the model is loaded: the limits depend on its window."""
        what = "the model was not loaded in time" if self._loaded is None else "no place became free in time"
        late = ApiError(503, f"{what}; try again later", code="queue_timeout")
        too_long = ApiError(408, f"the request took over {self.limits.request_timeout:g} seconds", code="timeout")
        loop, elapsed = asyncio.get_running_loop(), monotonic() - live.arrived
        for timer in self._timers.pop(live, []):
            timer.cancel()
        self._timers[live] = [
            loop.call_later(self.limits.queue_timeout - elapsed, self._fail_waiting, live, late),
            loop.call_later(self.limits.request_timeout - elapsed, self.fail, live, too_long),
        ]

    async def prepare(
        self, live: LiveRequest, fields: ChatFields | CompletionFields, make_writer: MakeWriter | None = None
    ) -> AnswerWriter:
        """Render the prompts and make the rows, in a thread next to the engine; nothing is queued yet."""
        loaded = self.loaded
        self._preparing.add(live)
        pool = loaded.slow_pool if compiles_slowly(fields) else loaded.text_pool
        work = pool.run(
            lambda tokenizer: writer_of(loaded.rows, self.facts, live, fields, tokenizer, make_writer), live.caller
        )
        return await live.before_failing(work)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; the first is the one in answers."""
        return self.settings.served_model_name or (self.facts.name,)

    def count_ignored(self, *requests: Fields | None) -> None:
        """Log the name of each field without effect once, and count them all. requests: the forms of one request."""
        for fields in requests:
            if fields is not None:
                for name in name_ignored(fields, self.facts.tokenizer, self._ignored_fields):
                    self.metrics.add("slipstream:ignored_fields", label=name)

    def submit(self, live: LiveRequest) -> None:
        """Queue the rows of a request; refused if too many prompt tokens of its caller's wait."""
        if live.error is not None:  # it timed out while its prompts were rendered
            raise live.error
        self.admission.add_tokens(live, sum(job.row.prompt_length for job in live.jobs))
        self._preparing.discard(live)
        engine = self._submitted[live] = self.loaded.engine
        for job in live.jobs:
            self._thread.post(partial(engine.submit, job))

    def _fail_waiting(self, live: LiveRequest, error: ApiError) -> None:
        if live in self.admission:
            self.fail(live, error)

    def fail(self, live: LiveRequest, error: ApiError) -> None:
        """End a request; its handler may hang in a send to a client that does not read, so its rows end here."""
        live.fail(error)
        self._end_rows(live)

    def _on_event(self, live: LiveRequest, event: Event) -> None:
        if isinstance(event, Started):
            self.admission.leave(live)
        self.metrics.event(live, event)
        self.engine_status.event(live, event)

    def _end_rows(self, live: LiveRequest) -> None:
        """Cancel a request's unfinished rows before their next round."""
        self._preparing.discard(live)
        was_waiting = self.admission.leave(live)
        engine = self._submitted.pop(live, None)
        unfinished = [] if engine is None else [job for job in live.jobs if not job.over]
        for job in unfinished:
            assert engine is not None
            self._thread.post(partial(engine.cancel, job))
        if unfinished:
            self.metrics.add("slipstream:cancelled", label="queued" if was_waiting else "running")

    def release(self, live: LiveRequest) -> None:
        """Forget a request that is over, however it ended."""
        for timer in self._timers.pop(live, []):
            timer.cancel()
        self._end_rows(live)
        self.live.discard(live)
        self.leave(live)

    def close(self) -> None:
        """End the threads that render prompts, and the timer."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        if self._loaded is not None:
            self._loaded.text_pool.close()
            self._loaded.slow_pool.close()
