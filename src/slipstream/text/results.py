"""The results of a request: a `Result`, a `Stream` of `Chunk`s, and `Stats`, which are computed from rounds alone."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import asdict, dataclass, field, replace
from heapq import heappop, heappush
from math import isfinite
from typing import TYPE_CHECKING, Any

from slipstream.checks import counted
from slipstream.core.rounds import FinishReason, Origin, Round, RowDraft, TokenLogprobs
from slipstream.core.types import Row
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.text.answer_reader import answer_tokenizer, begins_in_thought
from slipstream.text.detokenizer import TokenTexts, new_text, read_as_committed, text_of
from slipstream.text.round_view import RoundLines, percent, round_lines, to_html
from slipstream.tokenization.answer_parser import AnswerParser, AnswerPiece
from slipstream.tokenization.tokenizer import Tokenizer, ToolCall

if TYPE_CHECKING:
    from pandas import DataFrame

SHOWN = 40  # characters of a text in a repr


@dataclass
class Stats:
    """Totals over rounds; ratios are derived.

    Positions are places in a draft, depths in a tree: a token counts as accepted there if any of the tree's was.
    Forced tokens come from constraints and count neither as drafted nor as accepted.
    Seconds are counted once per step, so the rows of a batch that share a step share its time: the totals of one row
    say how long it was running, not what it cost alone.
    """

    num_rounds: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    num_rejected_rounds: int = 0
    accepted_prediction_tokens: int | None = None  # committed ones from predictions; None if no request had one
    rejected_prediction_tokens: int | None = None  # the others that were verified
    experts_read: float = 0.0  # of a mixture, the sum over `num_expert_steps` of the distinct experts a layer read
    num_expert_steps: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    accept_seconds: float = 0.0
    prefill_seconds: float = 0.0
    total_seconds: float = 0.0
    # plain decoding's, by the planner's measured costs, for the tokens that took `compared_seconds`; both without
    # reading prompts, and 0 if costs were not measured or nothing could be drafted
    plain_seconds: float = 0.0
    compared_seconds: float = 0.0
    lossless: bool = True
    accepted_per_position: list[int] = field(default_factory=list)
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_lengths: list[int] = field(default_factory=list)  # drafting rounds that accepted 0, 1, 2, ... tokens

    @classmethod
    def of(cls, rounds: Iterable[Round], *, lossless: bool = True) -> Stats:
        """Fold rounds, of one row or of many."""
        stats, steps = cls(lossless=lossless), dict[int, list[Round]]()
        for round in rounds:
            steps.setdefault(round.step, []).append(round)
        for step in steps.values():
            stats.add_step(step)
        return stats

    def add_step(self, rounds: Sequence[Round]) -> None:
        """Fold all rounds of one more step that are to be counted."""
        for round in rounds:
            self._count(round)
        first = rounds[0]  # what follows is the same in all of them
        self.draft_seconds += first.seconds.draft
        self.verify_seconds += first.seconds.verify
        self.accept_seconds += first.seconds.accept
        self.prefill_seconds += first.seconds.prefill
        self.total_seconds += first.seconds.total
        if first.experts_read is not None:
            self.experts_read += first.experts_read
            self.num_expert_steps += 1
        if first.plain_seconds is not None:
            self.plain_seconds += first.plain_seconds * sum(len(round.tokens) for round in rounds) / len(rounds)
            self.compared_seconds += first.seconds.total - first.seconds.prefill
        self.num_steps += 1

    def __add__(self, other: Stats) -> Stats:
        """The totals over the rounds of both; lossless if both are."""
        if not isinstance(other, Stats):
            return NotImplemented
        total = Stats(lossless=self.lossless and other.lossless)
        for name in vars(total).keys() - {"lossless"}:
            first, second = getattr(self, name), getattr(other, name)
            if isinstance(first, list):
                value: Any = [a + b for a, b in itertools.zip_longest(first, second, fillvalue=0)]
            else:  # counts of predictions are None without any
                value = second if first is None else first if second is None else first + second
            setattr(total, name, value)
        return total

    def __radd__(self, zero: int) -> Stats:
        """Lets `sum` add several."""
        return self if zero == 0 else NotImplemented

    def _count(self, round: Round) -> None:
        self.num_rounds += 1
        self.num_output_tokens += len(round.tokens)
        if not round.draft:
            self.num_rejected_rounds += round.rejected
            if round.num_prediction_tokens is not None:
                self.accepted_prediction_tokens = self.accepted_prediction_tokens or 0
                self.rejected_prediction_tokens = self.rejected_prediction_tokens or 0
            return
        accepted_with_forced, round = round.num_accepted_tokens, round.without_forced
        self.num_forced_tokens += accepted_with_forced - round.num_accepted_tokens
        self.num_draft_tokens += round.num_draft_tokens
        self.num_accepted_tokens += round.num_accepted_tokens
        self.num_rejected_rounds += round.rejected
        if round.num_prediction_tokens is not None:
            accepted = min(round.num_prediction_tokens, round.num_accepted_tokens)
            rejected = round.num_prediction_tokens - accepted
            self.accepted_prediction_tokens = (self.accepted_prediction_tokens or 0) + accepted
            self.rejected_prediction_tokens = (self.rejected_prediction_tokens or 0) + rejected
        longer = round.num_accepted_tokens + 1 - len(self.accepted_lengths)
        self.accepted_lengths.extend([0] * longer)
        self.accepted_lengths[round.num_accepted_tokens] += 1
        num_levels = round.num_levels
        longer = num_levels - len(self.drafted_per_position)
        self.drafted_per_position.extend([0] * longer)
        self.accepted_per_position.extend([0] * longer)
        for position in range(num_levels):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < round.num_accepted_tokens

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted / drafted; None if nothing was drafted."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def alpha(self) -> float | None:
        """Accepted / tested, where a round that ended in a rejection tested one token more than it accepted."""
        tested = self.num_accepted_tokens + self.num_rejected_rounds
        return self.num_accepted_tokens / tested if tested else None

    @property
    def block_efficiency(self) -> float:
        """Output tokens per round of a row, bonus included (Leviathan et al. 2023, section 2)."""
        return self.num_output_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def experts_per_round(self) -> float | None:
        """Distinct experts that a round's forward read in a layer, on average; None for a dense model."""
        return self.experts_read / self.num_expert_steps if self.num_expert_steps else None

    @property
    def overhead_seconds(self) -> float:
        """Seconds outside drafting, verifying, accepting and prefill."""
        parts = self.draft_seconds + self.verify_seconds + self.accept_seconds + self.prefill_seconds
        return max(0.0, self.total_seconds - parts)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of total time, prefill included."""
        return self.num_output_tokens / self.total_seconds if self.total_seconds else 0.0

    @property
    def estimated_speed_up(self) -> float | None:
        """Speed relative to plain decoding, by the planner's measured costs, prompts not counted; None if unknown."""
        return self.plain_seconds / self.compared_seconds if self.compared_seconds else None

    def __repr__(self) -> str:
        drafts = "nothing drafted" if self.acceptance_rate is None else f"{percent(self.acceptance_rate)} accepted"
        rounds = f"{self.block_efficiency:.1f} per forward, {drafts}"
        tokens, speed = counted(self.num_output_tokens, "token"), f"{self.tokens_per_second:.1f} tokens per second"
        return f"Stats({tokens}, {rounds}, {speed})"

    def to_dict(self) -> dict[str, Any]:
        """All totals and ratios as JSON values."""
        ratios = (
            "acceptance_rate",
            "alpha",
            "block_efficiency",
            "experts_per_round",
            "overhead_seconds",
            "tokens_per_second",
            "estimated_speed_up",
        )
        return asdict(self) | {name: getattr(self, name) for name in ratios}

    def to_dataframe(self) -> DataFrame:
        """`to_dict` as a table of one row, for `pandas.concat`; needs pandas."""
        try:
            import pandas
        except ImportError:
            raise SlipstreamError("to_dataframe needs pandas; run: pip install pandas") from None
        return pandas.DataFrame([self.to_dict()])


