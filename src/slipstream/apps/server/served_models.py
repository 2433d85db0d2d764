"""The models of a server: requests choose one by its name; it is loaded when it is needed, and unloaded to make room.

Models are loaded one at a time, in the order in which they were asked for. If one does not fit into memory next to
the others, those are unloaded, the idle one that was used longest ago first. One with requests first finishes these:
newer ones wait until it is loaded again, so that no model keeps out another.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Literal

import torch

from slipstream.apps.server.answers import AnswerWriter
from slipstream.apps.server.engine_thread import EngineThread
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.request_rows import MakeWriter, check_model
from slipstream.apps.server.schemas import ChatFields, CompletionFields, DetokenizeFields, TokenizeFields
from slipstream.apps.server.server_log import without_folders
from slipstream.apps.server.server_metrics import ServerMetrics
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.service import ModelSource, Service
from slipstream.apps.server.text_pool import TextPool
from slipstream.errors import SlipstreamError, first_line
from slipstream.models.cpu.processor import memory_bytes

ENGINE_STOP_SECONDS = 10.0  # that a step under way may take to end
HasModel = ChatFields | CompletionFields | TokenizeFields | DetokenizeFields
State = Literal["loading", "ready", "draining", "ended"]
log = logging.getLogger("slipstream.server")


def memory_of(device: str) -> int | None:
    """Bytes of memory that models may use on a device; None if unknown."""
    return torch.cuda.mem_get_info()[1] if device == "cuda" else memory_bytes()


class ServedModels:
    """Used only on the event loop.

    sources: with several, the first answers requests that name no model. on_ready: called once requests are answered:
    the only model of a server is loaded before. on_end: called when nothing can be answered any more, with the error.
    """

    def __init__(
        self,
        settings: ServerSettings,
        sources: Sequence[ModelSource],
        on_ready: Callable[[], None] = lambda: None,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.settings, self.metrics = settings, ServerMetrics()
        self.state: State = "loading"
        self.thread = EngineThread(self._end, lambda: any(service.is_preparing for service in self.services))
        self.services = [Service(source, self.metrics, self.thread, self._failed) for source in sources]
        self._on_ready, self._on_end = on_ready, on_end
        self._loads: dict[Service, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # which its waiters get in their order
        self._files = TextPool(None)  # downloads, next to the engine and the event loop

    def start(self) -> None:
        """Load the only model; several are loaded when requests name them."""
        self.thread.start()
        if len(self.services) == 1:
            self._begin_load(self.services[0])
        else:
            self._ready()

    def _ready(self) -> None:
        if self.state == "loading":
            self.state = "ready"
        self._on_ready()

    def _end(self, error: BaseException | None) -> None:
        self.state = "ended"
        for service in self.services:
            for live in service.live.copy():
                live.fail(ApiError(500, "the engine has stopped"))
        self._on_end(error)

    def _failed(self, service: Service, error: BaseException | None) -> None:
        """A model's engine has failed: its next request loads it again, unless it is the only one."""
        if len(self.services) == 1:
            self._end(error)

    def check_ready(self) -> None:
        """Refuse requests while the only model is loaded and while the server shuts down."""
        if self.state != "ready":
            why = {"loading": "the model is being loaded", "draining": "the server is shutting down"}
            raise ApiError(503, why.get(self.state, "the engine has stopped"), code="not_ready")

    @property
    def names(self) -> list[str]:
        return [name for service in self.services for name in service.names]

    def named(self, name: str | None) -> Service:
        """The model of this name, the first one for None; ApiError if there is none."""
        self.check_ready()
        check_model(self.names, name)
        return next((service for service in self.services if name in service.names), self.services[0])

    def answering(self, name: str | None) -> Service:
        """The model that answers requests for this name: the first for unknown names, unless the server is strict."""
        try:
            return self.named(name)
        except ApiError as error:
            if self.settings.strict or error.status != 404:
                raise
            return self.services[0]

    def choose(self, fields: HasModel) -> Service:
        """The model that answers a request; notes that the request named another one."""
        service = self.answering(fields.model)
        if fields.model not in (None, "", *service.names):
            what = "every name" if len(self.services) == 1 else "every unknown name"
            fields.ignore("model", f"; {what} is answered by {service.names[0]!r} unless the server is --strict")
        return service

    async def prepare(
        self,
        service: Service,
        live: LiveRequest,
        fields: ChatFields | CompletionFields,
        make_writer: MakeWriter | None = None,
    ) -> AnswerWriter:
        """Load the model if it is not loaded, then render the prompts and make the rows of a request."""
        if not service.keep(live):
            await live.before_failing(self._loaded(service, live))
            service.set_deadlines(live)
        return await service.prepare(live, fields, make_writer)

    @asynccontextmanager
    async def using(self, service: Service) -> AsyncIterator[Service]:
        """The model, loaded and kept in memory inside the block."""
        user = object()
        try:
            if not service.keep(user):
                await self._loaded(service, user)
            yield service
        finally:
            service.leave(user)

    async def _loaded(self, service: Service, user: object) -> None:
        """Wait until the model is loaded and keeps this user."""
        arrival = service.waiting[user] = asyncio.get_running_loop().create_future()
        if service not in self._loads:
            self._begin_load(service)
        try:
            await arrival
        except BaseException:  # the user may have gone when it was let in
            service.leave(user)
            raise
        finally:
            del service.waiting[user]
            if not service.waiting and service.state == "unloaded" and (load := self._loads.get(service)) is not None:
                load.cancel()  # it is still in line, and no request waits for it any more

    def _begin_load(self, service: Service) -> None:
        self._loads[service] = asyncio.ensure_future(self._load(service))

    async def _load(self, service: Service) -> None:
        try:
            async with self._turn:
                if service.state == "unloaded":
                    await self._make_room(service)
                    await service.load()
                service.admit()
        except Exception as error:
            self._not_loaded(service, error)
        finally:
            del self._loads[service]
        if self.state == "loading":
            self._ready()

    def _not_loaded(self, service: Service, error: Exception) -> None:
        """Tell the requests that wait for a model why it could not be loaded; the next one tries again."""
        if not isinstance(error, SlipstreamError):
            log.error("a model could not be loaded", exc_info=error)
        if self.state == "loading":
            self._end(error)
            return
        line = without_folders(first_line(error)) if isinstance(error, SlipstreamError) else "the log has the details"
        message = f"{service.names[0]} could not be loaded: {line}"
        log.warning("%s", message)
        for arrival in service.waiting.values():
            if not arrival.done():
                arrival.set_exception(ApiError(503, message, code="not_ready"))

    async def _make_room(self, service: Service) -> None:
        """Unload models until this one fits into the memory; one of unknown size must be alone."""
        device = service.source.device
        service.num_bytes = needed = await self._files.run(lambda _: service.source.fetch())
        memory = memory_of(device)
        if memory is None:
            return
        if needed is not None and needed > memory:
            raise SlipstreamError(
                f"it needs about {needed / 1e9:.1f} GB of memory, and this machine has {memory / 1e9:.1f} GB; allowed: "
                "a smaller model, or a server of its own"
            )
        while others := [s for s in self.services if s.state == "loaded" and s.source.device == device]:
            sizes = [needed, *(other.num_bytes for other in others)]
            if None not in sizes and sum(size or 0 for size in sizes) <= memory:
                return
            oldest = min(others, key=lambda other: (not other.idle.is_set(), other.last_used))
            oldest.is_leaving = True
            try:
                await oldest.idle.wait()
                oldest.unload()
            finally:
                oldest.is_leaving = False

    @property
    def is_stalled(self) -> bool:
        """True if the engine, or a prompt that waits to be rendered, has been at a standstill for too long."""
        return self.state == "ready" and any(service.is_stalled for service in self.services)

    @property
    def is_healthy(self) -> bool:
        return self.state == "ready" and not self.is_stalled and self.thread.is_alive

    def metrics_page(self) -> bytes:
        for service in self.services:
            service.update_metrics()
        return self.metrics.page()

    async def drain(self) -> None:
        """Refuse new requests and wait for running ones; after the timeout, the rest end with an error."""
        if self.state in ("loading", "ready"):
            self.state = "draining"
        if await self._all_released(self.settings.drain_timeout):
            return
        num_live = sum(len(service.live) for service in self.services)
        log.warning("drain_timeout=%g has passed: %d requests end", self.settings.drain_timeout, num_live)
        for service in self.services:
            for live in service.live:
                service.fail(live, ApiError(503, "the server is shutting down", code="not_ready"))
        await self._all_released(1.0)  # their answers are being written

    async def _all_released(self, timeout: float) -> bool:
        """True once no request is left; False if that takes too long."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while any(service.live for service in self.services):
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(0.02)
        return True

    def close(self, patience_seconds: float = ENGINE_STOP_SECONDS) -> None:
        """End the engine, after the current step if that ends in time, and the threads."""
        self.thread.stop()
        self.thread.join(patience_seconds)
        self._files.close()
        for service in self.services:
            service.close()
