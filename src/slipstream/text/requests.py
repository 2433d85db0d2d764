"""Turns a user's prompts and options into rows: all kinds of prompts become token ids, a mistake an error of one line.

Prompts are texts, lists of token ids or lists of chat messages. Ids also come as PyTorch tensors, numpy arrays and what
Hugging Face tokenizers return (a mapping with `input_ids` and `attention_mask`); transformers is not imported for that.
This module knows no model.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypedDict

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.checks import counted
from slipstream.constraints.compiled_grammars import CompiledGrammars, constraint_of
from slipstream.constraints.thought_budget import ThoughtBudget
from slipstream.core.rng import key
from slipstream.core.types import PromptImages, Row
from slipstream.errors import UsageError, first_line
from slipstream.sampling.params import DEFAULT_MAX_TOKENS, SamplingOptions, SamplingParams
from slipstream.text.answer_reader import begins_in_thought, ends_thought, thought_preamble
from slipstream.text.detokenizer import read_as_committed
from slipstream.text.pictures import KINDS, Vision, parts_of, with_pictures
from slipstream.tokenization.byte_vocabulary import RunningModel
from slipstream.tokenization.infill import infill
from slipstream.tokenization.tokenizer import (
    PLAIN_CHAT,
    AnswerTokenizer,
    ChatForm,
    Tokenizer,
    TokenizerDetails,
    check_text,
)

ALLOWED = "a text, a list of token ids or a list of chat messages"
MEDIA = ("pixel", "image", "video", "audio", "input_features", "input_values")  # in names of what processors return
USUAL_TOKEN_LENGTH = 8  # characters; the longest token is looked for only if a text has more per token
SHAPES = "(n,) or (1, n) for one prompt, (batch, n) for several"


@dataclass(frozen=True)
class Prompts:
    """The prompts of a call."""

    items: list[Any]
    single: bool  # one prompt, whose answer is one `Result`, rather than a list of them


def read_prompts(prompt: Any) -> Prompts:
    """The prompts a caller gave: one of any form, or a list of them. UsageError for arrays of other shapes.

    Arrays [n] and [1, n] are one prompt. Arrays [B, n] are B prompts, from which `attention_mask` (of a tokenizer's
    mapping) drops the padding. An empty list is no prompts. Anything else is returned as one prompt, for its reader to
    refuse.
    """
    if isinstance(prompt, Mapping) and "input_ids" in prompt:
        for name in prompt:
            if any(kind in name for kind in MEDIA) and prompt[name] is not None:
                raise UsageError(f"prompt has {name!r}; allowed: text only, as input_ids and attention_mask")
        return _from_tokenizer(prompt)
    if isinstance(prompt, Tensor | np.ndarray):
        return _from_array(prompt)
    if isinstance(prompt, str) or not isinstance(prompt, list | tuple):
        return Prompts([prompt], True)
    if not prompt:
        return Prompts([], False)
    if is_chat(prompt):
        _check_messages(prompt)
    if is_ids(prompt) or is_chat(prompt) or isinstance(prompt[0], int):
        return Prompts([_python_ids(prompt)], True)
    return Prompts([_item(i, item) for i, item in enumerate(prompt)], False)


def read_conversation(messages: Any) -> Prompts:
    """One conversation, as a list of chat messages that `chat` was given. UsageError for anything else."""
    if isinstance(messages, list | tuple) and messages:
        if is_chat(messages):
            _check_messages(messages)
            return Prompts([list(messages)], True)
        if all(map(is_chat, messages)):
            raise UsageError("messages is a list of conversations; allowed: chat takes one, generate takes a list")
    example = "{'role': 'user', 'content': 'Hello'}"
    raise UsageError(f"messages={messages!r:.60}; allowed: a list of chat messages, such as [{example}]")


class FormOptions(TypedDict, total=False):
    """Inputs of the chat template besides messages, as keywords, for type checkers."""

    tools: Sequence[Mapping[str, Any]]
    chat_template_kwargs: Mapping[str, Any]
    continue_final_message: bool


class RequestOptions(SamplingOptions, FormOptions, total=False):
    """The keywords of `generate`, for type checkers."""


def read_form(options: Any) -> ChatForm:
    """Inputs of the chat template besides messages; removes them from the options of a call or a line."""
    variables, goes_on = options.pop("chat_template_kwargs", None), options.pop("continue_final_message", False)
    if not isinstance(variables, Mapping | None) or not all(isinstance(name, str) for name in variables or ()):
        example = "{'enable_thinking': False}"
        raise UsageError(f"chat_template_kwargs={variables!r:.60}; allowed: a dictionary, such as {example}")
    if not isinstance(goes_on, bool):
        raise UsageError(f"continue_final_message={goes_on!r:.60}; allowed: True or False")
    return ChatForm(_checked_tools(options.pop("tools", None)), not goes_on, goes_on, variables=dict(variables or {}))


def _checked_tools(tools: Any) -> Sequence[Mapping[str, Any]]:
    """The tools of a call. UsageError for the first that is not a JSON schema of a function."""
    allowed = "allowed: {'type': 'function', 'function': {'name': ..., 'parameters': ...}}"
    if not isinstance(tools, list | tuple):
        if tools is None:
            return ()
        raise UsageError(f"tools={tools!r:.60}; allowed: a list of JSON schemas of functions")
    for number, tool in enumerate(tools):
        if callable(tool):
            raise UsageError(f"tool {number} is code; {allowed}, which transformers.utils.get_json_schema makes of it")
        function = tool.get("function") if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise UsageError(f"tool {number} is {tool!r:.60}; {allowed}")
    return tuple(tools)


def read_ids(token_ids: Any, vocab_size: int) -> list[int]:
    """One sequence of token ids, given in any form. UsageError for anything else, and for ids that do not exist."""
    if isinstance(token_ids, list | tuple) and not token_ids:
        return []
    prompts = None if isinstance(token_ids, str) else read_prompts(token_ids)
    if prompts is None or not prompts.single or not is_ids(prompts.items[0]):
        raise UsageError(f"token_ids={token_ids!r:.60}; allowed: a list of token ids, or an array of them")
    ids: list[int] = prompts.items[0]
    if bad := [token for token in ids if not 0 <= token < vocab_size]:
        raise UsageError(f"token id {bad[0]}; allowed: 0 to {vocab_size - 1}")
    return ids


def is_ids(prompt: Any) -> bool:
    """True for a list of whole numbers, Python's or numpy's."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(token, int | np.integer) and not isinstance(token, bool) for token in prompt)