@dataclass(frozen=True)
class Result:
    """The answer to a prompt. token_ids exclude the prompt; text is cut before a stop string; `str` is the text.

    alternatives: the other n - 1 texts of a request with n > 1, each a `Result` with the seed that repeats it.
    `text` is all of it; `reasoning`, `content` and `tool_calls` are its parts.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    rounds: list[Round]
    seed: int
    prompt_token_ids: list[int]
    error: str | None = None
    alternatives: list[Result] = field(default_factory=list)
    tokenizer: Tokenizer | None = field(default=None, repr=False, compare=False)
    parts: tuple[AnswerPiece, ...] | None = field(default=None, repr=False)  # None: all of it is content

    @property
    def reasoning(self) -> str:
        """The model's thoughts before its answer, without marks."""
        return "".join(piece.text for piece in self.parts or () if piece.kind == "thought")

    @property
    def content(self) -> str:
        """The text without thoughts and calls."""
        return self.text if self.parts is None else "".join(p.text for p in self.parts if p.kind == "text")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the tools that were given."""
        return tuple(piece.call for piece in self.parts or () if piece.call is not None)

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        efficiency = f"{self.stats.block_efficiency:.1f} per forward"
        end = self.finish_reason if self.error is None else f"error: {self.error}"
        return f"Result({_shortened(self.text)!r}, {counted(len(self.token_ids), 'token')}, {efficiency}, {end})"

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """One record per output token, if the request asked for them with `SamplingParams(logprobs=K)`.

        `token` and `top_tokens` of a record are the texts of its tokens; None and () if there is no tokenizer.
        """
        by_round = [round.logprobs for round in self.rounds if round.logprobs is not None]
        if not by_round:
            return None
        return with_token_texts([entry for entries in by_round for entry in entries], self.tokenizer)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tokenizer as JSON values; `stats` with its ratios, each of `rounds` as a dictionary."""
        plain = ("text", "reasoning", "content", "token_ids", "finish_reason", "error", "seed", "prompt_token_ids")
        return {name: getattr(self, name) for name in plain} | {
            "stats": self.stats.to_dict(),
            "logprobs": None if self.logprobs is None else [logprobs_dict(token) for token in self.logprobs],
            "rounds": [_round(round) for round in self.rounds],
            "alternatives": [other.to_dict() for other in self.alternatives],
            "tool_calls": [call.to_dict() for call in self.tool_calls],
        }

    def debug(self) -> RoundLines:
        """Every round as a line: accepted, rejected and target-chosen tokens, with a legend.

        Terminals and notebooks show it in colors if it is the value of a line; `print` writes it without colors.
        """
        return round_lines(self.rounds, self.tokenizer)

    def _repr_html_(self) -> str:
        return to_html(self.rounds, self.tokenizer)


