"""The schemas of requests and answers, for validation and the OpenAPI document.

Fields are OpenAI's, vLLM's at the top level, and Slipstream's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    PrivateAttr,
    StrictBool,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

MAX_TOKENS = 1 << 24
MAX_BIASES = 1024
MAX_ROWS = 128  # texts of one request: prompts times n
FAIL_FAST = Field(fail_fast=True)
NOT_IN_RANGE = "not_in_range"  # type of the errors of `NumberRange`, whose messages say what is allowed
# fields of other servers that would change no answer: they are ignored, and the log does not name them
WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "priority",
        "prompt_cache_key",
        "prompt_cache_retention",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "stream_interval",
        "user",
        "verbosity",
    }
)
CONSTRAINT = "not a field here; the form of an answer is asked for with response_format or structured_outputs"
# what other systems call a constraint
FORMS = [
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
    "format",
    "json",
    "json_object",
    "json_mode",
    "schema",
    "choice",
    "constraint",
    "text_format",
    "response_schema",
    "responseSchema",
    "response_mime_type",
    "responseMimeType",
    "response_model",
    "output_config",
    "output_format",
    "output_schema",
    "guided_decoding",
    "guided_json_object",
    "guidance",
]
# objects in which other systems have fields of a request
CONTAINERS = [
    "extra_body",
    "sampling_params",
    "options",
    "parameters",
    "generation_config",
    "generationConfig",
    "nvext",
]
REFUSED = {
    **dict.fromkeys(FORMS, CONSTRAINT),
    **dict.fromkeys(CONTAINERS, "its fields belong at the top level of the request"),
    "use_beam_search": "beam search is not supported",
    "guided_decoding_backend": "there is one backend for constraints",
    "guided_whitespace_pattern": "JSON is written without whitespace",
    "documents": "documents are not supported; put them into a message",
    "chat_template": "templates from requests are not run; the model's own is used",
    "lora_request": "adapters are not supported",
    "kv_transfer_params": "transfer of KV caches is not supported",
    "prompt_embeds": "embeddings as prompts are not supported",
    "logits_processors": "code from requests is not run",
    "prompt_logprobs": "use echo with logprobs on /v1/completions",
    "guided_json": "the older form of structured_outputs is not supported; use structured_outputs.json",
    "guided_regex": "the older form of structured_outputs is not supported; use structured_outputs.regex",
    "guided_choice": "the older form of structured_outputs is not supported; use structured_outputs.choice",
    "guided_grammar": "the older form of structured_outputs is not supported; use structured_outputs.grammar",
    "logprob_token_ids": "log-probabilities of chosen token ids are not supported; use logprobs",
    "audio": "only text is supported",
    "functions": "the deprecated form of tools is not supported; use tools",
    "function_call": "the deprecated form of tool_choice is not supported; use tool_choice",
    "web_search_options": "web search is not supported",
}
# of these, ignored unless the server is strict
TOLERATED = frozenset({"guided_decoding_backend", "kv_transfer_params", "web_search_options"})
WHY: dict[int | str, str] = {
    400: "A field is wrong; `param` names it. Do not repeat the request.",
    401: "No valid API key.",
    403: "The host or the origin is not allowed.",
    404: "There is no such address or model.",
    408: "The request took longer than the server allows. Do not repeat it.",
    413: "The body is too large.",
    429: "Too many requests wait; `Retry-After` says when to try again.",
    503: "Loading, shutting down, or no place became free in time; `Retry-After` says when to try again.",
    "4XX": "Any other refusal.",
}


@dataclass(frozen=True)
class NumberRange:
    """The bounds of a number, which a refusal names together.

    Booleans are refused, and strings unless `from_text`; pydantic would accept both as numbers.
    """

    low: float | None = None
    high: float | None = None
    excludes_low: bool = False  # `low` itself is too low
    from_text: bool = False

    def __get_pydantic_core_schema__(self, source: type, handler: GetCoreSchemaHandler) -> CoreSchema:
        kind = "a whole number" if source is int else "a number"
        above = f"above {self.low}, up to" if self.excludes_low else f"from {self.low} to"
        allowed = kind if self.low is None else f"{kind} {above} {self.high}"

        def validated(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
            try:
                if not isinstance(value, bool if self.from_text else bool | str):
                    return validate(value)
            except ValidationError:
                pass
            raise PydanticCustomError(NOT_IN_RANGE, allowed)

        bounds = {"gt" if self.excludes_low else "ge": self.low, "le": self.high}
        schema: Any = {**handler(source), **{name: bound for name, bound in bounds.items() if bound is not None}}
        return core_schema.no_info_wrap_validator_function(validated, schema)


def _few_biases(value: Any) -> Any:
    """Refuse too many biases before each is validated."""
    if isinstance(value, dict) and len(value) > MAX_BIASES:
        raise PydanticCustomError("too_long", f"{len(value)} biases; allowed: at most {MAX_BIASES}")
    return value


TokenId = Annotated[int, Field(strict=True, ge=0, le=1 << 31)]
# lists are read up to their first mistake: a body of a few MiB holds a million, each of which would become an error
Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Text = Annotated[str, Field(min_length=1, max_length=256)]


class Fields(BaseModel):
    """Base of request schemas: unknown fields are kept apart in `model_extra`."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    REFUSED: ClassVar[Mapping[str, str]] = {}  # unsupported fields that would change the answer, with the reason
    TOLERATED: ClassVar[frozenset[str]] = frozenset()  # those of them that only a strict server refuses
    SILENT: ClassVar[frozenset[str]] = frozenset()  # fields without effect that the log need not name
    _ignored: dict[str, str] = PrivateAttr(default_factory=dict)

    def ignore(self, name: str, why: str) -> None:
        """Note that a field of this request has no effect."""
        self._ignored[name] = why

    @property
    def ignored(self) -> Mapping[str, str]:
        """The paths of fields without effect that reading the request has found, with the reasons."""
        return self._ignored

    @property
    def extra(self) -> dict[str, Any]:
        """Unknown fields that are not null."""
        return {name: value for name, value in (self.model_extra or {}).items() if value is not None}


