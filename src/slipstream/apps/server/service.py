"""The server's state on the event loop: readiness, waiting requests, and requests in progress."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal

from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.answers import AnswerWriter
from slipstream.apps.server.engine_thread import EngineThread
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Event, Job, LiveRequest, Started
from slipstream.apps.server.request_reading import name_ignored
from slipstream.apps.server.request_rows import MakeWriter, RowMaker, check_model, compiles_slowly, writer_of
from slipstream.apps.server.schemas import ChatFields, CompletionFields, DetokenizeFields, Fields, TokenizeFields
from slipstream.apps.server.server_metrics import EngineStatus, ServerMetrics, StepTotals, add_process_figures
from slipstream.apps.server.server_settings import USUAL_WINDOW, ServerSettings
from slipstream.apps.server.text_pool import TextPool
from slipstream.core.rounds import Round
from slipstream.decoder import SpeculativeDecoder

STALLED_SECONDS = 60.0  # see `Service.is_stalled`
MAX_SHARES = 4  # all callers together may have this many times `max_queued_requests` waiting
ENGINE_STOP_SECONDS = 10.0  # that a step under way may take to end
log = logging.getLogger("slipstream.server")
HasModel = ChatFields | CompletionFields | TokenizeFields | DetokenizeFields
State = Literal["loading", "ready", "draining", "ended"]


class Admission:
    """The requests that wait for their first round; callers with waiting requests share each limit equally."""

    def __init__(self, settings: ServerSettings, metrics: ServerMetrics) -> None:
        self._settings, self._metrics = settings, metrics
        self.limits = settings.limits(USUAL_WINDOW)  # until the window is known
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
            raise ApiError(429, f"{len(waiting)} requests wait already; try again later", code="queue_full")

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


class Service:
    """Takes requests and hands them to the engine; used only on the event loop.

    on_ready: called once the models are loaded. on_end: called when the engine has ended, with its error, if any.
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
        self.engine_status, self.totals = EngineStatus(), StepTotals(self._counted)
        self.live: set[LiveRequest] = set()
        self.engine: EngineThread | None = None
        self.admission = Admission(settings, self.metrics)
        self._on_ready, self._on_end = on_ready, on_end
        self._ignored_fields: set[str] = set()  # those that the log has named
        self._preparing: set[LiveRequest] = set()  # those whose prompts are being rendered
        self._submitted: set[LiveRequest] = set()  # those that the engine knows
        self._timers: dict[LiveRequest, list[asyncio.TimerHandle]] = {}
        self._pools: tuple[TextPool, TextPool] | None = None  # quick and slow work
        self._idle = asyncio.Event()
        self._idle.set()

    def start(self, load: Callable[[], SpeculativeDecoder]) -> None:
        """Begin loading the models, in the engine's thread."""

        def loading() -> SpeculativeDecoder:
            decoder = load()
            self.facts = ModelFacts.of(decoder, "".join(self.settings.served_model_name[:1]))
            self.rows = RowMaker.for_decoder(decoder, self.settings)
            self.limits = self.admission.limits = self.rows.limits
            self._pools = TextPool(decoder.tokenizer), TextPool(decoder.tokenizer)
            return decoder

        self.engine = EngineThread(loading, self._loaded, self._ended, self._stepped, lambda: bool(self._preparing))
        self.engine.start()

    def _loaded(self, decoder: SpeculativeDecoder) -> None:
        self.decoder = decoder
        self.metrics.describe(self.facts.name, decoder)
        if self.state == "loading":
            self.state = "ready"
        self._on_ready(self)

    def _ended(self, error: BaseException | None) -> None:
        self.state = "ended"
        for live in self.live.copy():
            live.fail(ApiError(500, "the engine has stopped"))
        self._on_end(error)

    def _stepped(self, rounds: Sequence[Round]) -> None:
        self.totals.step(rounds, self.facts)

    def _counted(self, time: float, tokens: int) -> None:
        self.metrics.stepped(tokens)
        self.engine_status.stepped(time, tokens)

    @property
    def text_pool(self) -> TextPool:
        self.check_ready()
        assert self._pools is not None
        return self._pools[0]

    @property
    def is_stalled(self) -> bool:
        """True if a step, or a string that waits for a thread, has taken longer than any healthy one does."""
        if self.state != "ready" or self.engine is None or self._pools is None:
            return False
        return max(self.engine.step_seconds, self._pools[0].waiting_seconds) > STALLED_SECONDS

    @property
    def num_waiting(self) -> int:
        """Number of requests without a row that has begun."""
        return len(self.admission)

    def check_ready(self) -> None:
        """Refuse requests while models are loaded and while the server shuts down."""
        if self.state != "ready":
            why = {"loading": "the model is being loaded", "draining": "the server is shutting down"}
            raise ApiError(503, why.get(self.state, "the engine has stopped"), code="not_ready")

    def enter(self, endpoint: str, owner: str, salt: str | None, caller: str = "") -> LiveRequest:
        """Count a new request before any work is done for it; refused if too many of its caller's wait."""
        self.check_ready()
        self.admission.check_room(caller or owner)
        group = "" if self.settings.share_learning else owner
        group = group if salt is None else f"{group}\n{salt}"
        live = LiveRequest(endpoint, owner, group, caller=caller or owner, observer=self._on_event)
        self.admission.enter(live)
        self.live.add(live)
        self._idle.clear()
        self._preparing.add(live)
        late = ApiError(503, "no place became free in time; try again later", code="queue_timeout")
        too_long = ApiError(408, f"the request took over {self.limits.request_timeout:g} seconds", code="timeout")
        loop = asyncio.get_running_loop()
        self._timers[live] = [
            loop.call_later(self.limits.queue_timeout, self._fail_waiting, live, late),
            loop.call_later(self.limits.request_timeout, self._fail, live, too_long),
        ]
        return live

    async def prepare(
        self, live: LiveRequest, fields: ChatFields | CompletionFields, make_writer: MakeWriter | None = None
    ) -> AnswerWriter:
        """Render the prompts and make the rows, in a thread next to the engine; nothing is queued yet."""
        self.check_ready()
        assert self._pools is not None
        pool = self._pools[compiles_slowly(fields)]  # quick requests pass those that compile for seconds
        work = pool.run(
            lambda tokenizer: writer_of(self.rows, self.facts, live, fields, tokenizer, make_writer), live.caller
        )
        return await live.before_failing(work)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the model; the first is the one in answers."""
        return self.settings.served_model_name or (self.facts.name,)

    def check_model(self, fields: HasModel) -> None:
        """Refuse requests for another model; unless the server is strict, it answers them with this one."""
        try:
            check_model(self.names, fields.model)
        except ApiError:
            if self.settings.strict:
                raise
            fields.ignore("model", f"; every name is answered by {self.names[0]!r} unless the server is --strict")

    def count_ignored(self, *requests: Fields | None) -> None:
        """Log the name of each field without effect once, and count them all. requests: the forms of one request."""
        for fields in requests:
            if fields is not None:
                for name in name_ignored(fields, self.facts.tokenizer, self._ignored_fields):
                    self.metrics.add("slipstream:ignored_fields", label=name)

    def submit(self, live: LiveRequest, jobs: list[Job]) -> None:
        """Queue the rows of a request; refused if too many prompt tokens of its caller's wait."""
        if live.error is not None:  # it timed out while its prompts were rendered
            raise live.error
        self.admission.add_tokens(live, sum(job.row.prompt_length for job in jobs))
        self._preparing.discard(live)
        live.jobs = jobs
        self._submitted.add(live)
        assert self.engine is not None
        for job in jobs:
            self.engine.submit(job)

    def _fail_waiting(self, live: LiveRequest, error: ApiError) -> None:
        if live in self.admission:
            self._fail(live, error)

    def _fail(self, live: LiveRequest, error: ApiError) -> None:
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
        unfinished = [job for job in live.jobs if not job.over] if live in self._submitted else []
        self._submitted.discard(live)
        for job in unfinished:
            assert self.engine is not None
            self.engine.cancel(job)
        if unfinished:
            self.metrics.add("slipstream:cancelled", label="queued" if was_waiting else "running")

    def release(self, live: LiveRequest) -> None:
        """Forget a request that is over, however it ended."""
        for timer in self._timers.pop(live, []):
            timer.cancel()
        self._end_rows(live)
        self.live.discard(live)
        if not self.live:
            self._idle.set()

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones; after the timeout, the rest end with an error."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), self.settings.drain_timeout)
        except TimeoutError:
            log.warning("drain_timeout=%g has passed: %d requests end", self.settings.drain_timeout, len(self.live))
            for live in self.live:
                self._fail(live, ApiError(503, "the server is shutting down", code="not_ready"))
            for _ in range(50):  # their answers are being written
                if not self.live:
                    break
                await asyncio.sleep(0.02)

    def close(self, patience_seconds: float = ENGINE_STOP_SECONDS) -> None:
        """End the engine, after the current step if that ends in time, and the threads."""
        if self.engine is not None:
            self.engine.stop()
            self.engine.join(patience_seconds)
        for pool in self._pools or ():
            pool.close()
