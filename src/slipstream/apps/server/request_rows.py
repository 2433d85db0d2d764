"""Turns a request into its rows and the writer of its answer; knows neither HTTP nor the engine.

Lengths, seeds and options are checked before anything is queued. If the request demands a form of its answer (JSON, a
grammar, calls of its tools), the rows get a constraint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.answers import AnswerWriter, ChatWriter, CompletionWriter
from slipstream.apps.server.conversation import TemplateTraits
from slipstream.apps.server.engine_thread import SPARE_SLOTS
from slipstream.apps.server.error_objects import ApiError, misspelled, refused
from slipstream.apps.server.live_request import Job, LiveRequest
from slipstream.apps.server.request_reading import (
    Reading,
    Rendered,
    check_tools_read,
    checked_tools,
    forced_tools,
    is_call_forced,
    predicted_text,
    quotable_texts,
    rendered_chat,
    rendered_prompts,
    sampling_params,
    thought_budget,
    wanted_logprobs,
)
from slipstream.apps.server.schemas import (
    MAX_TOKENS,
    STRUCTURED_OUTPUTS,
    ChatFields,
    CompletionFields,
    SamplingFields,
    StructuredOutputs,
)
from slipstream.apps.server.server_settings import USUAL_WINDOW, Limits, ServerSettings
from slipstream.constraints.answer_grammar import Literals, arguments_schema, call_grammar
from slipstream.constraints.compiled_grammars import CompiledGrammars
from slipstream.constraints.constraint import Constraint
from slipstream.constraints.grammar_trial import is_small
from slipstream.decoder import SpeculativeDecoder
from slipstream.errors import UsageError, did_you_mean, first_line
from slipstream.models.cpu.processor import memory_bytes
from slipstream.models.model_size import cached_bytes
from slipstream.text.answer_reader import thought_preamble
from slipstream.text.detokenizer import read_as_committed
from slipstream.text.requests import RequestReader, check_size, further_seeds, texts_shown
from slipstream.tokenization.tokenizer import AnswerTokenizer, Tokenizer

MakeWriter = Callable[[LiveRequest, Any, ModelFacts], AnswerWriter]
MAX_BYTES = 64 << 10  # of a schema, an expression or a grammar
MAX_BYTES_OF_TOOLS = 256 << 10  # of all schemas of tools that a grammar is made of
LIMITING = ("allowed_token_ids", "bad_words", "min_tokens", "logit_bias")  # these and a constraint may leave no token
UNMEASURED_WINDOW = 32768  # tokens, for models whose KV cache has an unknown size
COMPLETION_TOKENS = 16  # OpenAI's default of the completions endpoint
TEMPERATURE = 1.0  # OpenAI's default, for models that bring no options of sampling


@contextmanager
def errors_named(field: str) -> Iterator[None]:
    """Name the request's field in refusals of constraints."""
    try:
        yield
    except UsageError as error:
        line = first_line(error)
        if not line.startswith("constraint:"):
            raise
        raise refused(f"{field}:{line.removeprefix('constraint:')}", field) from None


def form_field(fields: SamplingFields) -> str | None:
    """The field that constrains the answer; None if none does, ApiError if several do."""
    names = []
    form = fields.response_format
    if form is not None and form.json_schema is not None and form.type != "json_schema":
        name = "response_format.json_schema"
        raise refused(f"{name} with type {form.type!r}; allowed: with type 'json_schema'", name)
    if fields.structured_outputs is not None and fields.structured_outputs.model_fields_set:
        names.append("structured_outputs")
    if form is not None and form.type != "text":
        names.append("response_format")
    if isinstance(fields, ChatFields) and is_call_forced(fields):
        names.append("tool_choice")
    if len(names) > 1:
        raise refused(f"{names[0]} with {names[1]}; allowed: one of them", names[0])
    return names[0] if names else None


