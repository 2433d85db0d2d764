"""What answers look like, for the OpenAPI document: OpenAI's objects, and errors. Answers may have further fields."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """Base of all; names of metrics and the like are added freely."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorFields(Answer):
    """Why a request was refused. param: the field at fault; code: for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """OpenAI's error object."""

    error: ErrorFields


class ModelCard(Answer):
    """The model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    system_fingerprint: str


class ModelList(Answer):
    """`GET /v1/models`."""

    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    """`POST /tokenize`."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Answer):
    """`POST /detokenize`."""

    prompt: str


class TokenizerInfo(Answer):
    """`GET /tokenizer_info`."""

    eos_token: str | None
    eos_token_id: int | None
    bos_token: str | None
    vocab_size: int
    model_max_length: int
    has_chat_template: bool


class Status(Answer):
    """`GET /health` and `/live`."""

    status: Literal["loading", "ready", "stalled", "draining", "ended"]


class Version(Answer):
    """`GET /version`."""

    version: str


class Usage(Answer):
    """Counted tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerHead(Answer):
    """What whole answers and chunks of both endpoints share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(Answer):
    """One text."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class Completion(AnswerHead):
    """`POST /v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class Message(Answer):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(Answer):
    """One answer."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(AnswerHead):
    """`POST /v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ReplayResult(Answer):
    """`POST /v1/slipstream/replay`. first_difference: the token where the texts part."""

    identical: bool
    first_difference: int | None
    seconds: float


class FileObject(Answer):
    """A file of requests or answers."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    filename: str
    purpose: str


class FileDeleted(Answer):
    """`DELETE /v1/files/{file_id}`."""

    id: str
    object: Literal["file"]
    deleted: bool


class BatchObject(Answer):
    """A batch and how far it is."""

    id: str
    object: Literal["batch"]
    endpoint: str
    input_file_id: str
    output_file_id: str | None
    error_file_id: str | None
    status: str
    created_at: int
    request_counts: dict[str, int]


class Page(Answer):
    """A part of a list."""

    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class FileList(Page):
    """`GET /v1/files`."""

    data: list[FileObject]


class BatchList(Page):
    """`GET /v1/batches`."""

    data: list[BatchObject]


WHY: dict[int | str, str] = {
    400: "A field is wrong; `param` names it. Not to be repeated.",
    401: "No valid API key.",
    403: "The host or the origin is not allowed.",
    404: "There is no such address or model.",
    408: "The request took longer than the server allows. Not to be repeated.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to come again.",
    503: "Loading, shutting down, or no place became free in time; `Retry-After` says when to come again.",
    "4XX": "Any other refusal.",
}
REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": text} for status, text in WHY.items()
}


def answers(model: type[Answer]) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint."""
    return {200: {"model": model}}


def streamed(model: type[Answer], chunk: str) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint that streams on demand. chunk: what the events are."""
    text = f"With `stream: true` server-sent events: {chunk}s, then `[DONE]`; an error after the first is an event."
    return {200: {"model": model, "description": text, "content": {"text/event-stream": {}}}}
