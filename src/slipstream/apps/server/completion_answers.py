"""Answers of `POST /v1/completions`, with the prompt's own log-probabilities where it is echoed."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence
from typing import Any

from slipstream.apps.server.answer_parts import ModelFacts
from slipstream.apps.server.answer_writer import AnswerWriter
from slipstream.apps.server.choice_state import ChoiceState, Piece
from slipstream.apps.server.live_request import LiveRequest
from slipstream.apps.server.request_fields import CompletionFields
from slipstream.core.rounds import TokenLogprobs


class _Place:
    """How many characters of a text are there, token by token; a character counts with its last byte."""

    def __init__(self) -> None:
        self.characters = 0
        self._decoder = getincrementaldecoder("utf-8")("replace")

    def add(self, text: bytes) -> None:
        """Go on behind a token."""
        self.characters += len(self._decoder.decode(text))


class CompletionWriter(AnswerWriter):
    """Texts. prompts: those of the choices as text, to be echoed; empty for none."""

    prefix = "cmpl-"
    whole_kind = chunk_kind = "text_completion"

    def __init__(self, live: LiveRequest, fields: CompletionFields, facts: ModelFacts) -> None:
        super().__init__(live, fields, facts)
        self._echo, self._logprobs_wanted = bool(fields.echo), fields.logprobs is not None
        self.prompts: list[str] = [""] * len(live.jobs)
        self._places = [_Place() for _ in live.jobs]
        self._opened: set[int] = set()

    def opening(self, choice: ChoiceState) -> dict[str, Any] | None:
        """Nothing: the echo comes with the first piece, once its log-probabilities are known."""
        return None

    def parts(self, choice: ChoiceState, piece: Piece) -> list[dict[str, Any]]:
        """New text, with its log-probabilities; the echoed prompt before the first."""
        echoed = self._take_echo(choice)
        text = (self.prompts[choice.job.choice] if echoed else "") + piece.text
        if not (text or piece.finish_reason or piece.logprobs or (self.return_ids and piece.tokens)):
            return []
        found = self._choice(choice, text, piece.finish_reason)
        if self._logprobs_wanted:
            prompt = self._prompt_entries(choice) if echoed else []
            found["logprobs"] = self._logprobs(choice, prompt, piece.logprobs or ())
        return [found | ({"token_ids": list(piece.tokens)} if self.return_ids else {})]

    def empty_part(self, choice: ChoiceState) -> dict[str, Any]:
        """No new text."""
        return self._choice(choice, "")

    def whole_choice(self, choice: ChoiceState) -> dict[str, Any]:
        """The text."""
        index = choice.job.choice
        found = self._choice(choice, self.prompts[index] * self._echo + choice.text, choice.finish_reason)
        if self._logprobs_wanted:
            told = [one for done in choice.rounds for one in done.logprobs or ()]
            self._places[index] = _Place()
            found["logprobs"] = self._logprobs(choice, self._prompt_entries(choice) if self._echo else [], told)
        if self.return_ids:
            found |= {"token_ids": choice.token_ids, "prompt_token_ids": choice.prompt}
        return found

    def _take_echo(self, choice: ChoiceState) -> bool:
        first = choice.job.choice not in self._opened
        self._opened.add(choice.job.choice)
        return self._echo and first

    def _choice(self, choice: ChoiceState, text: str, reason: str | None = None) -> dict[str, Any]:
        return {"index": choice.job.choice, "text": text, "logprobs": None, "finish_reason": reason}

    def _prompt_entries(self, choice: ChoiceState) -> list[TokenLogprobs | int]:
        """The prompt's tokens: the first has no log-probability."""
        return [choice.prompt[0], *(choice.prompt_logprobs or ())]

    def _logprobs(
        self, choice: ChoiceState, prompt: Sequence[TokenLogprobs | int], told: Sequence[TokenLogprobs]
    ) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        place = self._places[choice.job.choice]
        for one in (*prompt, *told):
            token = one if isinstance(one, int) else one.token_id
            found["tokens"].append(self.token_name(token))
            found["token_logprobs"].append(None if isinstance(one, int) else one.logprob)
            found["top_logprobs"].append(None if isinstance(one, int) else self._top(one))
            found["text_offset"].append(place.characters)
            place.add(self.facts.added_bytes(token))
        return found

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        """The likeliest tokens and the one that stands there. Of two tokens with one text the likelier has the name."""
        named: dict[str, float] = {}
        for token, logprob in one.top:
            name = self.token_name(token)
            named[f"token_id:{token}" if name in named else name] = logprob
        if all(token != one.token_id for token, _ in one.top):
            name = self.token_name(one.token_id)
            named[f"token_id:{one.token_id}" if name in named else name] = one.logprob
        return named
