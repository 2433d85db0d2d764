"""One text of an answer as it grows: rounds in, pieces of text and their tokens out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from slipstream.apps.server.error_objects import ApiError, as_api_error, refused
from slipstream.apps.server.live_request import Committed, Ended, Event, Job, Scored, Started
from slipstream.core.rounds import FinishReason, Round, TokenLogprobs
from slipstream.errors import SlipstreamError, first_line
from slipstream.sampling.processors import params_of
from slipstream.text.detokenizer import Tokenizer, VisibleText
from slipstream.text.results import Stats


class Piece(NamedTuple):
    """What an event added to a choice. round: None for the echo of a prompt and for an end without tokens."""

    choice: int
    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    round: Round | None = None
    finish_reason: FinishReason | None = None


@dataclass
class ChoiceState:
    """Folds the events of one job."""

    job: Job
    tokenizer: Tokenizer | None
    lossless: bool
    rounds: list[Round] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    cached: int = 0
    started: float | None = None
    first: float | None = None
    last: float | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None

    def __post_init__(self) -> None:
        self._stats = Stats(lossless=self.lossless)
        self._visible = None if self.tokenizer is None else VisibleText(self.tokenizer, params_of(self.job.row))

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids."""
        return self.job.row.tokens[: self.job.row.prompt_length]

    @property
    def token_ids(self) -> list[int]:
        """The answer's token ids so far."""
        return [token for done in self.rounds for token in done.tokens]

    @property
    def stats(self) -> Stats:
        """Of the rounds so far; each is folded once, when it is first asked for."""
        for done in self.rounds[self._stats.num_rounds :]:
            self._stats.add_step([done])
        return self._stats

    def take(self, event: Event) -> Piece | None:
        """Note an event; returns what it added to the answer. ApiError if the row failed."""
        if isinstance(event, Committed):
            self.first = self.first or event.at
            self.last = event.at
            return self._commit(event.round)
        if isinstance(event, Started):
            self.cached, self.started = event.cached, event.at
        elif isinstance(event, Scored):
            self.prompt_logprobs = event.logprobs
        elif isinstance(event, Ended) and self.finish_reason is None:
            return self._end(event)
        return None

    def _commit(self, done: Round) -> Piece | None:
        self.rounds.append(done)
        if done.finish_reason == "error":
            return None  # told by the end of the job
        text = ""
        if self._visible is not None:
            text = "".join(map(self._visible.push, done.tokens))
            text += self._visible.flush() if done.finish_reason is not None else ""
        self.text += text
        self.finish_reason = done.finish_reason
        return Piece(self.job.choice, text, done.tokens, done.logprobs, done, done.finish_reason)

    def _end(self, event: Ended) -> Piece:
        if event.reason in ("error", "cancelled"):
            raise _failure(event, self.job.limits)
        self.finish_reason = event.reason
        return Piece(self.job.choice, "", finish_reason=event.reason)


def _failure(event: Ended, limits: str | None) -> ApiError:
    if event.reason == "cancelled":
        return ApiError(503, "the request was cancelled")
    if isinstance(event.error, SlipstreamError):
        return refused(first_line(event.error), limits)
    return as_api_error(event.error or RuntimeError("a row failed without a reason"))
