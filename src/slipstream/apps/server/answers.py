"""Answers as OpenAI's chat and completion objects: whole, or in chunks as server-sent events; with their tool calls."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from codecs import getincrementaldecoder
from collections.abc import Sequence
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
from slipstream.apps.server.live_request import Event, LiveRequest
from slipstream.apps.server.schemas import ChatFields, CompletionFields, SamplingFields, StreamOptions
from slipstream.core.rounds import TokenLogprobs
from slipstream.sampling.processors import params_of
from slipstream.text.answer_reader import AnswerReader, answer_tokenizer
from slipstream.tokenization.answer_parser import AnswerPiece
from slipstream.tokenization.tokenizer import ToolCall

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": still here\n\n"  # a comment, which clients skip; proxies cut silent connections
SILENCE_SECONDS = 15.0  # after which such a comment is sent
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}
encoded = to_json  # JSON without spaces, three times faster than Python's `json.dumps`


def event(data: bytes) -> bytes:
    """JSON as one server-sent event."""
    return b"data: %b\n\n" % data


class AnswerWriter(ABC):
    """Turns a request's events into its answer, whole or in chunks; subclasses know the form of each endpoint."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, live: LiveRequest, fields: SamplingFields, facts: ModelFacts) -> None:
        self.live, self.facts = live, facts
        self.choices = [ChoiceState(job, facts.lossless) for job in live.jobs]
        self._n = fields.n or 1
        self._options = fields.stream_options or StreamOptions()
        self._shows_rounds = fields.slipstream is not None and fields.slipstream.rounds
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

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """The part of a chunk that opens a choice, before its first token; None if this form has none."""
        return None

    @abstractmethod
    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """The parts of `choices` that a piece adds, one per chunk: usually one, none if there is nothing to send."""

    @abstractmethod
    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """A finished choice as an object of a whole answer."""

    def note(self, event: Event) -> None:
        """Handle an event of an answer that is sent whole."""
        self.choices[event.choice].take(event)

    async def collect(self) -> dict[str, Any]:
        await self.live.read_all(self.note)
        return self.whole()

    def sent(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as a server-sent event, with the fields that all chunks share."""
        return b"%b%b\n\n" % (self._begin, encoded(chunk)[1:])

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The chunks for an event, without the fields that all chunks share."""
        choice = self.choices[event.choice]
        piece = choice.take(event)
        parts: list[dict[str, Any]] = []
        if choice.started is not None and event.choice not in self._started:
            self._started.add(event.choice)
            opening = self.opening(choice)
            parts += [] if opening is None else [opening]
        if piece is not None:
            new = self.parts(choice, piece)
            if self._shows_rounds or piece.finish_reason is not None:
                return self._with_reports(choice, piece, parts, new)
            parts += new
        return [self._chunk(part) for part in parts]

    def _with_reports(
        self, choice: ChoiceState, piece: Piece, earlier: list[dict[str, Any]], new: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The chunks of a piece, the last with reports on its round, on a finished choice, and on the answer."""
        shows_round = self._shows_rounds and piece.round is not None
        if not new and shows_round:
            new = [self.empty_part(choice)]
        chunks = [self._chunk(part) for part in (*earlier, *new)]
        if not new:
            return chunks
        chunk = chunks[-1]
        if shows_round:
            chunk["slipstream"] = shown_round(piece, len(choice.rounds) - 1, self.facts)
        if self._shows_rounds and piece.finish_reason is not None:
            chunk["slipstream"] = chunk.get("slipstream", {}) | {"receipt": receipt(choice, self.facts)}
        if all(other.finish_reason is not None for other in self.choices):
            chunk |= self._report()
        return chunks

    @abstractmethod
    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        """A choice's part of a chunk without new text."""

    def closing(self) -> dict[str, Any] | None:
        """The chunk after the last, with the usage of the whole request, if requested."""
        return {"choices": [], "usage": usage(self.choices, self._n)} if self._options.include_usage else None

    def whole(self) -> dict[str, Any]:
        answer: dict[str, Any] = self._head | {"object": self.whole_kind}
        answer["choices"] = [self.whole_choice(choice) for choice in self.choices]
        answer["usage"] = usage(self.choices, self._n)
        answer |= self._report()
        if self._shows_rounds:
            receipts = [receipt(choice, self.facts) for choice in self.choices]
            answer["slipstream"] = {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
        return answer

    def _report(self) -> dict[str, Any]:
        rounds = [round for choice in self.choices for round in choice.rounds]
        return {"metrics": {"speculative_decoding": speculative_decoding(rounds)}, "timings": timings(self.choices[0])}

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


def shown_call(call: ToolCall, identifier: str, index: int | None = None) -> dict[str, Any]:
    """A call as OpenAI's object. index: that chunks of a stream have; None for a whole answer."""
    return ({} if index is None else {"index": index}) | {
        "id": call.id or identifier,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }


class ChatWriter(AnswerWriter):
    """Writes chat completions."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, live: LiveRequest, fields: ChatFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._tools: Sequence[dict[str, Any]] = () if fields.tool_choice == "none" else fields.tools or ()
        self._several = fields.parallel_tool_calls is not False
        self._readers = [self._reader(choice) for choice in self.choices]
        self._num_calls = [0 for _ in self.choices]

    def _reader(self, choice: ChoiceState) -> AnswerReader | None:
        """A reader of the choice's parts; None if all of it is text."""
        tokenizer = answer_tokenizer(self.facts.tokenizer, self._tools)
        stops = params_of(choice.job.row).stop_strings
        return None if tokenizer is None else AnswerReader(tokenizer, choice.prompt, self._tools, stops)

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        return self._choice(choice, {"role": "assistant", "content": ""})

    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """New text, thoughts and calls, with log-probabilities; after the last calls, a part with finish_reason."""
        reader, reason = self._readers[piece.choice], piece.finish_reason
        delta: dict[str, Any] = {"content": piece.text} if piece.text else {}
        if reader is not None:
            pieces = reader.push(piece.tokens) + ([] if reason is None else reader.end())
            choice.thought_tokens = reader.num_thought_tokens
            delta = self._delta(choice, pieces, is_streamed=True)
        if not (delta or reason or piece.logprobs or (self.return_ids and piece.tokens)):
            return []
        calls = "tool_calls" in delta
        part = self._choice(choice, delta if delta or reason else {"content": ""}, None if calls else reason)
        part["logprobs"] = None if piece.logprobs is None else self._logprobs(piece.logprobs)
        if self.return_ids:
            part["token_ids"] = list(piece.tokens)
        if reason == "stop" and self._num_calls[piece.choice]:
            part["finish_reason"] = None if calls else "tool_calls"
        if reason is None or not calls:
            return [part]
        return [part, self._choice(choice, {}, "tool_calls" if reason == "stop" else reason)]

    def _delta(self, choice: ChoiceState, pieces: Sequence[AnswerPiece], *, is_streamed: bool) -> dict[str, Any]:
        """The fields of a message that pieces of an answer add. Thoughts have the two names that clients read."""
        fields: dict[str, Any] = {}
        for kind, names in (("text", ("content",)), ("thought", ("reasoning_content", "reasoning"))):
            if text := "".join(piece.text for piece in pieces if piece.kind == kind):
                fields |= dict.fromkeys(names, text)
        calls = [piece.call for piece in pieces if piece.call is not None]
        first = self._num_calls[choice.job.choice] if is_streamed else 0
        calls = calls if self._several else calls[: 1 - first]
        if calls:
            prefix = f"call_{self.live.id[:12]}_{choice.job.choice}"
            fields["tool_calls"] = [
                shown_call(call, f"{prefix}_{index}", index if is_streamed else None)
                for index, call in enumerate(calls, first)
            ]
            self._num_calls[choice.job.choice] = first + len(calls)
        return fields

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
        if (reader := self._reader(choice)) is not None:
            pieces = reader.push(choice.token_ids) + reader.end()
            choice.thought_tokens = reader.num_thought_tokens
            shown["message"] |= {"content": None} | self._delta(choice, pieces, is_streamed=False)
            if shown["message"].keys() == {"role", "content", "refusal"}:
                shown["message"]["content"] = shown["message"]["content"] or ""
            if "tool_calls" in shown["message"] and choice.finish_reason == "stop":
                shown["finish_reason"] = "tool_calls"
        if self.return_ids:
            shown |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
        return shown

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


class _CharacterCount:
    """Counts the characters of a text, token by token; a character counts with its last byte."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, text: bytes) -> None:
        """Count the characters that a token completes."""
        self.characters += len(self._decoder.decode(text))


class CompletionWriter(AnswerWriter):
    """Writes text completions. prompts: each choice's prompt as text, to be echoed; empty for no echo."""

    prefix = "cmpl-"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, live: LiveRequest, fields: CompletionFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._echo, self._logprobs_wanted = bool(fields.echo), fields.logprobs is not None
        self.prompts: list[str] = [""] * len(live.jobs)
        self._offsets = [_CharacterCount() for _ in live.jobs]
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
            self._offsets[index] = _CharacterCount()
            shown["logprobs"] = self._logprobs(choice, self._prompt_entries(choice) if self._echo else [], logprobs)
        if self.return_ids:
            shown |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
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
        offset = self._offsets[choice.job.choice]
        for entry in (*prompt, *logprobs):
            token = entry if isinstance(entry, int) else entry.token_id
            columns["tokens"].append(self.token_name(token))
            columns["token_logprobs"].append(None if isinstance(entry, int) else entry.logprob)
            columns["top_logprobs"].append(None if isinstance(entry, int) else self._top(entry))
            columns["text_offset"].append(offset.characters)
            offset.add(self.facts.added_bytes(token))
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