def says_something(value: Any) -> bool:
    """True if a field's value asks for anything; clients send null, false and empty values for unused fields."""
    return value is not None and value is not False and value not in ([], {}, "")


def nested(fields: Fields, place: str = "") -> Iterator[tuple[str, Fields]]:
    """All objects in a request, itself included, each with the prefix of its fields' paths."""
    yield place, fields
    for name in type(fields).model_fields:
        value = getattr(fields, name)
        if isinstance(value, Fields):
            yield from nested(value, f"{place}{name}.")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                if not isinstance(item, Fields):
                    break  # all items of a list are of one kind
                yield from nested(item, f"{place}{name}.{index}.")


class StreamOptions(Fields):
    """Extra reports of a stream."""

    SILENT = frozenset({"include_obfuscation"})

    include_usage: StrictBool | None = None
    continuous_usage_stats: StrictBool | None = None


class SlipstreamOptions(Fields):
    """Slipstream's own: rounds and the origin of every token in every chunk, and a receipt at the end."""

    rounds: StrictBool | None = None


class ContentPart(Fields):
    """A part of a message."""

    SILENT = frozenset({"annotations", "cache_control"})

    type: str
    text: str | None = None
    image_url: Any = None  # an object with a url, or the url itself


Parts = Annotated[list[ContentPart], FAIL_FAST]


class PredictionFields(Fields):
    """A prediction of the answer, which is drafted first."""

    type: Literal["content"]
    content: str | Parts


class NamedSchema(Fields):
    """A schema in the form of `response_format`."""

    name: Any = None
    description: Any = None
    strict: Any = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class ResponseFormat(Fields):
    """The form of the answer."""

    REFUSED = {
        name: 'a schema is asked for with {"type": "json_schema", "json_schema": {"name": ..., "schema": {...}}}'
        for name in ("schema", "strict")
    }

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's constraints of the answer; a request may have one of them."""

    json_schema: Annotated[
        dict[str, Any] | str | None, Field(alias="json", description="A schema, or its JSON as a string.")
    ] = None
    json_object: Annotated[StrictBool | None, Field(description="Any JSON object.")] = None
    regex: Annotated[str | None, Field(description="In Rust's syntax, without look-around.")] = None
    choice: Annotated[list[str] | None, Field(fail_fast=True, description="The allowed outputs.")] = None
    grammar: Annotated[str | None, Field(description="In llguidance's variant of Lark.")] = None

    @property
    def sent(self) -> dict[str, Any]:
        """The constraints that are set, and unknown ones, by their names in the request."""
        values = {sent: getattr(self, name) for sent, name in STRUCTURED_OUTPUTS.items()} | self.extra
        return {name: value for name, value in values.items() if value is not None and value is not False}


# names in a request, and the attributes, which are named as those of `Constraint`
STRUCTURED_OUTPUTS = {field.alias or name: name for name, field in StructuredOutputs.model_fields.items()}


