"""Answers job lines in OpenAI's batch format, as the server's endpoints would.

An answer depends only on its request and the model: whatever differs between runs (times, statistics of drafts, cached
prompt tokens) is left out, and `created` is 0.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slipstream.apps.server.answer_state import ModelFacts
from slipstream.apps.server.answers import AnswerWriter
from slipstream.apps.server.error_objects import as_api_error, refused, sent, validated
from slipstream.apps.server.live_request import Committed, Ended, LiveRequest, Scored, Started
from slipstream.apps.server.request_reading import name_ignored
from slipstream.apps.server.request_rows import RowMaker, check_model, writer_of
from slipstream.apps.server.schemas import ChatFields, CompletionFields
from slipstream.apps.server.server_settings import ServerSettings
from slipstream.core.rounds import TokenLogprobs
from slipstream.core.scheduler import PROMPT_BUDGET
from slipstream.core.types import Row
from slipstream.errors import UsageError, did_you_mean
from slipstream.jobs.job_lines import Line
from slipstream.jobs.job_output import ROW_PREFIX
from slipstream.jobs.line_formats import JobOptions, seed_of
from slipstream.text.detokenizer import text_of
from slipstream.tokenization.tokenizer import Tokenizer
from slipstream.wiring.prompt_scores import PromptScores

if TYPE_CHECKING:
    from slipstream.decoder import SpeculativeDecoder

URLS: dict[str, type[ChatFields | CompletionFields]] = {
    "/v1/chat/completions": ChatFields,
    "/v1/completions": CompletionFields,
}
LINE_FIELDS = ("custom_id", "method", "url", "body")
TIMED_PARTS = ("timings", "metrics")  # parts of an answer that differ from run to run
VARYING_USAGE = ("prompt_tokens_details", "completion_tokens_details")  # parts of its usage that do


class OpenAILines:
    """Reads lines for one decoder."""

    def __init__(self, decoder: SpeculativeDecoder, options: JobOptions) -> None:
        self._decoder = decoder
        self.tokenizer: Tokenizer | None = copy.deepcopy(decoder.tokenizer)
        self._facts = ModelFacts.of(decoder, options.model_name or decoder.target.name)
        self._rows = RowMaker.for_decoder(decoder, ServerSettings(max_model_len=0))
        self._named = set[str]()  # fields without effect that are in the log already

    def request_of(self, line: Line, digest: str) -> OpenAIRequest:
        """The rows of a line; ApiError or UsageError if it is not allowed."""
        fields = _fields(line)
        check_model((self._facts.name,), fields.model)
        live = LiveRequest(id=digest)
        writer = writer_of(self._rows, self._facts, live, fields, self.tokenizer)
        name_ignored(fields, self.tokenizer, self._named)
        return OpenAIRequest(line, digest, live, writer, self)

    def scored(self, row: Row, count: int) -> tuple[TokenLogprobs, ...]:
        """The log-probabilities of a prompt's tokens from its second on."""
        prompt = Row(0, row.tokens[: row.prompt_length], row.params, row.seed)
        scores: PromptScores | None = None
        while scores is None or not scores.finished:
            scores = self._decoder.score_prompt(scores, prompt, count, PROMPT_BUDGET)
        return tuple(scores.values)


def _fields(line: Line) -> ChatFields | CompletionFields:
    """The request of a line; ApiError if it is not allowed."""
    item = line.item
    if unknown := [name for name in item if name not in LINE_FIELDS]:
        near = did_you_mean(str(unknown[0]), *LINE_FIELDS)
        raise refused(f"unknown field {unknown[0]!r:.80}; allowed: {', '.join(LINE_FIELDS)}{near}", unknown[0])
    if item.get("method", "POST") != "POST":
        raise refused(f"method={item['method']!r:.80}; allowed: 'POST'", "method")
    url = item.get("url")
    body = item.get("body")
    if not isinstance(url, str) or url not in URLS:
        near = did_you_mean(str(url), *URLS)
        raise refused(f"url={url!r:.80}; allowed: {', '.join(URLS)}{near}", "url")
    if not isinstance(body, dict):
        what = "body is missing" if body is None else sent("body", body)
        raise refused(f"{what}; allowed: a JSON object, the request", "body")
    fields = validated(URLS[url], body)
    if fields.stream:
        raise refused("stream=true in a batch; allowed: false", "stream")
    if fields.slipstream is not None:
        raise refused("slipstream: rounds are not reported in a batch", "slipstream")
    if fields.seed in (None, -1):
        fields.seed = seed_of(str(line.id))
    return fields


@dataclass(frozen=True)
class OpenAIRequest:
    """A line whose prompts are rendered, and the writer of its answer."""

    line: Line
    digest: str
    live: LiveRequest
    writer: AnswerWriter
    kind: OpenAILines = field(repr=False)

    @property
    def rows(self) -> Sequence[Row]:
        """Rows that are generated; a prompt that is only scored has none."""
        return [job.row for job in self.live.jobs if job.generate]

    def answer(self) -> dict[str, Any]:
        """The line of the output; raises ApiError, or the error that a row failed with."""
        for job in self.live.jobs:
            row = job.row
            events: list[Any] = [Started(job.choice, 0, 0.0)]
            if job.echo is not None:
                events.append(Scored(job.choice, self.kind.scored(row, job.echo)))
            text = text_of(row, self.kind.tokenizer)
            events += [Committed(job.choice, round, 0.0, text * (round is row.rounds[-1])) for round in row.rounds]
            reason = row.finish_reason or "length"
            for event in [*events, Ended(job.choice, reason, 0.0, row.error)]:
                self.writer.note(event)
        body = {name: value for name, value in self.writer.whole().items() if name not in TIMED_PARTS} | {"created": 0}
        body["usage"] = {name: count for name, count in body["usage"].items() if name not in VARYING_USAGE}
        return _output_line(self.line, self.digest, 200, body)


def refusal_line(line: Line, digest: str, error: Exception) -> dict[str, Any]:
    """A refusal or failure as a line of the error file."""
    refusal = as_api_error(error)
    body = refusal.body()
    reason = {"code": refusal.code or body["error"]["type"], "message": refusal.message}
    return _output_line(line, digest, refusal.status, body) | {"error": reason}


def _output_line(line: Line, digest: str, status: int, body: dict[str, Any]) -> dict[str, Any]:
    try:
        custom_id = line.id
    except UsageError:
        custom_id = str(line.item.get("custom_id"))[:80]
    response = {"status_code": status, "request_id": digest, "body": body}
    return {"id": f"{ROW_PREFIX}{digest}", "custom_id": custom_id, "response": response, "error": None}
