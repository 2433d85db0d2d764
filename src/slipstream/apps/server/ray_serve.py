"""The server's application as a Ray Serve deployment: `slipstream.integrations.ray:app` in a Serve configuration."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fastapi import FastAPI

from slipstream.apps.server.served_models import ServedModels
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.apps.server.service import ModelSource
from slipstream.apps.server.web_app import make_app
from slipstream.checks import check_known
from slipstream.config import SERVED, DecoderConfig
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError

log = logging.getLogger("slipstream.server")
AFFINITY = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


@dataclass(frozen=True, kw_only=True)
class ServeSpec:
    """The `args` of a Serve configuration."""

    target: str
    draft: str | None = None
    decoder: Mapping[str, Any] = field(default_factory=dict)  # fields of `DecoderConfig`
    server: Mapping[str, Any] = field(default_factory=dict)  # fields of `ServerSettings`
    replicas: int | Mapping[str, int] = 1  # number, or {"min": 1, "max": 4}
    num_cpus: float = 1  # of each replica
    num_gpus: float = 0  # of each replica
    session_affinity: bool = False  # requests with the same `x-session-id` share a replica and its KV cache

    @classmethod
    def from_args(cls, args: Mapping[str, Any]) -> ServeSpec:
        """Check the arguments; UsageError names a wrong one."""
        check_known("unknown argument", args, [f.name for f in fields(cls)])
        if not isinstance(args.get("target"), str):
            raise UsageError(f"target={args.get('target')!r:.80}; allowed: the name of a model")
        spec = cls(**args)
        for name, kind in (("decoder", DecoderConfig), ("server", ServerSettings)):
            settings = getattr(spec, name)
            if not isinstance(settings, Mapping):
                raise UsageError(f"{name}={settings!r:.80}; allowed: a mapping")
            check_known(f"{name}: unknown setting", settings, [f.name for f in fields(kind)])
        ServerSettings(**spec.server)  # raises for wrong values
        spec.scale()
        return spec

    @property
    def config(self) -> DecoderConfig:
        """The decoder's settings; acceptance is `match` by default, as in `slipstream serve`."""
        return replace(SERVED, **self.decoder)

    @property
    def settings(self) -> ServerSettings:
        return ServerSettings(**self.server)

    def scale(self) -> dict[str, Any]:
        """The number of replicas in Serve's form."""
        if isinstance(self.replicas, int) and not isinstance(self.replicas, bool) and self.replicas >= 1:
            return {"num_replicas": self.replicas}
        if isinstance(self.replicas, Mapping) and set(self.replicas) == {"min", "max"}:
            max_rows = self.config.max_batch_size
            limits = {"min_replicas": self.replicas["min"], "max_replicas": self.replicas["max"]}
            return {"autoscaling_config": limits | {"target_ongoing_requests": max_rows}}
        raise UsageError(f'replicas={self.replicas!r}; allowed: a whole number, 1 or more, or {{"min": N, "max": N}}')

    def load(self) -> SpeculativeDecoder:
        """Make the decoder, in the replica's engine thread."""
        return SpeculativeDecoder(self.target, self.draft, **vars(self.config))


def app(args: Mapping[str, Any]) -> Any:
    """A Serve application. args: see `ServeSpec`."""
    try:
        from ray import serve
        from ray.serve.config import RequestRouterConfig
    except ImportError as error:
        raise SlipstreamError(f"Ray Serve needs {error.name}; run: pip install 'ray[data,serve]' pyarrow") from error
    spec = ServeSpec.from_args(args)

    def build() -> FastAPI:
        """Called in each replica."""
        return replica_app(spec)

    class Slipstream:
        """A replica: one engine."""

    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": spec.num_cpus, "num_gpus": spec.num_gpus},
        # as many as fit into our own queue, which refuses more with status 429
        "max_ongoing_requests": spec.config.max_batch_size + spec.settings.max_queued_requests,
        "graceful_shutdown_timeout_s": spec.settings.drain_timeout,
    }
    if spec.session_affinity:
        options["request_router_config"] = RequestRouterConfig(request_router_class=AFFINITY)
    deployment = serve.deployment(name="Slipstream", **options, **spec.scale())(serve.ingress(build)(Slipstream))
    return deployment.bind()


def replica_app(spec: ServeSpec) -> FastAPI:
    """The application of a replica. It is ready once its models are loaded; if its engine fails, the replica ends."""
    ready = asyncio.Event()
    settings, sources = spec.settings, [ModelSource(spec.load, spec.settings)]
    application = make_app(settings, lambda: ServedModels(settings, sources, ready.set, _end))
    begin = application.router.lifespan_context

    @asynccontextmanager
    async def loaded(app: FastAPI) -> AsyncIterator[Any]:
        async with begin(app) as state:
            await ready.wait()
            yield state

    application.router.lifespan_context = loaded
    return application


def _end(error: BaseException | None) -> None:
    """End the replica's process if its engine failed; Serve then starts another."""
    if error is not None:
        log.error("the engine has stopped, and this replica with it: %s", error)
        os._exit(1)
