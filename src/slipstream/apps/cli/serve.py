"""`slipstream serve`: an OpenAI-compatible server."""

from __future__ import annotations

from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING

from slipstream.apps.cli.application import announce_loading, command, config_from, load_decoder
from slipstream.apps.cli.consoles import err
from slipstream.apps.cli.flags import Models, flags
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.config import SERVED, DecoderConfig
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.apps.server.launch import Server
    from slipstream.decoder import SpeculativeDecoder

NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@command(
    "serve",
    "slipstream serve",
    "slipstream serve --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    "slipstream serve --host 0.0.0.0 --api-key-file keys.txt",
)
@flags(Models, ServerSettings, DecoderConfig, acceptance=SERVED.acceptance)
def serve_command(models: Models, settings: ServerSettings, config: DecoderConfig) -> None:
    """Serve a model to OpenAI's clients and to browsers.

    Ctrl-C lets running requests finish; a second Ctrl-C ends them.
    """
    config = config_from(config, models.config_file, SERVED)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SlipstreamError(f"the server needs {', '.join(missing)}; run: pip install {' '.join(missing)}")
    if err.is_terminal:  # now, as the imports below take seconds
        announce_loading(models)
    from slipstream.apps.cli import CORES
    from slipstream.apps.server.launch import serve

    def load() -> SpeculativeDecoder:
        if not err.is_terminal:
            announce_loading(models)
        return load_decoder(models, config, is_announced=True)

    def announce(server: Server) -> None:
        with suppress(OSError):
            _banner(server)

    serve(settings, load, announce, CORES)


def _banner(server: Server) -> None:
    service = server.service
    assert service is not None
    decoder, facts = service.decoder, service.facts
    draft = "" if decoder.draft is None else f" with {decoder.draft.name}"
    keys = "API keys needed" if server.settings.api_key_file else "no API keys"
    keys += "" if server.settings.is_local else ", open to other machines"
    same = "every seed repeats its output" if facts.reproducible else "outputs may differ where two tokens tie"
    for line in (
        f"Slipstream serves {facts.name}{draft} at {server.url}",
        f"  drafter {decoder.drafter_name}, {decoder.config.max_batch_size} requests at a time, "
        f"{service.rows.max_model_len} tokens each, {keys}",
        f"  fingerprint {facts.fingerprint}: {same}",
        f"  open {server.url} in a browser, or:",
    ):
        err.sentence(line)
    authorization = """-H "authorization: Bearer $KEY" """ if server.settings.api_key_file else ""
    err.print(
        f"  curl {server.url}/v1/chat/completions {authorization}-H 'content-type: application/json' "
        """-d '{"messages": [{"role": "user", "content": "Name three birds."}]}'""",
        soft_wrap=True,  # users copy it, and a line break would end the command
    )
