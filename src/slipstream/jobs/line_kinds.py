"""What a format of lines has to do: turn a line into rows, and rows that have ended into a line of the output.

Two formats are known. That of OpenAI's batches is read by the server's code, which is found by its name when the first
such line comes: it needs the packages of the server.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from slipstream.core.types import Row
from slipstream.errors import SlipstreamError, UsageError, first_line
from slipstream.jobs.job_lines import Line, is_openai
from slipstream.sampling.params import SamplingParams
from slipstream.wiring.model_fingerprint import fingerprint_of

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder

KINDS = {"plain": "slipstream.jobs.plain_lines", "openai": "slipstream.apps.server.openai_lines"}
NEEDED = "lines in OpenAI's format need {}; run: pip install 'slipstream-lm[server]'"


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """What a job is told besides its lines and its models.

    params: options that plain lines do not name themselves. chat: texts go through the chat template, as in `generate`.
    model_name: what requests call the model, by default the target's name. token_ids: report those of plain lines.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    chat: bool = True
    model_name: str = ""
    token_ids: bool = False

    def __post_init__(self) -> None:
        if self.params.seed is not None:
            raise UsageError(
                f"seed={self.params.seed} for all requests of a job; allowed: a seed in a line, or none: each request "
                "then has one that follows from its id"
            )
        if self.params.logits_processors:
            raise UsageError("logits_processors in a job, whose requests are data; allowed: none")


class Asked(Protocol):
    """A request of a job. line: where it is from. rows: its texts, those of a prompt with n > 1 side by side."""

    @property
    def line(self) -> Line:
        """Where it is from."""

    @property
    def rows(self) -> Sequence[Row]:
        """Its texts."""

    def answer(self) -> dict[str, Any]:
        """The line of the output, once all rows have ended; raises what a row failed with."""


class LineKind(Protocol):
    """Reads one format, for one decoder."""

    def asked(self, line: Line, digest: str) -> Asked:
        """The request of a line; an exception says what is not allowed. digest: goes into its answer."""


class RequestDigest:
    """What tells requests apart. acceptance: the rule under which they are decoded."""

    def __init__(self, options: JobOptions, acceptance: str) -> None:
        self._options = options
        plain = {"params": options.params.to_dict(), "chat": options.chat, "token_ids": options.token_ids}
        self._common = json.dumps([acceptance, plain], sort_keys=True)

    def check(self, line: Line) -> None:
        """Refuse options that the requests of OpenAI's format would leave out."""
        if is_openai(line.item):
            if self._options.params != SamplingParams():
                raise UsageError(
                    f"line {line.number} has OpenAI's format, whose requests bring their own sampling options; "
                    "allowed: options for all requests with plain lines only"
                )
            _module(line)  # what it needs may be missing

    def of(self, line: Line) -> str:
        """Equal for requests that have the same answer of one model: what is asked, under which options."""
        asked = json.dumps(dict(line.item), sort_keys=True)
        return hashlib.sha256(f"{self._common}\n{asked}".encode("utf-8", "backslashreplace")).hexdigest()[:24]


class LineReader:
    """All formats, for one decoder. fingerprint: of its model."""

    def __init__(self, decoder: SpeculativeDecoder, options: JobOptions) -> None:
        self._decoder, self._options = decoder, options
        self.fingerprint = fingerprint_of(decoder)
        self._kinds: dict[bool, LineKind] = {}
        self.digests = RequestDigest(options, decoder.config.acceptance if decoder.rule is None else decoder.rule.name)

    def asked(self, line: Line) -> Asked:
        """The request of a line."""
        openai = is_openai(line.item)
        if openai not in self._kinds:
            self._kinds[openai] = _module(line).line_kind(self._decoder, self._options, self.fingerprint)
        return self._kinds[openai].asked(line, self.digests.of(line))

    def refusal(self, line: Line, error: Exception) -> dict[str, Any]:
        """What the error file says of a line."""
        return refusal_of(line, self.digests.of(line), error)


def _module(line: Line) -> Any:
    """The module of a line's format."""
    try:
        return import_module(KINDS["openai" if is_openai(line.item) else "plain"])
    except ModuleNotFoundError as error:
        raise SlipstreamError(NEEDED.format(error.name)) from error


def refusal_of(line: Line, digest: str, error: Exception) -> dict[str, Any]:
    """What the error file says of a line, in the line's format."""
    if line.error or not is_openai(line.item):
        return {"line": line.number, "id": line.item.get("id"), "error": said(error)}
    refusal: dict[str, Any] = _module(line).refusal_line(line, digest, error)
    return {"line": line.number} | refusal


def seed_of(key: str) -> int:
    """The seed of a request that names none: it follows from the request's id alone."""
    return int.from_bytes(hashlib.sha256(f"seed of {key}".encode()).digest()[:8], "big") >> 1


def said(error: Exception) -> str:
    """What is told of an error: its one line, or what kind of failure it was."""
    return first_line(error) if isinstance(error, SlipstreamError) else f"{type(error).__name__}: {first_line(error)}"


def reason_of(refusal: Mapping[str, Any]) -> str:
    """Why a line was refused, as the error file has it."""
    told = refusal["error"]
    return str(told["message"] if isinstance(told, Mapping) else told)


def check_model(given: Any, name: str) -> None:
    """Refuse requests for another model than the loaded one."""
    if given not in (None, "", name):
        raise UsageError(f"model={given!r:.80}; allowed: {name!r}, which is loaded, or no model")
