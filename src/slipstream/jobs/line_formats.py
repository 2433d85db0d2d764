"""The formats of a job's lines: turns a line into rows, and finished rows into a line of the output.

Plain lines are {"id": ..., "prompt": ..., and any sampling options}; the answer is one flat object. Lines in OpenAI's
batch format are read by the server's code. It is imported by name at the first such line, because it needs the server's
packages.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Protocol

from slipstream.config import DecoderConfig
from slipstream.constraints.constraint import KINDS, Constraint
from slipstream.core.acceptance import Rule
from slipstream.core.kv_slots import Shapes
from slipstream.core.scheduler import Scheduler
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError, UsageError, first_line, with_class
from slipstream.jobs.job_lines import Line, is_openai
from slipstream.models.loaded import Loaded
from slipstream.sampling.params import SamplingParams
from slipstream.text.requests import Prompt, read_conversation, read_form
from slipstream.text.results import Result, logprobs_dict, result_of, with_parts
from slipstream.tokenization.tokenizer import PLAIN_CHAT, ChatForm, Tokenizer
from slipstream.wiring.model_pair import fingerprint_of

OPENAI_LINES = "slipstream.apps.server.openai_lines"
NO_OPTIONS = ("id", "prompt", "messages", "chat", "model")
FORMS = {*KINDS, "response_format", "structured_outputs"}  # names of structured output in flags and other formats
IN_A_LINE = '"constraint": {"json_schema": ...}, or another of its kinds: ' + ", ".join(KINDS[1:])


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options for all lines of a job."""

    params: SamplingParams = field(default_factory=SamplingParams)  # defaults for plain lines
    chat: bool = True  # string prompts go through the chat template, as in `generate`
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)  # default for plain lines
    model_name: str = ""  # name of the model in requests; by default the target's name
    token_ids: bool = False  # answers to plain lines include token ids

    def __post_init__(self) -> None:
        if not isinstance(self.params, SamplingParams):
            raise UsageError(f"params={self.params!r:.60}; allowed: SamplingParams")
        if self.params.seed is not None:
            raise UsageError(
                f"seed={self.params.seed} for all requests of a job; allowed: a seed per line, or none (each request "
                "then gets one from its id)"
            )
        read_form({"chat_template_kwargs": self.chat_template_kwargs})
        if self.params.logits_processors:
            raise UsageError("logits_processors in a job; allowed: none, as requests are data")


class JobRequest(Protocol):
    """A request of a job."""

    @property
    def line(self) -> Line: ...  # of the input
    @property
    def rows(self) -> Sequence[Row]: ...  # one per output; a prompt with n > 1 has n

    def answer(self) -> dict[str, Any]:
        """The line of the output, once all rows have ended; raises the error of a failed row."""


class Decoder(Protocol):
    """The part of `SpeculativeDecoder` that jobs use; jobs cannot import it, because it imports jobs."""

    config: DecoderConfig
    rule: Rule | None

    @property
    def target(self) -> Loaded: ...
    @property
    def shapes(self) -> Shapes: ...
    @property
    def tokenizer(self) -> Tokenizer | None: ...
    def sample_rows(
        self, prompts: Sequence[Prompt], params: Any = None, *, chat: bool = True, form: ChatForm = PLAIN_CHAT
    ) -> list[list[Row]]: ...
    def scheduler(self) -> Scheduler: ...


class RequestDigest:
    """Digests of requests, by which a job recognizes its answers. acceptance: name of the acceptance rule."""

    def __init__(self, options: JobOptions, acceptance: str) -> None:
        self._options = options
        plain = {"params": options.params.to_dict(), "chat": options.chat, "token_ids": options.token_ids}
        if options.chat_template_kwargs:
            plain["chat_template_kwargs"] = options.chat_template_kwargs
        self._common = json.dumps([acceptance, plain], sort_keys=True)

    def check(self, line: Line) -> None:
        """Refuse job options that a line in OpenAI's format would ignore."""
        if not is_openai(line.item):
            return
        if self._options.params.to_dict() != SamplingParams().to_dict() or self._options.chat_template_kwargs:
            raise UsageError(
                f"line {line.number} is in OpenAI's format, whose requests bring their own options; "
                "allowed: job options with plain lines only"
            )

    def digest(self, line: Line) -> str:
        """Equal for two requests with the same content under the same options."""
        request = json.dumps(dict(line.item), sort_keys=True)
        return hashlib.sha256(f"{self._common}\n{request}".encode("utf-8", "backslashreplace")).hexdigest()[:24]


class LineReader:
    """Reads lines of any format for one decoder."""

    def __init__(self, decoder: Decoder, options: JobOptions) -> None:
        self._decoder, self._options = decoder, options
        self.fingerprint = fingerprint_of(decoder.target, decoder.shapes)
        self.digests = RequestDigest(options, decoder.config.acceptance if decoder.rule is None else decoder.rule.name)

    def request_of(self, line: Line) -> JobRequest:
        reader = self._openai if is_openai(line.item) else self._plain
        request: JobRequest = reader.request_of(line, self.digests.digest(line))
        return request

    @cached_property
    def _plain(self) -> PlainLines:
        return PlainLines(self._decoder, self._options, self.fingerprint)

    @cached_property
    def _openai(self) -> Any:
        return import_module(OPENAI_LINES).OpenAILines(self._decoder, self._options)

    def refusal(self, line: Line, error: Exception) -> dict[str, Any]:
        """A refused line as a line of the error file."""
        return refusal_of(line, self.digests.digest(line), error)