def compiles_slowly(fields: SamplingFields) -> bool:
    """True if a request's constraint may take seconds to compile. ApiError if several fields set one."""
    if form_field(fields) is None:
        return False
    has_tools = isinstance(fields, ChatFields) and fields.tools and fields.tool_choice != "none"
    outputs = fields.structured_outputs or StructuredOutputs()
    constraints = [(STRUCTURED_OUTPUTS.get(name, "grammar"), value) for name, value in outputs.sent.items()]
    if fields.response_format is not None and (named := fields.response_format.json_schema) is not None:
        constraints.append(("json_schema", named.json_schema))
    texts = [(kind, value if isinstance(value, str) else json.dumps(value)) for kind, value in constraints]
    return bool(has_tools) or not all(is_small(kind, text) for kind, text in texts)


def answer_constraint(
    fields: SamplingFields, tokenizer: Tokenizer | None, prompt: Sequence[int] = (), *, strict: bool
) -> Constraint | None:
    """The constraint of a request's rows; ApiError names a field that cannot be honored."""
    tools = checked_tools(fields, strict=strict) if isinstance(fields, ChatFields) else []
    field = form_field(fields)
    if field is None:
        return None
    offered = [] if isinstance(fields, ChatFields) and fields.tool_choice == "none" else tools
    calls_preamble = _preamble(fields, tokenizer, prompt, with_text=False)
    with errors_named(field):
        if field == "structured_outputs":
            if offered:
                raise refused("structured_outputs with tools; allowed: with tool_choice 'none'", field)
            return _vllm(
                fields.structured_outputs or StructuredOutputs(), _preamble(fields, tokenizer, prompt, with_text=True)
            )
        if field == "tool_choice":
            assert isinstance(fields, ChatFields)
            if strict:
                check_tools_read(tokenizer)
            return _calls(forced_tools(fields, tools), fields, tokenizer, calls_preamble)
        schema = _response_schema(fields)
        if offered and isinstance(tokenizer, AnswerTokenizer) and tokenizer.call_text() is not None:
            assert isinstance(fields, ChatFields)
            return _calls(offered, fields, tokenizer, calls_preamble, answer=schema)
        return Constraint(json_schema=schema, preamble=_preamble(fields, tokenizer, prompt, with_text=True))


def _response_schema(fields: SamplingFields) -> dict[str, Any]:
    form = fields.response_format
    assert form is not None
    if form.type == "json_object":
        return {"type": "object"}
    named = form.json_schema
    if named is None or named.json_schema is None:
        name = "response_format.json_schema"
        near = "" if named is None else misspelled("schema", named.extra)
        raise refused(
            f'{name}.schema is missing; allowed: {{"json_schema": {{"name": ..., "schema": {{...}}}}}}{near}', name
        )
    _bounded("response_format", named.json_schema)
    return named.json_schema


def _vllm(outputs: StructuredOutputs, preamble: str) -> Constraint:
    chosen = outputs.sent
    if len(chosen) != 1 or not set(chosen) <= set(STRUCTURED_OUTPUTS):
        names = ", ".join(sorted(chosen)) or "nothing"
        near = did_you_mean(names, *STRUCTURED_OUTPUTS)
        raise refused(
            f"structured_outputs: {names:.80}; allowed: one of {', '.join(STRUCTURED_OUTPUTS)}{near}",
            "structured_outputs",
        )
    ((name, value),) = chosen.items()
    _bounded("structured_outputs", value)
    return Constraint(**{STRUCTURED_OUTPUTS[name]: value}, preamble=preamble)


