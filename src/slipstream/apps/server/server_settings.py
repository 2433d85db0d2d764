"""The settings of a server, except its models, each with its default and help; needs no web framework."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from ipaddress import ip_address, ip_network

from slipstream.checks import check_whole, is_number
from slipstream.errors import UsageError, setting
from slipstream.sampling.params import DEFAULT_MAX_TOKENS

SEVERAL = "may be given several times"
NAME = re.compile(r"[A-Za-z0-9._-]+")
ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(?:[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::[0-9]{1,5})?")
DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # which browsers leave out
USUAL_WINDOW = 4096  # tokens, for which a server's times and its queue are meant; they grow with a larger window
REQUEST_SECONDS = 600.0  # that a request may take with the usual window


@dataclass(frozen=True)
class Limits:
    """The limits of a server that depend on its window. Times are in seconds."""

    window: int  # the most tokens of a prompt and its answer
    default_max_tokens: int
    max_queued_tokens: int
    queue_timeout: float
    request_timeout: float


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """Address, access and limits of a server. Times are in seconds."""

    host: str = setting("127.0.0.1", "address to listen on")
    port: int = setting(8000, "port to listen on; 0 takes a free one")
    api_key_file: str = setting("", "file of keys that clients must send, one per line: KEY or NAME:KEY")
    insecure: bool = setting(False, "allow non-local addresses without API keys")
    allowed_host: tuple[str, ...] = setting((), f"name by which clients may call this server; {SEVERAL}")
    allowed_origin: tuple[str, ...] = setting((), f"other site whose pages may call this server; {SEVERAL}")
    trusted_proxy: tuple[str, ...] = setting(
        (), f"proxy whose X-Forwarded-For names the client: its address, or a network like 10.0.0.0/8; {SEVERAL}"
    )
    greedy: bool = setting(
        False,
        "answer requests greedily that leave out the temperature, without the model's own sampling options",
        per_model=True,
    )
    served_model_name: tuple[str, ...] = setting(
        (), f"name of the model, the first in answers; default: the target's; {SEVERAL}", per_model=True
    )
    strict: bool = setting(
        False, "refuse fields without effect, other models' names and answers longer than the room left"
    )
    max_model_len: int | None = setting(
        None,
        "tokens of a prompt and its answer; 0 is the model's context; default: as much of it as memory allows",
        per_model=True,
    )
    default_max_tokens: int | None = setting(
        None,
        "most tokens of a chat answer if the request sets no limit; default: a quarter of --max-model-len",
        per_model=True,
    )
    idle_minutes: float = setting(
        0.0,
        "minutes without requests after which the model is unloaded; the next request loads it again; 0: it stays",
        per_model=True,
    )
    max_queued_requests: int = setting(64, "requests that may wait; more are refused with status 429", per_model=True)
    max_queued_tokens: int | None = setting(
        None,
        "prompt tokens that may wait; more are refused with status 429; default: 16 times --max-model-len",
        per_model=True,
    )
    max_body_bytes: int = setting(4 << 20, "largest request body; a larger one is refused with status 413")
    queue_timeout: float | None = setting(
        None,
        "seconds a request may wait for its first round; default: 60 per 4096 tokens of --max-model-len",
        per_model=True,
    )
    request_timeout: float | None = setting(
        None, "seconds a request may take in all; default: 600 per 4096 tokens of --max-model-len", per_model=True
    )
    keep_alive_timeout: int = setting(75, "seconds that an idle connection stays open for the next request")
    drain_timeout: float = setting(30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C")
    no_special_tokens_in_prompts: bool = setting(
        False, "refuse strings that would become special tokens of the model, such as the end of a turn", per_model=True
    )
    share_learning: bool = setting(
        False,
        "share cached prompts and drafters' statistics among all keys; response times can then reveal others' prompts",
    )

    def __post_init__(self) -> None:
        if isinstance(self.served_model_name, str):  # as settings in files may have it
            object.__setattr__(self, "served_model_name", (self.served_model_name,) * bool(self.served_model_name))
        # these depend on the window
        unset = [f.name for f in fields(self) if f.default is None and getattr(self, f.name) is None]
        for name, low, high in (
            ("port", 0, 65535),
            ("max_model_len", 0, 1 << 24),
            ("default_max_tokens", 1, 1 << 24),
            ("max_queued_requests", 1, 1 << 20),
            ("max_queued_tokens", 1, 1 << 30),
            ("max_body_bytes", 1024, 1 << 30),
            ("keep_alive_timeout", 1, 1 << 20),
        ):
            if name not in unset:
                check_whole(name, getattr(self, name), low, high)
        for name in ("queue_timeout", "request_timeout", "drain_timeout"):
            value = getattr(self, name)
            if name not in unset and (not is_number(value, 0, 1e6) or not value):
                raise UsageError(f"{name}={value!r}; allowed: seconds above 0, up to 1e6")
        if not is_number(self.idle_minutes, 0, 1e6):
            raise UsageError(f"idle_minutes={self.idle_minutes!r}; allowed: minutes from 0 to 1e6")
        for f in fields(self):  # settings of Ray Serve can have any type
            value = getattr(self, f.name)
            if isinstance(f.default, bool) and not isinstance(value, bool):
                raise UsageError(f"{f.name}={value!r}; allowed: true or false")
            if isinstance(f.default, str) and not isinstance(value, str):
                raise UsageError(f"{f.name}={value!r}; allowed: a string")
            is_list = isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)
            if isinstance(f.default, tuple) and not is_list:
                raise UsageError(f"{f.name}={value!r}; allowed: a list of strings")
            if isinstance(value, list):
                object.__setattr__(self, f.name, tuple(value))
        for name in self.allowed_host:
            if not (NAME.fullmatch(name) or is_address(name)):
                raise UsageError(f"allowed_host={name!r}; allowed: a name without scheme and port, like box.lan")
        for proxy in self.trusted_proxy:
            try:
                ip_network(proxy, strict=False)
            except ValueError:
                why = "allowed: an address like 127.0.0.1, or a network like 10.0.0.0/8"
                raise UsageError(f"trusted_proxy={proxy!r}; {why}") from None
        for origin in self.allowed_origin:
            if not ORIGIN.fullmatch(origin) or origin.endswith(DEFAULT_PORTS.get(origin.partition(":")[0], "/")):
                raise UsageError(
                    f"allowed_origin={origin!r}; allowed: a site as browsers name it, like https://pages.example or "
                    "http://localhost:3000: lower case, no path, no default port"
                )
        if not self.host:
            raise UsageError("host=''; allowed: an address or a name, for example 127.0.0.1")
        if not (NAME.fullmatch(self.host) or is_address(self.host.strip("[]"))):
            raise UsageError(
                f"host={self.host!r}; allowed: an address or a name, for example 127.0.0.1; the port goes to --port"
            )
        for name in self.served_model_name:
            if not name or not name.isprintable():
                raise UsageError(f"served_model_name={name!r}; allowed: printable characters")
        if not self.is_local and not self.api_key_file and not self.insecure:
            raise UsageError(
                f"host={self.host!r} without keys lets everyone on the network in; allowed: --api-key-file FILE, "
                "--host 127.0.0.1, or --insecure"
            )

    def limits(self, window: int) -> Limits:
        """The limits with a window of this many tokens; those that are not set grow with it."""
        scale = max(1.0, window / USUAL_WINDOW)
        return Limits(
            window,
            self.default_max_tokens or max(DEFAULT_MAX_TOKENS, window // 4),
            self.max_queued_tokens or 16 * max(window, USUAL_WINDOW),
            self.queue_timeout or 60.0 * scale,
            self.request_timeout or REQUEST_SECONDS * scale,
        )

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        if self.host.lower() == "localhost":
            return True
        host = self.host.strip("[]")
        return is_address(host) and ip_address(host).is_loopback


def is_address(name: str) -> bool:
    """True if a name is an IP address."""
    try:
        ip_address(name)
    except ValueError:
        return False
    return True
