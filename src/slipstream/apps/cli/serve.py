"""`slipstream serve`: an OpenAI-compatible server."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import resources
from typing import TYPE_CHECKING, Annotated, Any

import typer

from slipstream.apps.cli.application import (
    check_config,
    command,
    interrupted_at_once,
    load_decoder,
    loading_message,
)
from slipstream.apps.cli.consoles import write_raw
from slipstream.apps.cli.flags import SECTIONS, Models, flag, flags, option
from slipstream.apps.server.server_log import use_format, use_level
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.config import SERVED, DecoderConfig
from slipstream.errors import UsageError, did_you_mean
from slipstream.models.weights.model_files import EMBEDDED

if TYPE_CHECKING:
    from slipstream.apps.server.launch import Server

log = logging.getLogger("slipstream.server")
SERVER = SECTIONS[ServerSettings]


@dataclass(frozen=True)
class LogOptions:
    """The log on standard error; these take effect before others are read, so that the log has their refusals."""

    log_format: str = flag(
        "text", SERVER, "text | json (an object per line)", "NAME", is_eager=True, callback=use_format
    )
    log_level: str = flag("info", SERVER, "debug | info | warning | error", "NAME", is_eager=True, callback=use_level)


MONITORING = {
    "dashboard": "grafana_dashboard.json",
    "alerts": "prometheus_alerts.yml",
    "scrape": "prometheus_scrape.yml",
}


def _print(name: str) -> str:
    """Print a file for monitoring and end the command."""
    if not name:
        return name
    if name not in MONITORING:
        raise UsageError(f"--print {name!r}; allowed: {', '.join(MONITORING)}{did_you_mean(name, *MONITORING)}")
    write_raw((resources.files("slipstream") / "data" / MONITORING[name]).read_text(encoding="utf-8"))
    raise typer.Exit


@command(
    "serve",
    "slipstream serve",
    "slipstream serve --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    "slipstream serve --host 0.0.0.0 --api-key-file keys.txt",
)
@flags(Models, LogOptions, ServerSettings, DecoderConfig, acceptance=SERVED.acceptance)
def serve_command(
    context: typer.Context,
    models: Models,
    settings: ServerSettings,
    config: DecoderConfig,
    shown: Annotated[
        str,
        option(
            SERVER,
            "--print",
            "print a file for monitoring and exit: dashboard (Grafana), alerts or scrape (Prometheus)",
            "NAME",
            is_eager=True,
            callback=_print,
        ),
    ] = "",
) -> None:
    """Serve models to OpenAI's clients and to browsers.

    Several models have a table each in the file of --config, [models.NAME], with the model's flags; they are loaded
    when requests name them. Ctrl-C lets running requests finish; a second Ctrl-C ends them.
    """
    choices = model_choices(context.obj or {}, models, config, settings)
    with _reloads_ignored():
        if context.obj is None:
            log.info("%s", loading_message(models))  # now, as the imports below take seconds
        with interrupted_at_once():
            from slipstream.apps.server.launch import serve
        from slipstream.apps.server.service import ModelSource

        sources = []
        for choice in choices:
            load = partial(load_decoder, choice.models, choice.config, is_announced=True)
            source = ModelSource(load, choice.settings)
            if len(choices) > 1:  # they share the memory
                source = replace(source, fetch=choice.fetch, device=choice.device)
            sources.append(source)
        serve(settings, sources, _banner)


@contextmanager
def _reloads_ignored() -> Iterator[None]:
    """Ignore SIGHUP, a service manager's request to reload, until the server handles it.

    On a terminal it still ends the command: it then means that the terminal was closed.
    """
    hangup = getattr(signal, "SIGHUP", None)  # Windows has none
    if hangup is None or signal.getsignal(hangup) != signal.SIG_DFL or sys.stderr.isatty():
        yield
        return
    signal.signal(hangup, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(hangup, signal.SIG_DFL)


@dataclass(frozen=True)
class ModelChoice:
    """A model that is served, and its settings."""

    models: Models
    config: DecoderConfig
    settings: ServerSettings

    def fetch(self) -> int | None:
        """Download what is missing; the bytes of memory that the model needs with its draft model, about."""
        from slipstream.models.weights.stored_models import memory_needed

        if self.config.load_options:  # which may name other files
            return None
        return memory_needed(self.models.target, self.models.draft)

    @property
    def device(self) -> str:
        """The kind of device on which the model computes."""
        import torch

        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        return automatic if self.config.device == "auto" else self.config.device.partition(":")[0]


def model_choices(
    tables: dict[str, dict[str, Any]], models: Models, config: DecoderConfig, settings: ServerSettings
) -> list[ModelChoice]:
    """The models of the tables, with the flags' values for what they leave out; without tables, that of the flags."""
    if not tables:
        return [ModelChoice(models, config, settings)]
    choices = []
    for name, table in tables.items():
        if models.target == EMBEDDED and "target" not in table:
            raise UsageError(f"models.{name} has no model; allowed: model = NAME, as `slipstream models` lists them")
        names = (name, *table.get("served_model_name", settings.served_model_name))
        parts = [
            {f.name: table[f.name] for f in fields(part) if f.name in table} for part in (models, config, settings)
        ]
        try:
            choice = ModelChoice(
                replace(models, **parts[0]),
                replace(config, **parts[1]),
                replace(settings, **parts[2] | {"served_model_name": names}),
            )
            check_config(choice.config)
        except UsageError as error:
            raise UsageError(f"models.{name}: {error}") from error
        choices.append(choice)
    served = [name for choice in choices for name in choice.settings.served_model_name]
    if twice := [name for number, name in enumerate(served) if name in served[:number]]:
        raise UsageError(f"served_model_name={twice[0]!r} is the name of two models; allowed: a name for each")
    return choices


def _banner(server: Server) -> None:
    assert server.models is not None
    services = server.models.services
    keys = "API keys needed" if server.settings.api_key_file else "no API keys"
    keys += "" if server.settings.is_local else ", open to other machines"
    if len(services) == 1 and services[0].state == "loaded":
        decoder, facts = services[0].loaded.decoder, services[0].facts
        draft = "" if decoder.draft is None else f" with {decoder.draft.name}"
        same = "every seed repeats its output" if facts.reproducible else "outputs may differ where two tokens tie"
        lines = [
            f"Slipstream serves {facts.name}{draft} at {server.url}",
            f"  drafter {decoder.drafter_name}, {decoder.config.max_batch_size} requests at a time, "
            f"{services[0].limits.window} tokens each, {keys}",
            f"  fingerprint {facts.fingerprint}: {same}",
        ]
    else:
        names = ", ".join(service.names[0] for service in services)
        lines = [f"Slipstream serves {names} at {server.url}", f"  each is loaded when a request names it, {keys}"]
    for line in (*lines, f"  open {server.url} in a browser, or:"):
        log.info("%s", line)
    model = f'"model": "{services[0].names[0]}", ' if len(services) > 1 else ""
    authorization = """-H "authorization: Bearer $KEY" """ if server.settings.api_key_file else ""
    log.info(
        "  curl %s/v1/chat/completions %s-H 'content-type: application/json' -d "
        """'{%s"messages": [{"role": "user", "content": "Name three birds."}]}'""",
        server.url,
        authorization,
        model,
    )