def _calls(
    tools: Sequence[Mapping[str, Any]],
    fields: ChatFields,
    tokenizer: Tokenizer | None,
    preamble: str,
    answer: Mapping[str, Any] | None = None,
) -> Constraint:
    """A constraint to calls in the model's own form, or to JSON of the schema `answer` if there is one."""
    text = tokenizer.call_text() if isinstance(tokenizer, AnswerTokenizer) else None
    if text is None or not isinstance(tokenizer, AnswerTokenizer):
        raise refused("tool_choice: this model's form of calls is not known; allowed: 'none', 'auto'", "tool_choice")
    form, tokens, several = tokenizer.answer_form(), tokenizer.special_tokens(), fields.parallel_tool_calls is not False
    rules, schemas = call_grammar(form.calls, text, tools, tokens, several=several)
    _bounded("tools", schemas, MAX_BYTES_OF_TOOLS)
    start = "calls"
    if answer is not None:
        start += f" | {Literals(tokens).of(form.thought.text if form.thought else '')} @answer"
        schemas |= {"answer": answer}
    grammar = "\n".join([f"start: {start}", *rules])
    spacing = "spaced" if schemas else "compact"  # texts between tags are no JSON
    try:
        return Constraint(grammar=grammar, schemas=schemas, whitespace=spacing, preamble=preamble)
    except UsageError:
        for index, tool in enumerate(tools):
            with errors_named(f"tools.{index}.function.parameters"):
                Constraint(json_schema=arguments_schema(tool["function"]))
        raise


def _preamble(fields: SamplingFields, tokenizer: Tokenizer | None, prompt: Sequence[int], *, with_text: bool) -> str:
    """The part of a grammar for the thought before a chat's answer; empty for models that write none."""
    if not (isinstance(fields, ChatFields) and isinstance(tokenizer, AnswerTokenizer) and tokenizer.has_chat_template):
        return ""
    return thought_preamble(tokenizer, prompt, with_text=with_text)


def _bounded(field: str, value: Any, max_bytes: int = MAX_BYTES) -> None:
    """Refuse schemas and grammars that are too large."""
    try:
        size = len(value) if isinstance(value, str) else len(json.dumps(value))
    except (TypeError, ValueError, RecursionError):
        raise ApiError(400, f"{field}: not JSON", param=field) from None
    if size > max_bytes:
        raise refused(f"{field} has {size} bytes; allowed: at most {max_bytes}", field)