def is_chat(prompt: Any) -> bool:
    """True for a list that is meant as chat messages."""
    if not isinstance(prompt, list | tuple):
        return False
    return any(isinstance(message, Mapping) and ("role" in message or "content" in message) for message in prompt)


def _check_messages(messages: Sequence[Any]) -> None:
    """Refuse what is not a chat message, and videos or sounds, as models read only texts and images here."""
    for number, message in enumerate(messages):
        what = f"message {number}"
        if not isinstance(message, Mapping):
            raise UsageError(f"{what} is a {type(message).__name__}; allowed: a dictionary with role and content")
        if not isinstance(message.get("role"), str):
            raise UsageError(f"{what} has the role {message.get('role')!r:.40}; allowed: a name, such as 'user'")
        if message.keys() == {"role"}:  # a message that calls tools has no content
            raise UsageError(f"{what} has nothing but a role; allowed: with content, or with tool_calls")
        content = message.get("content")
        if not (content is None or isinstance(content, str | list | tuple)):
            raise UsageError(f"{what} has the content {content!r:.40}; allowed: a text, or a list of text parts")
        for part in content if isinstance(content, list | tuple) else ():
            kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
            if kind not in ("text", *KINDS):
                raise UsageError(f"{what} has a part of type {kind!r}; allowed: 'text', 'image' or 'image_url'")
            if kind == "text" and not isinstance(part.get("text"), str):
                raise UsageError(f"{what} has a part without a text; allowed: {{'type': 'text', 'text': ...}}")


def _python_ids(prompt: Any) -> Any:
    return [int(token) for token in prompt] if is_ids(prompt) else prompt


