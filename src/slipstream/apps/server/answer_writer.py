"""An answer as OpenAI's objects, whole or chunk by chunk; the endpoints differ in how a choice looks."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar

from slipstream.apps.server.answer_parts import ModelFacts, receipt, shown_round, speculative_decoding, timings, usage
from slipstream.apps.server.choice_state import ChoiceState, Piece
from slipstream.apps.server.event_stream import encoded
from slipstream.apps.server.live_request import Event, LiveRequest
from slipstream.apps.server.request_fields import SamplingFields, StreamOptions


class AnswerWriter(ABC):
    """Folds a request's events."""

    prefix: ClassVar[str]
    whole_kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    def __init__(self, live: LiveRequest, fields: SamplingFields, facts: ModelFacts) -> None:
        self.live, self.facts = live, facts
        self.choices = [ChoiceState(job, facts.tokenizer, facts.lossless) for job in live.jobs]
        self._n = fields.n or 1
        self._options = fields.stream_options or StreamOptions()
        self._rounds = fields.slipstream is not None and fields.slipstream.rounds
        self._told: set[int] = set()
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

    @abstractmethod
    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """The first chunk of a choice, sent before its first token; None for none."""

    @abstractmethod
    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """A choice's part of every chunk that a piece gives rise to: mostly one; none if there is nothing to send."""

    @abstractmethod
    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """A finished choice."""

    def note(self, event: Event) -> None:
        """Take in an event of an answer that is told whole."""
        self.choices[event.choice].take(event)

    def sent(self, chunk: dict[str, Any]) -> bytes:
        """A chunk as a server-sent event, with what all of them begin with."""
        return b"%b%b\n\n" % (self._begin, encoded(chunk)[1:])

    def take(self, event: Event) -> list[dict[str, Any]]:
        """The chunks that an event gives rise to, without what all of them begin with."""
        choice = self.choices[event.choice]
        piece = choice.take(event)
        parts: list[dict[str, Any]] = []
        if choice.started is not None and event.choice not in self._told:
            self._told.add(event.choice)
            opening = self.opening(choice)
            parts += [] if opening is None else [opening]
        if piece is not None:
            new = self.parts(choice, piece)
            if self._rounds or piece.finish_reason is not None:
                return self._with_reports(choice, piece, parts, new)
            parts += new
        return [self._chunk(part) for part in parts]

    def _with_reports(
        self, choice: ChoiceState, piece: Piece, earlier: list[dict[str, Any]], new: list[dict[str, Any]]
    ) -> list[dict[str, Any]]:
        """The chunks of a piece, the last with what is told of its round, of a text that ends, and of the answer."""
        showing = self._rounds and piece.round is not None
        if not new and showing:
            new = [self.empty_part(choice)]
        chunks = [self._chunk(part) for part in (*earlier, *new)]
        if not new:
            return chunks
        chunk = chunks[-1]
        if showing:
            chunk["slipstream"] = shown_round(piece, len(choice.rounds) - 1, self.facts)
        if self._rounds and piece.finish_reason is not None:
            chunk["slipstream"] = chunk.get("slipstream", {}) | {"receipt": receipt(choice, self.facts)}
        if all(one.finish_reason is not None for one in self.choices):
            chunk |= self._report()
        return chunks

    @abstractmethod
    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        """A choice's part without news."""

    def closing(self) -> dict[str, Any] | None:
        """The chunk after the last, with the usage of the whole request, if it was asked for."""
        return {"choices": [], "usage": usage(self.choices, self._n)} if self._options.include_usage else None

    def whole(self) -> dict[str, Any]:
        """The finished answer in one object."""
        answer: dict[str, Any] = self._head | {"object": self.whole_kind}
        answer["choices"] = [self.whole_choice(choice) for choice in self.choices]
        answer["usage"] = usage(self.choices, self._n)
        answer |= self._report()
        if self._rounds:
            receipts = [receipt(choice, self.facts) for choice in self.choices]
            answer["slipstream"] = {"receipt": receipts[0]} if len(receipts) == 1 else {"receipts": receipts}
        return answer

    def _report(self) -> dict[str, Any]:
        rounds = [done for choice in self.choices for done in choice.rounds]
        return {
            "metrics": {"speculative_decoding": speculative_decoding(rounds)},
            "timings": timings(self.choices[0]),
        }

    def _chunk(self, part: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [part]}
        if self._options.continuous_usage_stats:
            chunk["usage"] = usage(self.choices, self._n)
        elif self._options.include_usage:
            chunk["usage"] = None
        return chunk

    def token_name(self, token: int) -> str:
        """A token in a report of log-probabilities."""
        return f"token_id:{token}" if self.ids_as_text else self.facts.token_text(token)
