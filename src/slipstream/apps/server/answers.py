"""Writers of answers, whole or streamed: their bases, and those of chat and text completions."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from pydantic_core import to_json

from slipstream.apps.server.answer_state import (
    ChoiceState,
    ModelFacts,
    Piece,
    receipt,
    shown_round,
    speculative_decoding,
    timings,
    usage,
)
from slipstream.apps.server.error_objects import ApiError
from slipstream.apps.server.live_request import Event, LiveRequest
from slipstream.apps.server.schemas import ChatFields, CompletionFields, SamplingFields, StreamOptions
from slipstream.core.rounds import TokenLogprobs
from slipstream.sampling.processors import params_of
from slipstream.text.answer_reader import AnswerReader, answer_tokenizer
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"
SILENCE_SECONDS = 15.0  # after which such a comment is sent
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
# characters at which some clients, Ollama's among them, end a line, and which JSON need not escape
LINE_ENDS = {end.encode(): rb"\u%04x" % ord(end) for end in "\x85\u2028\u2029"}


def encoded(item: Any) -> bytes:
    """JSON on one line without spaces."""
    try:
        data = to_json(item)  # three times faster than `json.dumps`
    except ValueError:  # it refuses objects that are nested more than 250 deep
        data = json.dumps(item, ensure_ascii=False, separators=(",", ":")).encode()
    for end, escaped in LINE_ENDS.items():
        data = data.replace(end, escaped)
    return data


def event(data: bytes) -> bytes:
    """JSON as one server-sent event."""
    return b"data: %b\n\n" % data


class AnswerWriter(ABC):
    """Turns a request's events into its answer, whole or as the items of a stream."""

    media_type: ClassVar[str] = "text/event-stream"
    ending: ClassVar[bytes] = b""  # of a stream

    def __init__(self, live: LiveRequest, fields: SamplingFields, facts: ModelFacts) -> None:
        self.live, self.facts = live, facts
        self.choices = [ChoiceState(job, facts.lossless) for job in live.jobs]
        self.shows_rounds = bool(fields.slipstream is not None and fields.slipstream.rounds)

    def note(self, event: Event) -> None:
        """Handle an event of an answer that is sent whole."""
        self.choices[event.choice].take(event)

    async def collect(self) -> dict[str, Any]:
        await self.live.read_all(self.note)
        return self.whole()

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The whole answer, once all choices have ended."""

    @abstractmethod
    def take(self, event: Event) -> list[dict[str, Any]]:
        """The items that an event adds to the stream."""

    @abstractmethod
    def sent(self, item: dict[str, Any]) -> bytes:
        """An item as it is sent."""

    @abstractmethod
    def failure(self, error: ApiError) -> bytes:
        """The end of a stream that has failed."""

    def closing(self) -> dict[str, Any] | None:
        """The item after the last event, if there is one."""
        return None

    def keep_alive(self) -> bytes:
        """A sign of life for clients and proxies, which cut silent connections: a comment, which clients skip."""
        return KEEP_ALIVE

    @property
    def headers(self) -> dict[str, str]:
        """Further headers of this form of answer."""
        return {}

    def report(self) -> dict[str, Any]:
        """The statistics of drafts, and the seeds of sampled texts.

        The statistics are None for several texts, whose shares no client could tell apart.
        """
        rows, drafting = [choice.job.row for choice in self.choices], None
        if len(self.choices) == 1:
            drafting = speculative_decoding(self.choices[0].rounds, is_detailed=self.shows_rounds)
        report: dict[str, Any] = {"metrics": {"speculative_decoding": drafting}}
        if rows[0].params.temperature:
            report["slipstream"] = {"seed": rows[0].seed} if len(rows) == 1 else {"seeds": [row.seed for row in rows]}
        return report


class OpenAIWriter(AnswerWriter):
    """Writes answers of OpenAI's chat and completions endpoints; subclasses know the form of each."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    ending = DONE

    def __init__(self, live: LiveRequest, fields: SamplingFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._n = fields.n or 1
        self._options = fields.stream_options or StreamOptions()
        self._started: set[int] = set()
        self._created = int(time.time())
        self._head = {
            "id": f"{self.prefix}{live.id}",
            "created": self._created,
            "model": facts.name,
            "system_fingerprint": facts.fingerprint,
        }
        self._begin = b"data: %b," % encoded(self._head | {"object": self.chunk_kind})[:-1]
        self.return_ids = bool(fields.return_token_ids)
        self.ids_as_text = bool(fields.return_tokens_as_token_ids)

    def failure(self, error: ApiError) -> bytes:
        return event(encoded(error.body()))

    def opening(self, choice: ChoiceState) -> list[dict[str, Any]]:
        """The part of a chunk that opens a choice, before its first token, if this form has one."""
        return []

    @abstractmethod
    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """The parts of `choices` that a piece adds, one per chunk: usually one, none if there is nothing to send."""

    @abstractmethod
    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """A finished choice as an object of a whole answer."""

    def sent(self, item: dict[str, Any]) -> bytes:
        return b"%b%b\n\n" % (self._begin, encoded(item)[1:])  # with the fields that all chunks share

    def take(self, event: Event) -> list[dict[str, Any]]:
        choice = self.choices[event.choice]
        piece = choice.take(event)
        parts: list[dict[str, Any]] = []
        if choice.started is not None and event.choice not in self._started:
            self._started.add(event.choice)
            parts += self.opening(choice)
        if piece is None:
            return [self._chunk(part) for part in parts]
        new = self.parts(choice, piece)
        if self.shows_rounds and piece.round is not None:
            new = new or [self.empty_part(choice)]
        chunks = [self._chunk(part) for part in (*parts, *new)]
        if new:
            self._add_reports(chunks[-1], choice, piece)
        return chunks

    def _add_reports(self, chunk: dict[str, Any], choice: ChoiceState, piece: Piece) -> None:
        """Add reports to a piece's last chunk: on its round, on a choice that it finishes, and on the whole answer."""
        shown: dict[str, Any] = {}
        if self.shows_rounds and piece.round is not None:
            shown = shown_round(piece, len(choice.rounds) - 1, self.facts)
        if self.shows_rounds and piece.finish_reason is not None:
            shown["receipt"] = receipt(choice, self.facts)
        if shown:
            chunk["slipstream"] = shown
        if piece.finish_reason is not None and all(other.finish_reason is not None for other in self.choices):
            reports = self.report()
            if "slipstream" in reports:
                reports["slipstream"] |= shown
            chunk |= reports

    @abstractmethod
    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        """A choice's part of a chunk without new text."""

    def closing(self) -> dict[str, Any] | None:
        return {"choices": [], "usage": usage(self.choices, self._n)} if self._options.include_usage else None

    def whole(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._head | {"object": self.whole_kind}
        answer["choices"] = [self.whole_choice(choice) for choice in self.choices]
        if self.return_ids:
            for shown, choice in zip(answer["choices"], self.choices, strict=True):
                shown |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
        answer["usage"] = usage(self.choices, self._n)
        answer |= self.report()
        if self.shows_rounds:
            receipts = [receipt(choice, self.facts) for choice in self.choices]
            shown = {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
            answer["slipstream"] = answer.get("slipstream", {}) | shown
        return answer

    def report(self) -> dict[str, Any]:
        return super().report() | {"timings": timings(self.choices[0])}

    def _chunk(self, part: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [part]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage(self.choices, self._n)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def token_name(self, token: int) -> str:
        """A token's name in a report of log-probabilities."""
        return f"token_id:{token}" if self.ids_as_text else self.facts.token_text(token)


@dataclass(frozen=True)
class AnswerMessage:
    """The parts of a finished answer, joined by kind."""

    thought: str
    text: str
    calls: tuple[ToolCall, ...]


class PartReader:
    """Separates one choice into its parts. Without tools and thoughts, all is text."""

    def __init__(self, choice: ChoiceState, fields: SamplingFields, facts: ModelFacts) -> None:
        tools: list[dict[str, Any]] = []
        if isinstance(fields, ChatFields) and fields.tool_choice != "none":
            tools = [tool for tool in fields.tools or () if tool.get("type", "function") == "function"]
        tokenizer = answer_tokenizer(facts.tokenizer, tools) if isinstance(fields, ChatFields) else None
        stops = params_of(choice.job.row).stop_strings
        self._reader = None if tokenizer is None else AnswerReader(tokenizer, choice.prompt, tools, stops)
        self._choice, self._num_calls = choice, 0
        self._several = not isinstance(fields, ChatFields) or fields.parallel_tool_calls is not False

    def read(self, piece: Piece) -> list[AnswerPiece]:
        """The parts that a piece of the answer completes: the last piece completes all.

        If the request wants one call, only the first of several is among them.
        """
        if self._reader is None:
            return [AnswerPiece("text", piece.text, piece.text)] if piece.text else []
        pieces = list(self._reader.push(piece.tokens))
        if piece.finish_reason is not None:
            pieces += self._reader.end()
        self._choice.thought_tokens = self._reader.num_thought_tokens
        parts = []
        for part in pieces:
            self._num_calls += part.call is not None
            if part.text or (part.call is not None and (self._several or self._num_calls == 1)):
                parts.append(part)
        return parts

    def message(self) -> AnswerMessage:
        """The whole answer of a finished choice whose pieces were not read one by one."""
        choice = self._choice
        parts = self.read(Piece(choice.job.choice, choice.text, tuple(choice.token_ids), finish_reason="stop"))
        calls = tuple(part.call for part in parts if part.call is not None)
        return AnswerMessage(joined(parts, "thought"), joined(parts, "text"), calls)


class MessageWriter(AnswerWriter):
    """Writes the one answer of a request as a message of thoughts, text and calls."""

    def __init__(self, live: LiveRequest, fields: SamplingFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._fields = fields
        self.has_begun = False

    @cached_property
    def reader(self) -> PartReader:
        """The reader of the answer; a request that was refused has none."""
        return PartReader(self.choice, self._fields, self.facts)

    @property
    def choice(self) -> ChoiceState:
        return self.choices[0]

    def take(self, event: Event) -> list[dict[str, Any]]:
        piece = self.choice.take(event)
        items: list[dict[str, Any]] = []
        if self.choice.started is not None and not self.has_begun:
            self.has_begun = True
            items += self.begin()
        if piece is not None:
            for part in self.reader.read(piece):
                items += self.part(part)
            if piece.finish_reason is not None:
                items += self.end()
        return items

    @abstractmethod
    def begin(self) -> list[dict[str, Any]]:
        """The items that begin a stream."""

    @abstractmethod
    def part(self, part: AnswerPiece) -> list[dict[str, Any]]:
        """The items of a part."""

    @abstractmethod
    def end(self) -> list[dict[str, Any]]:
        """The items that end a stream, after all parts."""

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the answer, if one did."""
        row, tokenizer = self.choice.job.row, self.facts.tokenizer
        if self.choice.finish_reason != "stop" or tokenizer is None:
            return None
        rest = tokenizer.decode(self.choice.token_ids)[len(self.choice.text) :]
        return next((text for text in params_of(row).stop_strings if rest.startswith(text)), None)


def shown_call(call: ToolCall, prefix: str, index: int) -> dict[str, Any]:
    """A call as OpenAI's object. prefix, index: of the id that it gets if the model gave it none."""
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id or f"call_{prefix}_{index}", "type": "function", "function": function}


def joined(parts: Sequence[AnswerPiece], kind: str) -> str:
    """The text of the parts of a kind."""
    return "".join(part.text for part in parts if part.kind == kind)


def thought_fields(thought: str) -> dict[str, Any]:
    """A thought under the two names that clients of chat completions read."""
    return {"reasoning_content": thought, "reasoning": thought} if thought else {}


class ChatWriter(OpenAIWriter):
    """Writes chat completions; the thoughts and calls of an answer have fields of their own."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, live: LiveRequest, fields: ChatFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._readers = [PartReader(choice, fields, facts) for choice in self.choices]
        self._num_calls = [0] * len(self.choices)  # sent in chunks

    def opening(self, choice: ChoiceState) -> list[dict[str, Any]]:
        return [self._choice(choice, {"role": "assistant", "content": ""})]

    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """New text, with its log-probabilities; tool calls never come in the chunk with finish_reason."""
        reason: str | None = piece.finish_reason
        parts = self._readers[piece.choice].read(piece)
        text, thought = (joined(parts, kind) for kind in ("text", "thought"))
        calls = []
        for call in [part.call for part in parts if part.call is not None]:
            index = self._num_calls[piece.choice]
            calls.append({"index": index} | shown_call(call, self._call_prefix(choice), index))
            self._num_calls[piece.choice] += 1
        if self._num_calls[piece.choice] and reason == "stop":
            reason = "tool_calls"
        if not (parts or reason or piece.logprobs or (self.return_ids and piece.tokens)):
            return []
        delta: dict[str, Any] = {"content": text} if text or not (reason or thought) else {}
        delta |= thought_fields(thought)
        if calls:
            delta["tool_calls"] = calls
        part = self._choice(choice, delta, None if calls else reason)
        part["logprobs"] = None if piece.logprobs is None else self._logprobs(piece.logprobs)
        if self.return_ids:
            part["token_ids"] = list(piece.tokens)
        return [part, self._choice(choice, {}, reason)] if calls and reason is not None else [part]

    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        return self._choice(choice, {"content": ""})

    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        logprobs = [round.logprobs for round in choice.rounds if round.logprobs is not None]
        shown: dict[str, Any] = {
            "index": choice.job.choice,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs([entry for entries in logprobs for entry in entries]) if logprobs else None,
        }
        message = self._readers[choice.job.choice].message()
        is_silent = not message.text and (message.thought or message.calls)
        shown["message"] |= {"content": None if is_silent else message.text} | thought_fields(message.thought)
        if message.calls:
            prefix = self._call_prefix(choice)
            shown["message"]["tool_calls"] = [shown_call(c, prefix, i) for i, c in enumerate(message.calls)]
            shown["finish_reason"] = "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason
        return shown

    def _call_prefix(self, choice: ChoiceState) -> str:
        return f"{self.live.id[:12]}_{choice.job.choice}"

    def _choice(self, choice: ChoiceState, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": choice.job.choice, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, tokens: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._entry(token.token_id, token.logprob) | {"top_logprobs": [self._entry(*other) for other in token.top]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self.facts.token_bytes(token)
        return {"token": self.token_name(token), "logprob": logprob, "bytes": None if data is None else list(data)}


class CompletionWriter(OpenAIWriter):
    """Writes text completions. prompts: each choice's prompt as text, to be echoed; empty for no echo."""

    prefix = "cmpl-"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, live: LiveRequest, fields: CompletionFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._echo, self._logprobs_wanted = bool(fields.echo), fields.logprobs is not None
        self.prompts: list[str] = [""] * len(live.jobs)
        self._decoders = [getincrementaldecoder("utf-8")("replace") for _ in live.jobs]
        self._offsets = [0] * len(live.jobs)  # characters so far; one of several tokens counts with its last byte
        self._opened: set[int] = set()

    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """New text, with its log-probabilities; the echoed prompt before the first."""
        echoed = self._echo and choice.job.choice not in self._opened
        self._opened.add(choice.job.choice)
        text = (self.prompts[choice.job.choice] if echoed else "") + piece.text
        if not (text or piece.finish_reason or piece.logprobs or (self.return_ids and piece.tokens)):
            return []
        part = self._choice(choice, text, piece.finish_reason)
        if self._logprobs_wanted:
            prompt = self._prompt_entries(choice) if echoed else []
            part["logprobs"] = self._logprobs(choice, prompt, piece.logprobs or ())
        return [part | ({"token_ids": list(piece.tokens)} if self.return_ids else {})]

    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        return self._choice(choice, "")

    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        index = choice.job.choice
        shown = self._choice(choice, self.prompts[index] * self._echo + choice.text, choice.finish_reason)
        if self._logprobs_wanted:
            logprobs = [entry for round in choice.rounds for entry in round.logprobs or ()]
            shown["logprobs"] = self._logprobs(choice, self._prompt_entries(choice) if self._echo else [], logprobs)
        return shown

    def _choice(self, choice: ChoiceState, text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": choice.job.choice, "text": text, "logprobs": None, "finish_reason": reason}

    def _prompt_entries(self, choice: ChoiceState) -> list[TokenLogprobs | int]:
        """The prompt's tokens; the first has no log-probability, only its id."""
        return [choice.prompt[0], *(choice.prompt_logprobs or ())]

    def _logprobs(
        self, choice: ChoiceState, prompt: Sequence[TokenLogprobs | int], logprobs: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        index = choice.job.choice
        for entry in (*prompt, *logprobs):
            token = entry if isinstance(entry, int) else entry.token_id
            columns["tokens"].append(self.token_name(token))
            columns["token_logprobs"].append(None if isinstance(entry, int) else entry.logprob)
            columns["top_logprobs"].append(None if isinstance(entry, int) else self._top(entry))
            columns["text_offset"].append(self._offsets[index])
            self._offsets[index] += len(self._decoders[index].decode(self.facts.added_bytes(token)))
        return columns

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the chosen one, by text; of two with the same text, the likelier."""
        named: dict[str, float] = {}
        for token, logprob in entry.top:
            name = self.token_name(token)
            named[f"token_id:{token}" if name in named else name] = logprob
        if all(token != entry.token_id for token, _ in entry.top):
            name = self.token_name(entry.token_id)
            named[f"token_id:{entry.token_id}" if name in named else name] = entry.logprob
        return named