def _item(index: int, item: Any) -> Any:
    """An item of a list of prompts; an array or a tokenizer's mapping must be one prompt."""
    prompts = read_prompts(item)
    if not prompts.single and isinstance(item, Tensor | np.ndarray | Mapping):
        raise UsageError(f"prompt {index} holds {len(prompts.items)} prompts; allowed: one per item of a list")
    return prompts.items[0] if prompts.single else item


def _from_array(array: Any, name: str = "prompt") -> Prompts:
    kind = str(array.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise UsageError(f"{name} is an array of {kind}; allowed: whole numbers (token ids)")
    if array.ndim not in (1, 2):
        raise UsageError(f"{name} has shape {tuple(array.shape)}; allowed: {SHAPES}")
    try:
        values = array.tolist()
    except RuntimeError as error:  # a sparse tensor, or one on the meta device
        raise UsageError(f"{name} cannot be read ({first_line(error)}); allowed: whole numbers (token ids)") from error
    rows = values if array.ndim == 2 else [values]
    return Prompts(rows, len(rows) == 1)


def _from_tokenizer(inputs: Mapping[str, Any]) -> Prompts:
    ids = _table("input_ids", inputs["input_ids"])
    if inputs.get("attention_mask") is None:
        return ids
    mask = _table("attention_mask", inputs["attention_mask"])
    if [len(row) for row in mask.items] != [len(row) for row in ids.items]:
        raise UsageError("attention_mask and input_ids differ in shape; allowed: one shape")
    rows = []
    for index, (tokens, real) in enumerate(zip(ids.items, mask.items, strict=True)):
        places = [place for place, value in enumerate(real) if value]
        if places and places[-1] - places[0] >= len(places):
            raise UsageError(f"attention_mask: row {index} has padding inside; allowed: padding on the left or right")
        rows.append([tokens[place] for place in places])
    return Prompts(rows, ids.single)


def _table(name: str, values: Any) -> Prompts:
    """Rows of whole numbers from an array, a list, or a list of lists or arrays."""
    if isinstance(values, Tensor | np.ndarray):
        return _from_array(values.long() if isinstance(values, Tensor) else values, name)
    if is_ids(values):
        return Prompts([_python_ids(values)], True)
    items = values if isinstance(values, Iterable) else ()
    rows = [row.tolist() if isinstance(row, Tensor | np.ndarray) else row for row in items]
    if not rows or not all(is_ids(row) for row in rows):
        raise UsageError(f"{name}={values!r:.80}; allowed: token ids, or rows of them")
    return Prompts([_python_ids(row) for row in rows], False)


Message = dict[str, Any]
Ids = list[int] | Tensor | NDArray[np.integer[Any]] | Mapping[str, Any]  # the last: what a tokenizer returns
Prompt = str | Ids | list[Message]


def texts_shown(messages: Sequence[Mapping[str, Any]]) -> list[str]:
    """The contents of messages that every chat template shows whole; some leave out what the assistant thought."""
    contents = [message.get("content") for message in messages if message.get("role") != "assistant"]
    parts = [part for content in contents for part in (content if isinstance(content, list | tuple) else [content])]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    return [text for text in texts if isinstance(text, str)]


def check_size(name: str, texts: Iterable[str], tokenizer: Tokenizer, max_tokens: int) -> None:
    """Refuse texts that are too long for `max_tokens` before they are tokenized, which takes seconds per MB."""
    size = sum(map(len, texts))
    if size <= max_tokens * USUAL_TOKEN_LENGTH:
        return
    longest = max(map(len, tokenizer.vocabulary()), default=0)
    if size > max_tokens * longest:
        raise UsageError(
            f"{name} has {size} characters; allowed: at most {max_tokens} tokens, of at most {longest} characters each"
        )


class Target(RunningModel, Protocol):
    """A loaded model that rows are made for."""

    @property
    def vision(self) -> Vision | str:
        """Reads images; if the model sees none, the reason."""


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one target: its tokenizer, vocabulary and context length."""

    target: Target
    no_predictions: str = ""  # why requests cannot have predictions, and what is allowed; empty if they can
    compiled: CompiledGrammars | None = None  # constraints that readers share; None for this reader's own
    form: ChatForm = PLAIN_CHAT  # inputs of the chat template besides the messages
    # puts the model's own options in place of those that a request leaves out
    own_options: Callable[[SamplingParams], SamplingParams] = field(default=lambda params: params)

    @cached_property
    def grammars(self) -> CompiledGrammars:
        """Constraints, compiled for the target's vocabulary."""
        return self.compiled or CompiledGrammars(self.target, self.target.backend.vocab_size)

    def with_form(self, form: ChatForm) -> RequestReader:
        """A reader of conversations in this form. UsageError for tools that its chat template does not read."""
        if form == PLAIN_CHAT:
            return self
        tokenizer, name = self.target.tokenizer, self.target.name
        reads_tools = isinstance(tokenizer, TokenizerDetails) and "tools" in tokenizer.template_variables()
        if form.tools and not reads_tools:
            raise UsageError(f"tools, which the chat template of {name!r} does not read; allowed: no tools")
        return replace(self, form=form, compiled=self.grammars)

    def _check_form(self, prompt: Any, chat: bool) -> None:
        """Refuse options of the chat template for a prompt that it does not render."""
        tools, goes_on, variables = self.form.tools, self.form.goes_on, self.form.variables
        requested = {"tools": tools, "continue_final_message": goes_on, "chat_template_kwargs": variables}
        name = next((name for name, value in requested.items() if value), None)
        if name is not None and self._messages(prompt, chat) is None:
            what = "token ids" if is_ids(prompt) else "a text without the chat template"
            raise UsageError(f"{name} with {what}; allowed: with chat messages")
        if goes_on and isinstance(prompt, str):
            raise UsageError(
                "continue_final_message with a text; allowed: with chat messages; it continues the last one"
            )

    def encode(self, prompt: Prompt, *, chat: bool) -> list[int]:
        """The token ids a prompt stands for. chat: texts are rendered by the chat template, if there is one."""
        self._check_form(_single(prompt), chat)
        return self._encode(_single(prompt), chat)[0]

    def _encode(self, prompt: Any, chat: bool) -> tuple[list[int], PromptImages | None]:
        if not isinstance(chat, bool):
            raise UsageError(f"chat={chat!r:.60}; allowed: True or False")
        if is_ids(prompt):
            return list(prompt), None
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            python = "tokenizer=AutoTokenizer.from_pretrained(...), or a list of token ids"
            folder = f"put tokenizer.json into its folder (the command line needs it), or in Python {python}"
            raise UsageError(
                f"prompt is text, but model {self.target.name!r} has no tokenizer; "
                f"allowed: {folder if self.target.view is None else python}"
            )
        texts = [prompt] if isinstance(prompt, str) else texts_shown(prompt)
        check_size("prompt", texts, tokenizer, self.target.backend.max_length - 1)
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            messages = self._messages(prompt, chat)
            return tokenizer.encode(prompt) if messages is None else self._rendered(messages), None
        for message in prompt:
            if isinstance(message.get("content"), str):
                check_text("prompt (a chat message)", message["content"])
        if (name := next((name for name, _ in parts_of(prompt)), None)) is None:
            return self._rendered(prompt), None
        vision = self.target.vision
        if isinstance(vision, str):
            raise UsageError(
                f"{name} is an image, but model {self.target.name!r} sees none: {vision}; allowed: text parts"
            )
        return vision.read(with_pictures(prompt), self.form, tokenizer)

    def _rendered(self, messages: list[Message]) -> list[int]:
        assert self.target.tokenizer is not None
        # a caller's own tokenizer may have no forms
        return self.target.tokenizer.chat(messages, *(() if self.form == PLAIN_CHAT else (self.form,)))

    def sample_rows(self, prompts: list[Any], params: Any, *, chat: bool = True) -> list[list[Row]]:
        """`params.n` rows per prompt; the first has the request's seed, the others seeds derived from it."""
        all_params = _params_of_each(params, len(prompts))
        groups: list[list[Row]] = []
        for prompt, request in zip(prompts, all_params, strict=True):
            self._check_form(_single(prompt), chat)
            if isinstance(request, SamplingParams) and request.n > 1:
                request = self.own_options(request)
                request = replace(request, temperature=float(request.temperature))  # refused if that is greedy
            per_text = replace(request, n=1) if isinstance(request, SamplingParams) and request.n > 1 else request
            first = self._row(len(groups), _single(prompt), per_text, chat, _name(len(groups), prompts))
            assert isinstance(first.params, SamplingParams)  # in which a suffix has become tokens
            seeds = further_seeds(first.seed, request.n)
            others = [self._row(len(groups), first.tokens, replace(first.params, seed=seed), chat) for seed in seeds]
            for other in others:
                other.messages, other.images = first.messages, first.images
            groups.append([first, *others])
        return groups

    def rows(self, prompts: list[Any], params: Any, *, chat: bool = True) -> list[Row]:
        """One row per prompt, given in any form; params: None, one for all, or one per prompt."""
        for prompt in prompts:
            self._check_form(_single(prompt), chat)
        pairs = enumerate(zip(prompts, _params_of_each(params, len(prompts)), strict=True))
        return [self._row(i, _single(prompt), row_params, chat, _name(i, prompts)) for i, (prompt, row_params) in pairs]

    def _row(self, index: int, prompt: Any, params: SamplingParams, chat: bool, name: str = "prompt") -> Row:
        if not isinstance(params, SamplingParams):
            raise UsageError(
                f"params: {type(params).__name__}; allowed: SamplingParams, or keywords such as max_tokens=10"
            )
        if params.n > 1:
            raise UsageError(f"n={params.n}; allowed: 1, except in generate")
        backend, is_infill, images = self.target.backend, params.suffix is not None, None
        if is_infill:
            tokens, params = self._infilled(prompt, params)
        else:
            tokens, images = self._encode(prompt, chat)
        if not tokens:
            raise UsageError(f"{name} is empty; allowed: at least one token")
        if bad := [token for token in tokens if not 0 <= token < backend.vocab_size]:
            raise UsageError(f"{name}: token id {bad[0]}; allowed: 0 to {backend.vocab_size - 1}")
        room = backend.max_length - len(tokens)
        if room < 1:
            raise UsageError(f"{name} has {len(tokens)} tokens; allowed: at most {backend.max_length - 1}")
        params = self.own_options(params)
        if left_out := params.unset:
            if "max_tokens" in left_out:
                left_out["max_tokens"] = min(DEFAULT_MAX_TOKENS, room)
            params = replace(params, **left_out)
        if params.max_tokens > room:
            raise UsageError(
                f"max_tokens={params.max_tokens}; allowed: at most {room} after a prompt of {len(tokens)} tokens "
                f"(the model's context is {backend.max_length})"
            )
        params = self.with_token_ids(params)
        params.check_vocabulary(backend.vocab_size)
        ends = frozenset(() if params.ignore_eos else self.target.end_ids) | frozenset(params.stop_token_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # a draft model's own template may have no form for tools, its own variables or a continued answer
        is_plain = self.form == PLAIN_CHAT and images is None and not is_infill
        messages = self._messages(prompt, chat) if is_plain else None
        row = Row(index, tokens, params, seed, ends, messages=messages, images=images)
        if params.stop_strings:
            if self.target.tokenizer is None:
                raise UsageError(f"stop={list(params.stop_strings)!r} needs a tokenizer; allowed: stop_token_ids")
            read_as_committed(row, self.target.tokenizer)
        row.prediction = self._prediction(params)
        if (constraint := params.constraint) is not None:
            answers = self.target.tokenizer
            if not constraint.preamble and isinstance(answers, AnswerTokenizer) and begins_in_thought(answers, tokens):
                constraint = replace(constraint, preamble=thought_preamble(answers, tokens, with_text=True))
            row.constraint = self.grammars.constraint(constraint, ends)
        self._limit_thought(row, params.thinking_token_budget)
        return row

    def _infilled(self, prompt: Any, params: SamplingParams) -> tuple[list[int], SamplingParams]:
        """The token ids of a text with a gap at its end, and the options with the tokens that end what fills it."""
        suffix = params.suffix or ""
        if not isinstance(prompt, str):
            what = "token ids" if is_ids(prompt) else "chat messages"
            raise UsageError(f"suffix with {what}; allowed: with a text, without the chat template")
        if self.form != PLAIN_CHAT:
            raise UsageError("suffix with options of the chat template, which it does not use; allowed: without them")
        if self.target.tokenizer is not None:
            check_size("prompt", [prompt, suffix], self.target.tokenizer, self.target.backend.max_length - 1)
        check_text("prompt", prompt)
        parts = infill(self.target.tokenizer, prompt, suffix)
        ends = () if params.ignore_eos else parts.ends
        return parts.ids, replace(params, suffix=None, stop_token_ids=(*params.stop_token_ids, *ends))

    def _limit_thought(self, row: Row, budget: int | None) -> None:
        """Give a row its budget of thought, unless its prompt ends the thought."""
        tokenizer = self.target.tokenizer
        if budget is None:
            return
        thought = tokenizer.answer_form().thought if isinstance(tokenizer, AnswerTokenizer) else None
        if thought is None or not isinstance(tokenizer, AnswerTokenizer):
            raise UsageError(f"thinking_token_budget={budget}, but this model writes no thoughts; allowed: None")
        prompt = row.tokens
        if not ends_thought(tokenizer, prompt):
            row.constraint = ThoughtBudget(
                tokenizer,
                budget,
                self.target.backend.vocab_size,
                constraint_of(row),
                is_open=begins_in_thought(tokenizer, prompt),
                end=tokenizer.bare(thought.forced_end),
            )

    def _messages(self, prompt: Any, chat: bool) -> list[Message] | None:
        tokenizer = self.target.tokenizer
        if isinstance(prompt, str):
            templated = chat and tokenizer is not None and tokenizer.has_chat_template and prompt
            return [{"role": "user", "content": prompt}] if templated else None
        return None if is_ids(prompt) else prompt

    def with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """The options with token ids in place of texts; of bad words, with and without a space before them."""
        words: list[Sequence[int]] = []
        tokenizer = self.target.tokenizer
        for word in params.bad_words:
            if not isinstance(word, str):
                words.append(word)
            elif tokenizer is None:
                raise UsageError(f"bad_words: {word!r} is text but there is no tokenizer; allowed: lists of token ids")
            else:
                words += [ids for ids in (tokenizer.bare(word), tokenizer.bare(" " + word)) if ids]
        if params.bad_words:
            params = replace(params, bad_words=tuple(words))
        return replace(params, prediction=self._prediction(params)) if isinstance(params.prediction, str) else params

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        """A request's prediction as token ids without special ones; empty if it has none."""
        prediction, tokenizer = params.prediction, self.target.tokenizer
        if prediction is None:
            return ()
        if self.no_predictions:
            raise UsageError(f"prediction with {self.no_predictions}, or no prediction")
        if not isinstance(prediction, str):
            return tuple(prediction)
        if tokenizer is None:
            raise UsageError(
                f"prediction={prediction!r:.60} is text but there is no tokenizer; allowed: a list of token ids"
            )
        if not (ids := tokenizer.bare(prediction)):
            raise UsageError(f"prediction={prediction!r:.60} has no tokens; allowed: a text that has some")
        return ids


def further_seeds(seed: int, n: int) -> list[int]:
    """Seeds of the second to n-th text of a request with this seed."""
    return [key(seed, number) >> 1 for number in range(1, n)]


def _params_of_each(params: Any, count: int) -> list[Any]:
    default = SamplingParams() if params is None else params
    all_params = list(params) if isinstance(params, list | tuple) else [default] * count
    if len(all_params) != count:
        raise UsageError(
            f"params: {len(all_params)} given for {counted(count, 'prompt')}; allowed: one, or one per prompt"
        )
    return all_params


def _name(index: int, prompts: Sequence[Any]) -> str:
    """The prompt's name in messages, with its number if there are several."""
    return f"prompt {index}" if len(prompts) > 1 else "prompt"


def _single(prompt: Any) -> Any:
    """One prompt as a text, a list of token ids or a list of chat messages."""
    prompts = read_prompts(prompt)
    item = prompts.items[0] if prompts.items else prompt
    if not prompts.single or not (isinstance(item, str) or is_ids(item) or is_chat(item)):
        raise UsageError(f"prompt {prompt!r:.80}; allowed: {ALLOWED}")
    return item
