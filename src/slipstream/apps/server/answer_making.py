"""From a request's fields to its rows and the writer of its answer; knows neither HTTP nor the engine."""

from __future__ import annotations

from slipstream.apps.server.answer_parts import ModelFacts
from slipstream.apps.server.answer_writer import AnswerWriter
from slipstream.apps.server.chat_answers import ChatWriter
from slipstream.apps.server.completion_answers import CompletionWriter
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.prompt_rendering import Rendered, rendered_chat, rendered_prompts
from slipstream.apps.server.request_fields import ChatFields, CompletionFields
from slipstream.apps.server.request_rows import RowMaker
from slipstream.text.detokenizer import Tokenizer


def check_model(name: str, given: str | None) -> None:
    """Refuse requests for another model than the one of this name."""
    if given not in (None, "", name):
        raise ApiError(
            404,
            f"model {given!r:.200} is not served here; allowed: {name!r}",
            param="model",
            code="model_not_found",
        )


def writer_of(
    rows: RowMaker,
    facts: ModelFacts,
    live: LiveRequest,
    fields: ChatFields | CompletionFields,
    tokenizer: Tokenizer | None,
) -> AnswerWriter:
    """Render the prompts and make the rows of a request. tokenizer: of the calling thread."""
    plain = rows.settings.no_special_tokens_in_prompts
    if isinstance(fields, ChatFields):
        live.jobs = rows.jobs(live, fields, [rendered_chat(fields, tokenizer, plain_texts=plain)], tokenizer)
        return ChatWriter(live, fields, facts)
    prompts = rendered_prompts(fields, tokenizer, plain_texts=plain)
    live.jobs = rows.jobs(live, fields, prompts, tokenizer)
    writer = CompletionWriter(live, fields, facts)
    if fields.echo:
        writer.prompts = [text for prompt in prompts for text in [_text(prompt, tokenizer)] * (fields.n or 1)]
    return writer


def _text(prompt: Rendered, tokenizer: Tokenizer | None) -> str:
    if prompt.text is not None or tokenizer is None:
        return prompt.text or ""
    return tokenizer.decode(prompt.ids)