def logprobs_dict(entry: TokenLogprobs) -> dict[str, Any]:
    """Log-probabilities as JSON values, which have no minus infinity: null for a probability of 0."""
    top = [(token, value if isfinite(value) else None) for token, value in entry.top]
    return asdict(entry) | {"logprob": entry.logprob if isfinite(entry.logprob) else None, "top": top}


def with_parts(result: Result, tokenizer: Tokenizer | None, tools: Sequence[Mapping[str, Any]]) -> Result:
    """An answer, and its alternatives, separated into thoughts, text and calls of tools."""
    separating = answer_tokenizer(tokenizer, tools)
    if separating is None:
        return result
    parser = AnswerParser(
        separating.answer_form(), tools, in_thought=begins_in_thought(separating, result.prompt_token_ids)
    )
    marked = separating.decode_marked(result.token_ids)
    has_hidden_marks = tokenizer is not None and marked != tokenizer.decode(result.token_ids)
    pieces = parser.feed(marked if has_hidden_marks else result.text) + parser.end()
    others = [with_parts(other, tokenizer, tools) for other in result.alternatives]
    return replace(result, alternatives=others, parts=tuple(pieces))


def result_of(row: Row, tokenizer: Tokenizer | None, *, lossless: bool) -> Result:
    """The result of a finished row. lossless: it has the target's distribution."""
    assert row.finish_reason is not None
    return Result(
        text=text_of(row, tokenizer),
        token_ids=row.output,
        finish_reason=row.finish_reason,
        stats=Stats.of(row.rounds, lossless=lossless),
        rounds=row.rounds,
        seed=row.seed,
        prompt_token_ids=row.tokens[: row.prompt_length],
        error=None if row.error is None else one_line(row.error),
        tokenizer=tokenizer,
    )