def refusal_of(line: Line, digest: str, error: Exception) -> dict[str, Any]:
    """A refused line as a line of the error file, in its own format."""
    if line.error or not is_openai(line.item):
        why = first_line(error) if isinstance(error, SlipstreamError) else with_class(error)
        return {"line": line.number, "id": line.item.get("id"), "error": why}
    refusal: dict[str, Any] = import_module(OPENAI_LINES).refusal_line(line, digest, error)
    return {"line": line.number} | refusal


def seed_of(key: str) -> int:
    """The seed of a request that sets none, derived from the request's id alone."""
    return int.from_bytes(hashlib.sha256(f"seed of {key}".encode()).digest()[:8], "big") >> 1


def reason_of(refusal: Mapping[str, Any]) -> str:
    """The message of a line of the error file."""
    reason = refusal["error"]
    return str(reason["message"] if isinstance(reason, Mapping) else reason)


@dataclass
class PlainRequest:
    """The request of a plain line."""

    line: Line
    digest: str
    rows: list[Row]  # one per output, in order
    tools: Sequence[Mapping[str, Any]]
    reader: PlainLines = field(repr=False)

    def answer(self) -> dict[str, Any]:
        """The first output with its details; the others as "alternatives"."""
        failed = next((row.error for row in self.rows if row.error is not None), None)
        if failed is not None:
            raise failed
        tokenizer = self.reader.tokenizer
        results = [with_parts(result_of(row, tokenizer, lossless=True), tokenizer, self.tools) for row in self.rows]
        first, others = self._text(results[0]), [self._text(result) for result in results[1:]]
        return (
            {"id": self.line.id}
            | first
            | {"prompt_tokens": len(results[0].prompt_token_ids)}
            | ({"alternatives": others} if others else {})
            | {"fingerprint": self.reader.fingerprint, "request": self.digest}
        )

    def _text(self, result: Result) -> dict[str, Any]:
        answer: dict[str, Any] = {"text": result.text, "finish_reason": result.finish_reason, "seed": result.seed}
        answer["output_tokens"] = len(result.token_ids)
        if self.reader.options.token_ids:
            answer["token_ids"] = result.token_ids
        if result.logprobs is not None:
            answer["logprobs"] = [logprobs_dict(entry) for entry in result.logprobs]
        if result.reasoning:
            answer |= {"reasoning": result.reasoning, "content": result.content}
        if self.tools:
            answer["tool_calls"] = [call.to_dict() for call in result.tool_calls]
        return answer


class PlainLines:
    """Reads plain lines for one decoder."""

    def __init__(self, decoder: Decoder, options: JobOptions, fingerprint: str) -> None:
        self._decoder, self.options, self.fingerprint = decoder, options, fingerprint
        self.tokenizer: Tokenizer | None = copy.deepcopy(decoder.tokenizer)  # threads cannot share one
        self._model_name = options.model_name or decoder.target.name

    def request_of(self, line: Line, digest: str) -> PlainRequest:
        """The rows of a line; UsageError if it is not allowed."""
        item = line.item
        if ("prompt" in item) == ("messages" in item):
            what = "prompt and messages are both given" if "prompt" in item else "no prompt"
            raise UsageError(f"{what}; allowed: a string, token ids or a list of chat messages, as prompt or messages")
        prompt = item["prompt"] if "prompt" in item else read_conversation(item["messages"]).items[0]
        if (model := item.get("model")) not in (None, "", self._model_name):
            raise UsageError(f"model={model!r:.80}; allowed: the loaded {self._model_name!r}, or no model")
        chat = item.get("chat", self.options.chat)
        if not isinstance(chat, bool):
            raise UsageError(f"chat={chat!r:.80}; allowed: true, false")
        options = {"chat_template_kwargs": self.options.chat_template_kwargs}
        options |= {name: value for name, value in item.items() if name not in NO_OPTIONS}
        form = read_form(options)
        params = self._params(options, str(line.id))
        rows = self._decoder.sample_rows([prompt], params, chat=chat, form=form)[0]
        return PlainRequest(line, digest, rows, form.tools, self)

    def _params(self, options: dict[str, Any], key: str) -> SamplingParams:
        if "logits_processors" in options:
            raise UsageError("logits_processors in a line; allowed: other options, as code is not read from files")
        if named := next((name for name in options if name in FORMS), None):
            raise UsageError(f"unknown option {named!r}; allowed: {IN_A_LINE}")
        if isinstance(options.get("constraint"), dict):
            try:
                options["constraint"] = Constraint(**options["constraint"])
            except TypeError:
                kinds = ", ".join(KINDS)
                raise UsageError(f"constraint={options['constraint']!r:.80}; allowed: one of {kinds}") from None
        if isinstance(options.get("logit_bias"), dict):
            options["logit_bias"] = {_token_id(name): bias for name, bias in options["logit_bias"].items()}
        params = replace(self.options.params, **options)  # raises for what is unknown or not allowed
        return params if params.seed is not None else replace(params, seed=seed_of(key))


def _token_id(name: object) -> int:
    """A key of logit_bias: a string in JSON, an int in a dictionary."""
    if isinstance(name, int) and not isinstance(name, bool):
        return name
    if isinstance(name, str) and name.isascii() and name.isdigit() and len(name) < 12:
        return int(name)
    raise UsageError(f"logit_bias: {name!r:.40}; allowed: token ids")
