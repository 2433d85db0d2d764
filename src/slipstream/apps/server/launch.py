"""Starts and stops a server: SIGTERM or Ctrl-C lets running requests finish; a second signal does not.

SIGHUP reads the key file again, unless the server's terminal was closed, which ends it like SIGTERM.
"""

from __future__ import annotations

import asyncio
import errno
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from types import FrameType

import uvicorn

from slipstream.apps.server.access import KeyFile
from slipstream.apps.server.connections import ConnectionSweep
from slipstream.apps.server.engine_thread import collect
from slipstream.apps.server.served_models import ServedModels
from slipstream.apps.server.server_settings import REQUEST_SECONDS, ServerSettings, is_address
from slipstream.apps.server.service import ModelSource
from slipstream.apps.server.web_app import make_app
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError, first_line
from slipstream.models.cpu.thread_placement import free_thread

log = logging.getLogger("slipstream.server")
MAX_CONNECTIONS = 1024
OTHER_FILES = 256  # that a server has open
HANGUP = getattr(signal, "SIGHUP", None)  # Windows has none
CLOSING_SECONDS = 30.0  # that closing connections and threads may take when the server ends
FORCED_SECONDS = 2.0  # that a step under way may still take after a second signal


class Server(uvicorn.Server):
    """A web server that lets requests finish before it ends.

    on_ready: called with the server once it answers requests.
    last_resort: called at each signal with the seconds until the process must have ended.
    """

    def __init__(
        self,
        settings: ServerSettings,
        sources: Sequence[ModelSource],
        on_ready: Callable[[Server], None] = lambda server: None,
        last_resort: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        app = make_app(settings, self._make_models)
        self._keys: KeyFile = app.state.keys
        super().__init__(
            uvicorn.Config(
                app,
                settings.host,
                settings.port,
                http="h11",  # whose connections the sweep can read
                ws="none",
                proxy_headers=False,  # `Access` reads them
                limit_concurrency=2 * MAX_CONNECTIONS,
                timeout_keep_alive=settings.keep_alive_timeout,
                headers=[("keep-alive", f"timeout={settings.keep_alive_timeout}")],
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_graceful_shutdown=5,
            )
        )
        self.settings, self._sources, self._ready = settings, sources, on_ready
        self._last_resort = last_resort
        self._connections = ConnectionSweep(
            MAX_CONNECTIONS, settings.keep_alive_timeout, settings.request_timeout or REQUEST_SECONDS
        )
        self.models: ServedModels | None = None
        self.failure: BaseException | None = None  # ended the engine, and with it the server
        self._listens = False
        self._has_terminal = _is_terminal()
        self._draining: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def _make_models(self) -> ServedModels:
        self._loop = asyncio.get_running_loop()
        free_thread()  # else this thread would share a core with the engine's
        self.models = ServedModels(self.settings, self._sources, self._announce, self._engine_ended)
        return self.models

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen; the models may have been loaded by then."""
        await super().startup(sockets)
        self._listens = not self.should_exit
        self._announce()

    async def on_tick(self, counter: int) -> bool:
        """Called about ten times a second; returns True to end."""
        self._connections.sweep(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)

    def _announce(self) -> None:
        """Call `on_ready` once requests are answered and the address is known, whichever is later."""
        if self._listens and self.models is not None and self.models.state == "ready":
            self._ready(self)

    @property
    def url(self) -> str:
        """The server's address for programs on this machine."""
        addresses = [socket.getsockname() for server in self.servers for socket in server.sockets]
        host = self.settings.host.strip("[]")
        if is_address(host) and ip_address(host).is_unspecified:  # it listens on every address of this machine
            host = "::1" if ":" in host else "127.0.0.1"
        host = f"[{host}]" if ":" in host else host
        return f"http://{host}:{addresses[0][1] if addresses else self.settings.port}"

    def _engine_ended(self, error: BaseException | None) -> None:
        self.failure = self.failure or error
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin a shutdown at the first signal, end at once at the second."""
        if sig == HANGUP and (self._draining is not None or not self._has_terminal or _is_terminal()):
            if self._draining is None and self._loop is not None:  # else the file has just been read, or is not needed
                self._loop.call_soon_threadsafe(self._keys.read_again)
            return
        if self._draining is not None or self._loop is None:
            self.should_exit = self.force_exit = True
            self._last_resort(CLOSING_SECONDS)
            return
        self._loop.call_soon_threadsafe(self.begin_shutdown)

    def begin_shutdown(self) -> None:
        """Refuse new requests, let the others finish, then end; called on the event loop."""
        if self._draining is None:
            self._last_resort(self.settings.drain_timeout + CLOSING_SECONDS)
            self._draining = asyncio.ensure_future(self._drain())

    async def _drain(self) -> None:
        log.info("shutting down: running requests have %g s; a second signal ends them", self.settings.drain_timeout)
        if self.models is not None:
            await self.models.drain()
        self.should_exit = True


def serve(settings: ServerSettings, sources: Sequence[ModelSource], on_ready: Callable[[Server], None]) -> None:
    """Serve until a signal. SlipstreamError if it cannot listen or the engine failed."""
    logging.getLogger("uvicorn").setLevel(logging.WARNING)  # our own log has the same facts
    # `Access` logs tracebacks of requests, and cancelled ones have nothing to say
    logging.getLogger("uvicorn.error").addFilter(lambda record: not record.exc_info)
    _allow_files(2 * MAX_CONNECTIONS + OTHER_FILES)
    with _listening(settings) as listener:
        sources = [replace(source, load=partial(_uncollected, source.load)) for source in sources]
        server = Server(settings, sources, on_ready, _end_in)
        on_hangup = None if HANGUP is None else signal.getsignal(HANGUP)
        if HANGUP is not None and on_hangup is not signal.SIG_IGN:  # as after nohup
            signal.signal(HANGUP, server.handle_exit)
        try:
            server.run(sockets=[listener])
        except SystemExit:  # uvicorn raises it if it could not start
            if server.failure is None:
                raise
        finally:
            if HANGUP is not None and on_hangup is not None:  # None: it was not set from Python
                signal.signal(HANGUP, on_hangup)
            gc.unfreeze()
            faulthandler.cancel_dump_traceback_later()
    if server.failure is not None:
        if isinstance(server.failure, SlipstreamError):
            raise server.failure
        raise SlipstreamError(f"the engine has stopped: {first_line(server.failure)}") from server.failure
    if server.force_exit and server.models is not None:
        server.models.close(FORCED_SECONDS)
    if server.models is not None and server.models.thread.is_alive:
        log.info("ending without waiting for the model that is being loaded or computes")
        os._exit(130 if server.force_exit else 0)  # when Python ends, a thread within PyTorch aborts the process
    if server.force_exit:
        raise KeyboardInterrupt


def _is_terminal() -> bool:
    """True if standard error is a terminal that is still there."""
    return sys.__stderr__ is not None and sys.__stderr__.isatty()


def _end_in(seconds: float) -> None:
    """End the process after this many seconds, even if one of its threads never lets others run."""
    nowhere = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # discards the traceback
    faulthandler.dump_traceback_later(seconds, exit=True, file=nowhere)


def _uncollected(load: Callable[[], SpeculativeDecoder]) -> SpeculativeDecoder:
    """Load a decoder, and exclude all existing objects from garbage collection until `serve` ends.

    A collection that visits all of them would stall every stream.
    """
    decoder = load()
    collect()
    gc.freeze()
    return decoder


def _allow_files(count: int) -> None:
    """Raise the process's limit of open files and connections to this many, if the hard limit allows it."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _listening(settings: ServerSettings) -> socket.socket:
    """A socket that listens at the address; opened before models are loaded, so that a taken port is found early."""
    host = settings.host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, settings.port), family=family, backlog=2048)
    except OSError as error:
        why = (error.strerror or first_line(error)).partition(" (while ")[0]  # what follows repeats the address
        shown = f"[{host}]" if ":" in host else host
        if error.errno in (errno.EADDRINUSE, errno.EACCES):
            why += "; allowed: --port N with another port, or --port 0, which takes a free one"
        raise SlipstreamError(f"cannot listen on {shown}:{settings.port}: {why}") from error