def with_token_texts(reported: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[TokenLogprobs]:
    """Log-probabilities with the texts of their tokens, if there is a tokenizer."""
    if tokenizer is None:
        return list(reported)
    texts = TokenTexts(tokenizer)
    return [
        replace(entry, token=texts.of(entry.token_id), top_tokens=tuple(texts.of(token) for token, _ in entry.top))
        for entry in reported
    ]


def _round(round: Round) -> dict[str, Any]:
    fields = asdict(replace(round, origin=RowDraft(), logprobs=None)) | {"forced": round.forced}
    return {name: value for name, value in fields.items() if name not in ("origin", "logprobs")}


@dataclass(frozen=True)
class Chunk:
    """The output of one round; `str` is its text."""

    text: str  # may lag behind `token_ids` while a character or a stop string is incomplete
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    round: Round

    @property
    def finish_reason(self) -> FinishReason | None:
        """Reason why the output ended with this chunk; None if it did not."""
        return self.round.finish_reason

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        end = "" if self.finish_reason is None else f", {self.finish_reason}"
        accepted = sum(origin in ("accepted", "forced") for origin in self.origins)
        return f"Chunk({_shortened(self.text)!r}, {counted(len(self.token_ids), 'token')}, {accepted} accepted{end})"


class Stream(Iterator[Chunk]):
    """The chunks of one answer as they come; when they have ended, `result` is the whole answer.

    Several threads may use it: each chunk goes to one of them, and `close` waits for the current round.
    """

    def __init__(self, chunks: Generator[Chunk, None, Result]) -> None:
        self._chunks, self._turn = chunks, threading.RLock()
        self._result: Result | None = None

    def __repr__(self) -> str:
        return f"Stream({'not at its end' if self._result is None else repr(self._result)})"

    def __next__(self) -> Chunk:
        with self._turn:
            try:
                return next(self._chunks)
            except StopIteration as end:
                self._result = end.value or self._result
                raise

    @property
    def result(self) -> Result:
        """The result that `generate` would have returned; UsageError before the last chunk was read."""
        if self._result is None:
            raise UsageError("stream.result before all chunks were read; allowed: after the loop over them")
        return self._result

    def close(self) -> None:
        """Stop here; the rest is not generated, and there is no `result`."""
        with self._turn:
            self._chunks.close()


class AsyncStream(AsyncIterator[Chunk]):
    """A `Stream` for `async for`: its rounds are computed in a thread, and the event loop goes on meanwhile.

    thread: an executor that computes one round at a time, so that streams that share it take turns.
    If a wait is cancelled, by a timeout for example, the next call gets its chunk.
    """

    def __init__(self, stream: Stream, thread: Executor) -> None:
        self._stream, self._thread = stream, thread
        self._numbers = itertools.count()
        self._unclaimed: list[tuple[int, Future[Chunk | None]]] = []  # a heap: the earliest first
        self._is_closed = False

    def __repr__(self) -> str:
        return f"Async{self._stream!r}"

    async def __anext__(self) -> Chunk:
        if not self._unclaimed:
            self._unclaimed.append((next(self._numbers), self._thread.submit(next, self._stream, None)))
        number, future = heappop(self._unclaimed)
        try:
            chunk = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            if not (future.cancelled() or self._is_closed):  # its round has begun
                heappush(self._unclaimed, (number, future))
            raise
        if chunk is None:
            raise StopAsyncIteration
        return chunk

    @property
    def result(self) -> Result:
        """The result that `generate` would have returned; UsageError before the last chunk was read."""
        return self._stream.result

    async def aclose(self) -> None:
        """Stop here; the rest is not generated, and there is no `result`."""
        self._is_closed = True
        while self._unclaimed:
            self._unclaimed.pop()[1].cancel()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._stream.close)


def chunks_of(row: Row, rounds: Iterable[Round], tokenizer: Tokenizer | None) -> Iterator[Chunk]:
    """A row's rounds as they come, with their text; at the end raises the row's error, if it failed."""
    read_as_committed(row, tokenizer)
    for round in rounds:
        yield Chunk(new_text(row, tokenizer), round.tokens, round.origins, round)
    if row.error is not None:
        raise row.error


def _shortened(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def statistics_line(stats: Stats, drafter: str) -> str:
    """Tokens, speed and acceptance in one line."""
    rate = "nothing drafted" if stats.acceptance_rate is None else f"acceptance rate {percent(stats.acceptance_rate)}"
    efficiency = f"{stats.block_efficiency:.2f} tokens per forward"
    speed = f"{counted(stats.num_output_tokens, 'token')}, {stats.tokens_per_second:.1f} tok/s"
    forced = f", {stats.num_forced_tokens} forced by the constraint" if stats.num_forced_tokens else ""
    speed_up = stats.estimated_speed_up if stats.num_draft_tokens else None
    about = "" if speed_up is None else f", about {speed_up:.1f}x plain decoding"
    line = f"{speed}, {drafter}: {rate}, {efficiency}{forced}{about}"
    if stats.accepted_prediction_tokens is None:
        return line
    counts = f"{stats.accepted_prediction_tokens} accepted, {stats.rejected_prediction_tokens} rejected"
    return f"{line}, prediction: {counts}"