def window_of(decoder: SpeculativeDecoder, max_model_len: int | None) -> int:
    """The most tokens of a prompt and its answer; `max_model_len` is that of the settings.

    By default as much of the model's context as memory allows if all texts of a full batch are so long.
    """
    context = decoder.target.backend.max_length
    if max_model_len is not None:
        return min(context, max_model_len or context)
    models = [loaded.model for loaded in (decoder.target, decoder.draft) if loaded is not None]
    sizes = [None if model is None else cached_bytes(model.config.get_text_config()) for model in models]
    device = decoder.target.backend.device
    memory = torch.cuda.mem_get_info(device)[0] // 2 if device.type == "cuda" else (memory_bytes() or 0) // 4
    if not memory or None in sizes:
        return min(context, UNMEASURED_WINDOW)
    slots = decoder.config.max_batch_size + SPARE_SLOTS
    fitting = memory // (slots * sum(size or 0 for size in sizes))
    return min(context, max(fitting // 256 * 256, USUAL_WINDOW))


@dataclass(frozen=True)
class RowMaker:
    """Makes rows for one decoder under the server's limits."""

    decoder: SpeculativeDecoder
    limits: Limits
    reading: Reading
    grammars: CompiledGrammars
    greedy: bool = False  # whether options that a request leaves out are greedy's rather than the model's own

    @classmethod
    def for_decoder(cls, decoder: SpeculativeDecoder, settings: ServerSettings) -> RowMaker:
        """A maker with its own grammars and tokenizer, since requests are read while the engine runs."""
        target = replace(decoder.target, tokenizer=deepcopy(decoder.tokenizer))
        limits = settings.limits(window_of(decoder, settings.max_model_len))
        template = TemplateTraits() if settings.strict else TemplateTraits.of(target.tokenizer)
        reading = Reading(settings.strict, settings.no_special_tokens_in_prompts, template, target.vision)
        grammars = CompiledGrammars(target, target.backend.vocab_size)
        return cls(decoder, limits, reading, grammars, settings.greedy)

    def _too_long(self, message: str, param: str, prompt_tokens: int) -> ApiError:
        """The refusal of a request that exceeds the context; names the server option that would allow it, if any.

        prompt_tokens: the length of a prompt that is too long by itself, else 0.
        """
        window, context = self.limits.window, self.decoder.target.backend.max_length
        return ApiError(
            400,
            message,
            param=param,
            code="context_length_exceeded",
            prompt_tokens=prompt_tokens,
            window=window,
            remedy=f"; the server's option --max-model-len allows up to {context}" * (context > window),
        )

    def check_sizes(self, fields: ChatFields | CompletionFields, tokenizer: Tokenizer | None) -> None:
        """Refuse prompts that are too long whatever their tokens are, before they are tokenized."""
        if tokenizer is None:
            return
        texts = [("prediction", [predicted_text(fields) or ""])]
        if fields.truncate_prompt_tokens is None:
            if isinstance(fields, ChatFields):
                texts.append(("messages", texts_shown([message.model_dump() for message in fields.messages])))
            else:
                prompts = [fields.prompt] if isinstance(fields.prompt, str) else fields.prompt
                texts += [("prompt", [prompt, fields.suffix or ""]) for prompt in prompts if isinstance(prompt, str)]
        for name, parts in texts:
            try:
                check_size(name, parts, tokenizer, self.limits.window)
            except UsageError as error:
                longest = max(map(len, tokenizer.vocabulary()), default=1)
                fewest_tokens = sum(map(len, parts)) // longest
                raise self._too_long(first_line(error), name, fewest_tokens) from None

    def jobs(
        self, live: LiveRequest, fields: SamplingFields, prompts: Sequence[Rendered], tokenizer: Tokenizer | None
    ) -> list[Job]:
        """One job per prompt and choice, in the order of choices. UsageError or ApiError if one is not allowed.

        tokenizer: of the calling thread; the decoder's own belongs to the engine, which decodes with it.
        """
        jobs: list[Job] = []
        for number, prompt in enumerate(prompts):
            size = self.decoder.target.backend.vocab_size
            if bad := [token for token in prompt.ids if not 0 <= token < size]:
                raise refused(f"prompt {number}: token id {bad[0]}; allowed: 0 to {size - 1}", "prompt")
            for job in self._of_prompt(live, fields, prompt, tokenizer):
                job.choice = len(jobs)
                jobs.append(job)
        return jobs

    def _of_prompt(
        self, live: LiveRequest, fields: SamplingFields, prompt: Rendered, tokenizer: Tokenizer | None
    ) -> list[Job]:
        max_tokens = self._max_tokens(fields, len(prompt.ids))
        target, no_predictions = self.decoder.target, self.decoder.reader.no_predictions
        strict = self.reading.strict
        constraint = answer_constraint(fields, tokenizer, prompt.ids, strict=strict)
        params = sampling_params(fields, max_tokens, target.backend.vocab_size, constraint, strict=strict)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *prompt.ends))
        if not self.greedy:
            params = self.decoder.reader.own_options(params)
            if "temperature" in params.unset:
                params = replace(params, temperature=TEMPERATURE)
        params = replace(params.explicit, thinking_token_budget=thought_budget(fields, tokenizer, strict=strict))
        params = RequestReader(replace(target, tokenizer=tokenizer), no_predictions).with_token_ids(params)
        if params.prediction is not None and len(params.prediction) > self.limits.window:
            raise refused(
                f"prediction has {len(params.prediction)} tokens; allowed: at most {self.limits.window}", "prediction"
            )
        reader = RequestReader(target, no_predictions, self.grammars)  # prompts are ids by now, so it encodes nothing
        with errors_named(form_field(fields) or "constraint"):
            rows = [reader.rows([prompt.ids], params)[0] for _ in range(fields.n or 1)]
        for row, seed in zip(rows[1:], further_seeds(rows[0].seed, fields.n or 1), strict=True):
            row.seed = seed
        echo = wanted_logprobs(fields) if isinstance(fields, CompletionFields) and fields.echo else None
        quotable = quotable_texts(fields, tokenizer)
        for row in rows:
            row.messages, row.images, row.group = prompt.messages, prompt.images, live.group
            row.quotable = quotable
            if fields.stream:
                read_as_committed(row, target.tokenizer)
        limits = next((name for name in LIMITING if getattr(fields, name)), form_field(fields))
        return [Job(live, 0, row, echo, generate=max_tokens > 0, limits=limits) for row in rows]

    def _max_tokens(self, fields: SamplingFields, prompt_length: int) -> int:
        """The most tokens that the answer may have; 0 for a prompt that is only scored."""
        if not prompt_length:
            raise refused("the prompt is empty; allowed: at least one token", "prompt")
        max_tokens, name = fields.max_tokens, "max_tokens"
        if isinstance(fields, ChatFields):
            if fields.max_completion_tokens is not None:
                max_tokens, name = fields.max_completion_tokens, "max_completion_tokens"
            default = self.limits.default_max_tokens
        else:
            default = COMPLETION_TOKENS
        echoed = isinstance(fields, CompletionFields) and fields.echo
        if max_tokens == 0 and not echoed:
            more = ", or 0 with echo=true" if isinstance(fields, CompletionFields) else ""
            raise refused(f"{name}=0; allowed: at least 1{more}", name)
        room = self.limits.window - prompt_length
        needed = 1 if max_tokens is None else max_tokens
        is_open = max_tokens == MAX_TOKENS  # as Ollama's clients ask for answers without a limit
        if needed > room >= 1 and (is_open or not self.reading.strict):
            return room
        if needed > room:
            if room > 0:
                excess = f"{prompt_length} of the prompt and {name}={needed} exceed it"
            else:
                name = "prompt" if isinstance(fields, CompletionFields) else "messages"
                excess = f"the prompt alone has {prompt_length}" + ", and its answer at least one" * (not room)
            message = f"This model's maximum context length is {self.limits.window} tokens; {excess}"
            raise self._too_long(message, name, 0 if room > 0 else prompt_length)
        return min(default, room) if max_tokens is None else max_tokens


