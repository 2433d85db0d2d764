"""Hugging Face tokenizers as Slipstream's `Tokenizer`."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import Any

from jinja2 import TemplateError, meta, nodes
from tokenizers import Tokenizer

from slipstream.errors import UsageError, did_you_mean, one_line
from slipstream.tokenization import answer_form_choice
from slipstream.tokenization.answer_forms import AnswerForm, CallText
from slipstream.tokenization.byte_vocabulary import ByteTokens
from slipstream.tokenization.chat_template import compiled
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_byte_tokens import TokenNames, read_byte_tokens
from slipstream.tokenization.infill import InfillTokens
from slipstream.tokenization.tokenizer import PLAIN_CHAT, ChatForm, check_text

log = logging.getLogger("slipstream")

# of transformers' class that `FileTokenizer` has, too
METHODS = ("__call__", "_encode_plus", "decode", "_decode", "get_vocab", "get_chat_template", "apply_chat_template")
OWN = {"messages", "tools", "documents", "add_generation_prompt"}  # variables of a template that callers cannot set


def tokenizer_in(value: Any, name: str) -> Any:
    """The tokenizer that a caller passed, itself or in a processor. Raises `UsageError` for anything else.

    name: of the argument.
    """
    from transformers import PreTrainedTokenizerBase  # takes seconds

    for tokenizer in (value, getattr(value, "tokenizer", None)):
        if isinstance(tokenizer, PreTrainedTokenizerBase):
            return tokenizer
    shown = f"{value!r:.60}" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
    raise UsageError(f"{name}={shown}; allowed: a Hugging Face tokenizer, such as AutoTokenizer.from_pretrained(...)")


class HFTokenizer:
    """A `PreTrainedTokenizer` or a `FileTokenizer` as Slipstream uses it."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer
        self._backend_decodes = _backend_alone_decodes(type(tokenizer))
        self._names: TokenNames | None = None

    @property
    def has_chat_template(self) -> bool:
        return bool(self.inner.chat_template)

    def encode(self, text: str) -> list[int]:
        return self._ids(text)

    def bare(self, text: str) -> list[int]:
        return self._ids(text, add_special_tokens=False)

    def _ids(self, text: str, **options: bool) -> list[int]:
        try:
            return list(self.inner(text, **options)["input_ids"])
        except Exception as error:
            if type(error) is not Exception:  # the tokenizers package raises bare Exceptions
                raise
            raise UsageError(f"the tokenizer cannot encode {text!r:.60}: {one_line(error)}") from error

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces left alone."""
        return self._decoded(ids, skip_special_tokens=True)

    def _decoded(self, ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._backend_decodes:
            return str(self.inner.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.inner.decode(ids, **options))

    def chat(self, messages: Sequence[dict[str, Any]], form: ChatForm = PLAIN_CHAT) -> list[int]:
        """Token ids of a conversation, by default with the opening of the answer."""
        return self.bare(self.chat_text(messages, form))

    def chat_text(self, messages: Sequence[dict[str, Any]], form: ChatForm = PLAIN_CHAT) -> str:
        """The text whose tokens `chat` returns."""
        if not self.has_chat_template:
            raise UsageError(
                "prompt is a list of chat messages but the tokenizer has no chat template; allowed: a text"
            )
        if form.variables:
            self._check_variables(form)
        if form.tools and self._writes_unread_calls:
            _warn_of_unread_calls(self._template_for(form))
        text = self._rendered_parts(messages, form)
        check_text("the conversation as the chat template writes it", text)
        return text

    def _rendered_parts(self, messages: Sequence[dict[str, Any]], form: ChatForm) -> str:
        """The conversation as text; contents in parts become one text if the template can only render texts."""
        parts = [str(message["content"]) for message in messages if isinstance(message.get("content"), list | tuple)]
        try:
            text = self._rendered(messages, form)
        except UsageError:  # the template may add texts to a content, which fails with a list
            if not parts:
                raise
        else:
            if not any(part in text for part in parts):  # else the template has printed a Python list
                return text
        return self._rendered([_with_one_text(message) for message in messages], form)

    def _rendered(self, messages: Sequence[dict[str, Any]], form: ChatForm) -> str:
        try:
            text: str = self.inner.apply_chat_template(
                list(messages),
                tools=list(form.tools) or None,
                add_generation_prompt=form.opens_answer,
                continue_final_message=form.goes_on,
                tokenize=False,
                **({} if form.reasoning_effort is None else {"reasoning_effort": form.reasoning_effort}),
                **form.variables,
            )
        except (TypeError, ValueError, AttributeError, LookupError, RecursionError, ArithmeticError) as error:
            raise UsageError(f"the chat template cannot render these messages: {one_line(error)}") from error
        except TemplateError as error:  # a template's own rules, for example about system messages
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        return text

    def _check_variables(self, form: ChatForm) -> None:
        """Refuse variables that the template does not read, among them those that control transformers itself."""
        readable = self._variables_in(self._template_for(form)) - OWN
        for name in form.variables:
            if name not in readable:
                allowed = ", ".join(sorted(readable)) or "none, this template reads no others"
                raise UsageError(
                    f"chat_template_kwargs: {name!r:.40}; allowed: {allowed}{did_you_mean(name, *readable)}"
                )

    @cached_property
    def _writes_unread_calls(self) -> bool:
        return not answer_form_choice.reads_written_calls(self._answer_form, self._answer_template())

    def _template_for(self, form: ChatForm) -> str:
        """The template that renders this form: of several, the one that is named tool_use or default."""
        try:
            return str(self.inner.get_chat_template(tools=list(form.tools) or None))
        except ValueError as error:
            raise UsageError(f"the chat template cannot be used: {one_line(error)}") from error

    def _templates(self) -> set[str]:
        """The templates that requests can reach, with tools or without."""
        forms = (PLAIN_CHAT, ChatForm(tools=[{}])) if self.has_chat_template else ()
        return {self._template_for(form) for form in forms}

    def _variables_in(self, template: str) -> frozenset[str]:
        return _names_of(template)[0] - set(self.inner.special_tokens_map)

    def template_variables(self) -> frozenset[str]:
        return frozenset[str]().union(*map(self._variables_in, self._templates()))

    def template_fields(self) -> frozenset[str]:
        return frozenset[str]().union(*(_names_of(template)[1] for template in self._templates()))

    def special_ids(self) -> frozenset[int]:
        added, unknown = self.inner.added_tokens_decoder, self.inner.unk_token_id
        ids = frozenset(self.inner.all_special_ids) | {token for token, entry in added.items() if entry.special}
        # the token for unknown characters is not special in this sense, unless it begins or ends texts, too
        return ids if unknown in (self.inner.eos_token_id, self.inner.bos_token_id) else ids - {unknown}

    def digest(self) -> str:
        backend = getattr(self.inner, "backend_tokenizer", None)
        # a caller's settings of padding and truncation come before the added tokens, and change no text
        rules = (
            sorted(self.vocabulary().items()) if backend is None else backend.to_str().partition('"added_tokens"')[2]
        )
        parts = (
            getattr(self.inner, "class_name", type(self.inner).__name__),
            rules,
            [self.inner.chat_template] if self.inner.chat_template else [],
            getattr(self.inner, "response_template", None),
            sorted((name, str(token)) for name, token in self.inner.special_tokens_map.items()),
            [getattr(self.inner, name, None) for name in ("add_bos_token", "add_eos_token")],
        )
        return hashlib.sha256(repr(parts).encode("utf-8", "surrogatepass")).hexdigest()

    def _answer_template(self) -> answer_form_choice.Template:
        def render(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]], opens: bool) -> str:
            return str(
                self.inner.apply_chat_template(
                    list(messages), tools=list(tools), add_generation_prompt=opens, tokenize=False
                )
            )

        names = {token.content for token in self.inner.added_tokens_decoder.values()}
        response_template = getattr(self.inner, "response_template", None)
        try:
            texts = sorted(self._templates())
        except UsageError:  # several templates, of which none is for chats; `chat` refuses them
            texts = []
        reads_tools = any("tools" in self._variables_in(text) for text in texts)
        return answer_form_choice.Template("\n".join(texts), render, names, response_template, reads_tools)

    @cached_property
    def _answer_form(self) -> AnswerForm:
        return answer_form_choice.answer_form(self._answer_template())

    def answer_form(self) -> AnswerForm:
        return self._answer_form

    @cached_property
    def _call_text(self) -> CallText | None:
        text = answer_form_choice.call_text(self._answer_form, self._answer_template())
        end = self.inner.special_tokens_map.get("eos_token", "")
        return None if text is None else replace(text, after=text.after.removesuffix(str(end)))

    def call_text(self) -> CallText | None:
        return self._call_text

    def special_tokens(self) -> dict[str, int]:
        ids = self.special_ids()
        return {name: token for name, token in self.vocabulary().items() if token in ids}

    @cached_property
    def _mark_ids(self) -> frozenset[int]:
        """The special tokens that are marks of the answer's form."""
        marks = self._answer_form.marks
        return frozenset(token for name, token in self.special_tokens().items() if name in marks)

    @cached_property
    def _hidden_ids(self) -> frozenset[int]:
        """The other tokens without text."""
        unknown = self.inner.unk_token_id
        has_text = unknown is None or bool(self.decode([unknown]))
        return self.special_ids().union(() if has_text else (unknown,)) - self._mark_ids

    def decode_marked(self, ids: Sequence[int]) -> str:
        if not self._mark_ids:
            return self.decode(ids)
        shown = [token for token in ids if token not in self._hidden_ids]
        return self._decoded(shown, skip_special_tokens=False)

    def vocabulary(self) -> dict[str, int]:
        return dict(self.inner.get_vocab())

    def byte_tokens(self) -> ByteTokens:
        backend = self._fast_backend()
        return read_byte_tokens(backend, tuple(self.opening()))

    def opening(self) -> list[int]:
        encoded, bare = self.encode("a"), self.bare("a")
        return encoded[: -len(bare)] if bare and encoded[-len(bare) :] == bare else []

    @cached_property
    def _infill_tokens(self) -> InfillTokens | None:
        return InfillTokens.of(self.vocabulary(), getattr(self.inner, "infill_names", ()))

    def infill_tokens(self) -> InfillTokens | None:
        return self._infill_tokens

    def bytes_of(self, token: int) -> bytes | None:
        backend = self._fast_backend()
        self._names = self._names or TokenNames(backend)
        name = backend.id_to_token(token)
        return None if name is None else self._names.text(name, token)

    def _fast_backend(self) -> Any:
        if not getattr(self.inner, "is_fast", False):
            raise UsageError(f"its tokenizer is a {type(self.inner).__name__}, whose tokens cannot be read as bytes")
        return self.inner.backend_tokenizer


