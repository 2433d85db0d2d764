"""Answers of `POST /v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slipstream.apps.server.answer_parts import ModelFacts
from slipstream.apps.server.answer_writer import AnswerWriter
from slipstream.apps.server.choice_state import ChoiceState, Piece
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.request_fields import ChatFields
from slipstream.apps.server.tool_answers import ToolWatch, shown_calls
from slipstream.core.rounds import TokenLogprobs


class ChatWriter(AnswerWriter):
    """Messages of the assistant."""

    prefix = "chatcmpl-"
    whole_kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def __init__(self, live: LiveRequest, fields: ChatFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        tools = () if fields.tool_choice == "none" else fields.tools or ()
        several = fields.parallel_tool_calls is not False
        self._watches = [ToolWatch(facts.tokenizer, tools, several=several) for _ in self.choices]

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """The role."""
        return self._choice(choice, {"role": "assistant", "content": ""})

    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """New text, with its log-probabilities; calls come before the chunk with the reason, as clients expect them."""
        watch = self._watches[piece.choice]
        text, parsed, reason = watch.passed(piece), None, piece.finish_reason
        if reason is not None:
            parsed = watch.calls(choice)
            text += "" if parsed else watch.held_back(choice)
        if not (text or reason or piece.logprobs or (self.return_ids and piece.tokens)):
            return []
        delta: dict[str, Any] = {"content": text} if text or not reason else {}
        if parsed is not None:
            delta["tool_calls"] = shown_calls(parsed, self._call_prefix(choice), numbered=True)
        found = self._choice(choice, delta, None if parsed else reason)
        found["logprobs"] = None if piece.logprobs is None else self._logprobs(piece.logprobs)
        if self.return_ids:
            found["token_ids"] = list(piece.tokens)
        if parsed is None:
            return [found]
        return [found, self._choice(choice, {}, "tool_calls" if reason == "stop" else reason)]

    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        """No new text."""
        return self._choice(choice, {"content": ""})

    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """The message."""
        told = [done.logprobs for done in choice.rounds if done.logprobs is not None]
        found: dict[str, Any] = {
            "index": choice.job.choice,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "finish_reason": choice.finish_reason,
            "logprobs": self._logprobs([one for part in told for one in part]) if told else None,
        }
        if (parsed := self._watches[choice.job.choice].calls(choice)) is not None:
            calls = shown_calls(parsed, self._call_prefix(choice), numbered=False)
            found["message"] |= {"content": parsed.content or None, "tool_calls": calls}
            found["finish_reason"] = "tool_calls" if choice.finish_reason == "stop" else choice.finish_reason
        if self.return_ids:
            found |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
        return found

    def _call_prefix(self, choice: ChoiceState) -> str:
        return f"{self.live.id[:12]}_{choice.job.choice}"

    def _choice(self, choice: ChoiceState, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": choice.job.choice, "delta": delta, "logprobs": None, "finish_reason": reason}

    def _logprobs(self, told: Sequence[TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._entry(one.token_id, one.logprob) | {"top_logprobs": [self._entry(*other) for other in one.top]}
            for one in told
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        own = self.facts.token_bytes(token)
        return {"token": self.token_name(token), "logprob": logprob, "bytes": None if own is None else list(own)}