def check_model(names: Sequence[str], model: str | None) -> None:
    """Refuse requests for a model that is served under none of these names."""
    if model not in (None, "", *names):
        near = did_you_mean(model or "", *names)
        allowed = ", ".join(map(repr, names))
        raise ApiError(
            404,
            f"model {model!r:.200} is not served here; allowed: {allowed}{near}",
            param="model",
            code="model_not_found",
        )


def writer_of(
    rows: RowMaker,
    facts: ModelFacts,
    live: LiveRequest,
    fields: ChatFields | CompletionFields,
    tokenizer: Tokenizer | None,
    make_writer: MakeWriter | None = None,
) -> AnswerWriter:
    """Render the prompts and make the rows of a request.

    tokenizer: of the calling thread. make_writer: of another API's answers; by default OpenAI's.
    """
    rows.check_sizes(fields, tokenizer)
    if isinstance(fields, ChatFields):
        live.jobs = rows.jobs(live, fields, [rendered_chat(fields, tokenizer, rows.reading)], tokenizer)
        return (make_writer or ChatWriter)(live, fields, facts)
    prompts = rendered_prompts(fields, tokenizer, plain_texts=rows.reading.plain_texts)
    live.jobs = rows.jobs(live, fields, prompts, tokenizer)
    if make_writer is not None:
        return make_writer(live, fields, facts)
    writer = CompletionWriter(live, fields, facts)
    if fields.echo:
        texts = [p.text if p.text is not None or tokenizer is None else tokenizer.decode(p.ids) for p in prompts]
        writer.prompts = [text or "" for text in texts for _ in range(fields.n or 1)]
    return writer