class SamplingFields(Fields):
    """The fields of both endpoints."""

    REFUSED = REFUSED
    TOLERATED = TOLERATED
    SILENT = WITHOUT_EFFECT

    model: Annotated[str, Field(max_length=1024)] | None = None
    n: Annotated[int, NumberRange(1, 16)] | None = None
    best_of: Annotated[int, NumberRange()] | None = None
    stream: StrictBool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, NumberRange(0, MAX_TOKENS)] | None = None
    temperature: Annotated[float, NumberRange(0, 100)] | None = None
    top_p: Annotated[float, NumberRange(0, 1, excludes_low=True)] | None = None
    top_k: Annotated[int, NumberRange(-1, MAX_TOKENS)] | None = None
    min_p: Annotated[float, NumberRange(0, 1)] | None = None
    presence_penalty: Annotated[float, NumberRange(-100, 100)] | None = None
    frequency_penalty: Annotated[float, NumberRange(-100, 100)] | None = None
    repetition_penalty: Annotated[float, NumberRange(0, 100, excludes_low=True)] | None = None
    logit_bias: (
        Annotated[
            dict[str, Annotated[float, NumberRange(-10_000, 10_000)]],
            BeforeValidator(_few_biases),
            Field(max_length=MAX_BIASES),
        ]
        | None
    ) = None
    stop: Text | Annotated[list[Text], Field(max_length=32, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=128, fail_fast=True)] | None = None
    bad_words: Annotated[list[Text], Field(max_length=128, fail_fast=True)] | None = None
    allowed_token_ids: Ids | None = None
    min_tokens: Annotated[int, NumberRange(0, MAX_TOKENS)] | None = None
    thinking_token_budget: Annotated[int, NumberRange(0, MAX_TOKENS)] | None = None
    ignore_eos: StrictBool | None = None
    seed: Annotated[int, NumberRange(-1, (1 << 63) - 1)] | None = None
    include_stop_str_in_output: Literal[False] | None = None
    skip_special_tokens: Literal[True] | None = None
    truncate_prompt_tokens: Annotated[int, NumberRange(1, MAX_TOKENS)] | None = None
    add_special_tokens: StrictBool | None = None
    return_token_ids: StrictBool | None = None
    return_tokens_as_token_ids: StrictBool | None = None
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    num_draft_tokens: Annotated[int, NumberRange(0, 64)] | None = None
    prediction: PredictionFields | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    slipstream: SlipstreamOptions | None = None


class CompletionFields(SamplingFields):
    """Body of `POST /v1/completions`: one prompt or several, as strings or token ids."""

    prompt: str | Annotated[list[str], FAIL_FAST] | Ids | Annotated[list[Ids], FAIL_FAST]
    echo: StrictBool | None = None
    logprobs: Annotated[int, NumberRange(0, 20)] | None = None
    suffix: str | None = None


class CalledFunction(Fields):
    """The function that a call names."""

    SILENT = frozenset({"index"})

    name: str
    arguments: Any = None  # JSON text, or an object


class CallFields(Fields):
    """A call that the assistant made."""

    SILENT = frozenset({"index"})

    id: Any = None
    type: Literal["function"] | None = None
    function: CalledFunction


class MessageFields(Fields):
    """A message of a conversation; further fields are shown to the model if its chat template reads them."""

    REFUSED = {
        "function_call": "the deprecated form of tool_calls is not supported; use tool_calls",
        "prefix": "a message is continued with continue_final_message",
        "partial": "a message is continued with continue_final_message",
        "refusal": "a refusal is shown to the model as content",
        "audio": "only text is supported",
        "images": "only text is supported",
    }
    TOLERATED = frozenset({"refusal"})
    SILENT = frozenset({"annotations", "id", "cache_control"})

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | Parts | None = None
    name: Annotated[str, Field(max_length=1024)] | None = None
    tool_calls: Annotated[list[CallFields], FAIL_FAST] | None = None
    tool_call_id: Annotated[str, Field(max_length=1024)] | None = None


Messages = Annotated[list[MessageFields], Field(min_length=1, max_length=4096, fail_fast=True)]


class ChosenFunction(Fields):
    """The function of a tool."""

    name: str


