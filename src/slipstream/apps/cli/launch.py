"""`slipstream launch`: a coding agent that uses a model on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import typer

from slipstream.apps.cli.application import command
from slipstream.apps.cli.consoles import err
from slipstream.apps.cli.flags import OUTPUT, Models, flags, option
from slipstream.checks import counted
from slipstream.errors import SlipstreamError, UsageError, did_you_mean
from slipstream.models.weights.model_files import EMBEDDED

URL = "http://127.0.0.1:8000"  # where `slipstream serve` listens
KEY = "SLIPSTREAM_API_KEY"  # the variable with the key of a server that needs one
NO_KEY = "none"  # what clients send that insist on a key
ANSWER_SECONDS = 5.0  # that a running server may take to answer
LOADING_SECONDS = 600.0  # that it may take to load a model
LOADING = b"the model is being loaded"  # what a server answers until it has loaded its first model
POLL_SECONDS = 0.2
BATCH_SIZE = 2  # of a server for one agent, which may ask for a title as well; the fewer, the longer its window
ENDING_SECONDS = 10.0  # that a server may take to end
_open = build_opener(ProxyHandler({})).open  # a proxy cannot reach a server on this machine


@dataclass(frozen=True)
class Served:
    """A server that is ready."""

    url: str
    model: str
    window: int  # tokens of a prompt and its answer

    @property
    def key(self) -> str:
        return os.environ.get(KEY, NO_KEY)


@dataclass(frozen=True)
class Settings:
    """The environment variables and leading arguments by which a client uses a server."""

    environment: dict[str, str] = field(default_factory=dict)
    arguments: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Client:
    """A coding agent that can be launched."""

    package: str  # of npm
    prompt_tokens: int  # of its first request, about
    settings: Callable[[Served], Settings]


def claude_settings(served: Served) -> Settings:
    """Claude Code: every model that it may ask for is the one that is served, and prompts keep their beginnings."""
    models = ("ANTHROPIC_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    kinds = (f"ANTHROPIC_DEFAULT_{kind}_MODEL" for kind in ("OPUS", "SONNET", "HAIKU"))
    return Settings(
        dict.fromkeys((*models, *kinds), served.model)
        | {
            "ANTHROPIC_BASE_URL": served.url,
            "ANTHROPIC_AUTH_TOKEN": served.key,
            "ANTHROPIC_API_KEY": "",
            "CLAUDE_CODE_AUTO_COMPACT_WINDOW": str(served.window),
            "CLAUDE_STREAM_IDLE_TIMEOUT_MS": "1800000",  # else it stops waiting for a long prompt after 12 minutes
            "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
            "CLAUDE_CODE_TOTAL_TOKENS_REMINDER": "off",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        }
    )


def codex_settings(served: Served) -> Settings:
    """Codex: a provider of its own, by values that replace those of its configuration file."""
    provider = {"name": "Slipstream", "base_url": f"{served.url}/v1", "wire_api": "responses"}
    if KEY in os.environ:
        provider["env_key"] = KEY
    table = ", ".join(f"{name} = {json.dumps(value)}" for name, value in provider.items())
    values = {
        "model_providers.slipstream": f"{{{table}}}",
        "model_provider": '"slipstream"',
        "model": json.dumps(served.model),
        "model_context_window": str(served.window),
    }
    return Settings(arguments=[part for name, value in values.items() for part in ("-c", f"{name}={value}")])


def opencode_settings(served: Served) -> Settings:
    """opencode: a configuration in a variable, which is added to its files."""
    limit = {"context": served.window, "output": served.window // 4}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Slipstream",
        "options": {"baseURL": f"{served.url}/v1", "apiKey": served.key},
        "models": {served.model: {"name": served.model, "limit": limit}},
    }
    config = {"model": f"slipstream/{served.model}", "provider": {"slipstream": provider}}
    return Settings({"OPENCODE_CONFIG_CONTENT": json.dumps(config)})


CLIENTS = {
    "claude": Client("@anthropic-ai/claude-code", 13_000, claude_settings),
    "codex": Client("@openai/codex", 9_000, codex_settings),
    "opencode": Client("opencode-ai", 7_000, opencode_settings),
}


@command(
    "launch",
    "slipstream launch opencode",
    "slipstream launch claude --model Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B",
    "slipstream launch codex -- exec 'Explain this repository.'",
)
@flags(Models)
def launch_command(
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="claude, codex or opencode")],
    models: Models,
    arguments: Annotated[list[str] | None, typer.Argument(metavar="ARGUMENT", help="for the client, after --")] = None,
    url: Annotated[str, option("Server", "--url", "a running server to use", "URL")] = URL,
    shows: Annotated[bool, option(OUTPUT, "--print", "print the client's settings and do not run it")] = False,
) -> None:
    """Run a coding agent with a model on this machine.

    Uses the server at --url if one runs there and serves the model, or none is named; else starts one, and ends it with
    the client. The variable SLIPSTREAM_API_KEY holds the key of a server that needs one.
    """
    if (agent := CLIENTS.get(client)) is None:
        raise UsageError(f"unknown client {client!r}; allowed: {', '.join(CLIENTS)}{did_you_mean(client, *CLIENTS)}")
    program = shutil.which(client)
    if program is None and not shows:
        raise SlipstreamError(f"{client!r} is not installed; run: npm install -g {agent.package}")
    name = None if models.target == EMBEDDED else models.target
    served = None if models.draft is not None else server_at(url.rstrip("/"), name)
    with ended_by_signals(), started(models) if served is None else nullcontext(served) as server:
        if server.window < agent.prompt_tokens:
            err.sentence(
                f"warning: the first request of {client} has about {counted(agent.prompt_tokens, 'token')}, and "
                f"{server.model} takes {server.window} with its answer; `slipstream serve --max-model-len N "
                "--max-batch-size 1` may take more, if the model's context and the memory allow it"
            )
        settings = agent.settings(server)
        if shows:
            for name, value in settings.environment.items():
                sys.stdout.write(f"{name}={value}\n")
            sys.stdout.write("".join(f"{argument}\n" for argument in settings.arguments))
            return
        code = run(program or client, settings, arguments or ())
    raise typer.Exit(code)


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and a closed terminal end the command by an exception, so that its client and server end too.

    A signal that is ignored, as SIGHUP is under nohup, stays ignored.
    """
    numbers = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}
    for number in before:
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def server_at(url: str, name: str | None = None) -> Served | None:
    """The server at an address, with its first model or the one of this name, which it loads; None if there is none.

    SlipstreamError if it refuses to say what it serves.
    """
    try:
        address = urlsplit(url)
        is_address = address.scheme in ("http", "https") and bool(address.hostname) and address.port != 0
    except ValueError:  # brackets, or a port that is none
        is_address = False
    if not is_address or " " in url or not url.isprintable():
        raise UsageError(f"--url {url!r}; allowed: an address like {URL}")
    try:
        card = next((card for card in _cards(url) if name in (None, card["id"])), None)
        if card is not None and card["max_model_len"] is None:
            _request(f"{url}/api/generate", {"model": card["id"], "stream": False}, LOADING_SECONDS)
            card = _request(f"{url}/v1/models/{quote(card['id'])}")
        return None if card is None else Served(url, str(card["id"]), int(card["max_model_len"]))
    except HTTPError as error:
        if error.code == 503 and error.url.endswith("/v1/models"):  # it is ending
            return None
        why = f"needs a key; set {KEY}" if error.code == 401 else f"answered with status {error.code}"
        raise SlipstreamError(f"the server at {url} {why}") from error
    except (URLError, OSError):
        return None
    except (ValueError, LookupError, TypeError) as error:
        raise SlipstreamError(f"the server at {url} is not Slipstream's; allowed: --url of another one") from error