def _with_one_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one text, with the texts of its parts as lines."""
    content = message.get("content")
    joined = "\n".join(part.get("text", "") for part in content) if isinstance(content, list | tuple) else content
    return {**message, "content": joined}


@lru_cache(16)
def _warn_of_unread_calls(template: str) -> None:
    log.warning(
        "tools: this chat template writes calls in a form that Slipstream does not read; calls stay in the text, and "
        "Result.tool_calls is empty"
    )


@lru_cache(16)
def _names_of(template: str) -> tuple[frozenset[str], frozenset[str]]:
    """The variables of a chat template, and all names that may be those of a message's fields."""
    try:
        environment = compiled(template).environment
        parsed = environment.parse(template)
    except TemplateError as error:
        raise UsageError(f"the chat template cannot be read: {one_line(error)}") from error
    attributes = {node.attr for node in parsed.find_all(nodes.Getattr)}
    texts = {node.value for node in parsed.find_all(nodes.Const) if isinstance(node.value, str)}
    return frozenset(meta.find_undeclared_variables(parsed)) - environment.globals.keys(), frozenset(attributes | texts)


def as_file_tokenizer(tokenizer: HFTokenizer) -> FileTokenizer | None:
    """A tokenizer that needs no transformers and gives the same ids and texts; None if the class does more."""
    inner = tokenizer.inner
    if isinstance(inner, FileTokenizer):
        return inner
    from transformers import PreTrainedTokenizerFast as Fast  # takes seconds

    kind, template = type(inner), inner.chat_template
    is_usual = issubclass(kind, Fast) and all(getattr(kind, name) is getattr(Fast, name) for name in METHODS)
    if not is_usual or inner.split_special_tokens or not isinstance(template, str | None):
        return None
    try:
        backend = Tokenizer.from_str(inner.backend_tokenizer.to_str())
    except Exception as error:
        if type(error) is not Exception:  # the tokenizers package raises bare Exceptions
            raise
        return None  # parts of it are written in Python
    backend.no_truncation()
    backend.no_padding()
    copy = FileTokenizer(backend, inner.special_tokens_map, template).standing_for(inner)
    wrapped = HFTokenizer(copy)
    is_same = wrapped.digest() == tokenizer.digest() and wrapped.special_ids() == tokenizer.special_ids()
    return copy if is_same else None


def _backend_alone_decodes(kind: Any) -> bool:
    """True if `decode` only calls the backend, which is then called directly: streams decode twice per token."""
    if kind is FileTokenizer:
        return True
    from transformers import PreTrainedTokenizerFast as Fast  # takes seconds

    return issubclass(kind, Fast) and kind.decode is Fast.decode and kind._decode is Fast._decode