class ChosenTool(Fields):
    """A tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class AllowedTools(Fields):
    """The tools that may be called, of those that are offered."""

    mode: Literal["auto", "required"] = "auto"
    tools: Annotated[list[ChosenTool], FAIL_FAST]


class ToolChoice(Fields):
    """A tool that must be called, or the tools that may be."""

    type: Literal["function", "allowed_tools"]
    function: ChosenFunction | None = None
    allowed_tools: AllowedTools | None = None


class ConversationFields(Fields):
    """The inputs of a chat template other than messages."""

    tools: Annotated[list[dict[str, Any]], Field(max_length=1024, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    reasoning_effort: Annotated[str, Field(max_length=32)] | None = None
    reasoning: Annotated[Any, Field(description="OpenRouter's form of reasoning_effort.")] = None
    thinking: Annotated[Any, Field(description="DeepSeek's form of reasoning_effort.")] = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=32)] | None = None
    add_generation_prompt: StrictBool | None = None
    continue_final_message: StrictBool | None = None


class ChatFields(ConversationFields, SamplingFields):
    """Body of `POST /v1/chat/completions`: a conversation, whose next message is generated."""

    messages: Messages
    max_completion_tokens: Annotated[int, NumberRange(1, MAX_TOKENS)] | None = None
    logprobs: StrictBool | None = None
    top_logprobs: Annotated[int, NumberRange(0, 20)] | None = None
    modalities: Annotated[list[Literal["text"]], FAIL_FAST] | None = None
    parallel_tool_calls: StrictBool | None = None


class TokenizeFields(ConversationFields):
    """Body of `POST /tokenize`: a string, or messages that the chat template renders as in a chat request."""

    REFUSED = {name: REFUSED[name] for name in ("chat_template", "documents", "functions")} | {
        "return_token_strs": "strings of single tokens are not supported"
    }

    model: Annotated[str, Field(max_length=1024)] | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: StrictBool | None = None


class DetokenizeFields(Fields):
    """Body of `POST /detokenize`: the token ids to decode."""

    model: Annotated[str, Field(max_length=1024)] | None = None
    tokens: Annotated[list[TokenId], FAIL_FAST]


class Answer(BaseModel):
    """Base of the answers that the OpenAPI document describes; further fields are allowed.

    Models are OpenAI's objects, whose documentation describes them.
    """

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class ErrorFields(Answer):
    """The reason for a refusal."""

    message: str
    type: str
    param: str | None  # the field at fault
    code: str | None  # for programs


class ErrorBody(Answer):
    """A refusal or failure, in the shape of OpenAI's errors."""

    error: ErrorFields


class AnthropicError(Answer):
    """The reason for a refusal in Anthropic's API."""

    type: str
    message: str


class AnthropicErrorBody(Answer):
    """A refusal or failure, in the shape of Anthropic's errors."""

    type: Literal["error"]
    error: AnthropicError
    request_id: str | None


class OllamaErrorBody(Answer):
    """A refusal or failure, in the shape of Ollama's errors."""

    error: str


class Tokenized(Answer):
    """Answer of `POST /tokenize`: the ids, their number, and the model's maximum."""

    tokens: list[int]
    count: int
    max_model_len: int


class Detokenized(Answer):
    """Answer of `POST /detokenize`: the text of the ids."""

    prompt: str


class TokenizerInfo(Answer):
    """Answer of `GET /tokenizer_info`: special tokens and sizes."""

    eos_token: str | None
    eos_token_id: int | None
    bos_token: str | None
    vocab_size: int
    model_max_length: int
    has_chat_template: bool


class Status(Answer):
    """Answer of `GET /health` and `/live`."""

    status: Literal["loading", "ready", "stalled", "draining", "ended"]


class Version(Answer):
    """Answer of `GET /version`: the server's version of Slipstream."""

    version: str


class Usage(Answer):
    """The tokens of a request and its answers."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class AnswerHead(Answer):
    """The fields that whole answers and chunks of both endpoints share."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionChoice(Answer):
    """An output of a completion."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"] | None


class Completion(AnswerHead):
    """Answer of `POST /v1/completions`, not streamed: one choice for each prompt and each of its n outputs."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class Message(Answer):
    """The message of a chat choice."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] = []


class ChatChoice(Answer):
    """An answer of a chat completion."""

    index: int
    message: Message
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length", "tool_calls"]


class ChatCompletion(AnswerHead):
    """Answer of `POST /v1/chat/completions`, not streamed: n choices of a message each."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ReplayResult(Answer):
    """Answer of `POST /v1/slipstream/replay`."""

    identical: bool
    first_difference: int | None  # index of the first token that differs
    seconds: float


def refusals(model: type[Answer]) -> dict[int | str, dict[str, Any]]:
    """The refusals of an API, for the OpenAPI document. model: of their bodies."""
    return {status: {"model": model, "description": text} for status, text in WHY.items()}


def answers(model: type[Answer]) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint, for the OpenAPI document."""
    return {200: {"model": model}}


def streamed(model: type[Answer], chunk: str) -> dict[int | str, dict[str, Any]]:
    """The answer of an endpoint that streams on demand. chunk: type of the events."""
    text = f"With `stream: true` server-sent events: {chunk}s, then `[DONE]`; an error after the first is an event."
    return {200: {"model": model, "description": text, "content": {"text/event-stream": {}}}}