def _cards(url: str) -> list[dict[str, Any]]:
    """The models of a server, as soon as it has loaded the first; HTTPError if it is ending."""
    is_told = False
    while True:
        try:
            cards: list[dict[str, Any]] = _request(f"{url}/v1/models")["data"]
            return cards
        except HTTPError as error:
            if error.code != 503 or LOADING not in error.read():
                raise
        if not is_told:
            err.sentence(f"waiting until the server at {url} has loaded its model")
            is_told = True
        time.sleep(POLL_SECONDS)


def _request(url: str, body: dict[str, Any] | None = None, timeout: float = ANSWER_SECONDS) -> Any:
    """A server's answer to a request, which has a body if it is a POST."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {os.environ.get(KEY, NO_KEY)}", "content-type": "application/json"}
    with _open(Request(url, data, headers), timeout=timeout) as answer:
        return json.load(answer)


@contextmanager
def started(models: Models) -> Iterator[Served]:
    """A server of these models on a free port, until the block ends."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["--target", models.target, "--port", str(port), "--log-format", "text"]  # its last line is shown
    words += [] if models.draft is None else ["--draft", models.draft]
    if models.config_file is None:
        words += ["--max-batch-size", str(BATCH_SIZE)]
    else:
        words += ["--config", str(models.config_file)]
    err.sentence(f"starting a server of {models.target}")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "slipstream", "serve", *words],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,  # Ctrl-C is for the client
            )
        try:
            while (served := server_at(f"http://127.0.0.1:{port}")) is None:
                if process.poll() is not None:
                    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    raise SlipstreamError("".join(lines[-1:]).removeprefix("error: ") or "the server has ended")
                time.sleep(POLL_SECONDS)
            yield served
        finally:
            process.terminate()
            try:
                process.wait(ENDING_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def run(program: str, settings: Settings, arguments: Sequence[str]) -> int:
    """Run a client with its settings, and return its exit code; Ctrl-C reaches the client alone."""
    environment: dict[str, Any] = dict(os.environ) | settings.environment
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.run([program, *settings.arguments, *arguments], env=environment, check=False).returncode
    except OSError as error:
        raise SlipstreamError(f"{program!r} cannot be run: {error.strerror}") from error
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code
