"""What a request becomes: a `Result`, or `Chunk`s as it comes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rich.text import Text

from slipstream.core.rounds import FinishReason, Origin, Round, TokenLogprobs
from slipstream.core.types import Row
from slipstream.sampling.processors import params_of
from slipstream.text.detokenizer import Tokenizer, VisibleText, visible_text
from slipstream.text.round_view import round_lines, to_html
from slipstream.text.stats import Stats


@dataclass(frozen=True)
class Result:
    """What a prompt became. token_ids exclude the prompt; text is cut before a stop string.

    alternatives: the other n - 1 texts of a request with n > 1, each a `Result` with the seed that repeats it.
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

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        """Of each output token, if the request asked for them with `SamplingParams(logprobs=K)`."""
        told = [done.logprobs for done in self.rounds if done.logprobs is not None]
        return [one for round_ in told for one in round_] if told else None

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tokenizer, as JSON has it; `stats` with its ratios, `rounds` a dictionary each."""
        plain = ("text", "token_ids", "finish_reason", "error", "seed", "prompt_token_ids")
        return {name: getattr(self, name) for name in plain} | {
            "stats": self.stats.to_dict(),
            "logprobs": None if self.logprobs is None else [asdict(one) for one in self.logprobs],
            "rounds": [_round(done) for done in self.rounds],
            "alternatives": [other.to_dict() for other in self.alternatives],
        }

    def debug(self) -> Text:
        """Every round as a line: accepted, rejected and target-chosen tokens, with a legend; print it with rich."""
        return round_lines(self.rounds, self.tokenizer)

    def _repr_html_(self) -> str:
        return to_html(self.rounds, self.tokenizer)


def result_of(row: Row, tokenizer: Tokenizer | None, *, lossless: bool) -> Result:
    """What a finished row became. lossless: whether it keeps the target's distribution."""
    assert row.finish_reason is not None
    text = "" if tokenizer is None else visible_text(tokenizer, params_of(row), row.output)
    return Result(
        text=text,
        token_ids=row.output,
        finish_reason=row.finish_reason,
        stats=Stats.of(row.rounds, lossless=lossless),
        rounds=row.rounds,
        seed=row.seed,
        prompt_token_ids=row.tokens[: row.prompt_length],
        error=None if row.error is None else str(row.error),
        tokenizer=tokenizer,
    )


def _round(done: Round) -> dict[str, Any]:
    told = asdict(replace(done, note=None, logprobs=None))
    return {name: value for name, value in told.items() if name not in ("note", "logprobs")}


@dataclass(frozen=True)
class Chunk:
    """What one round added. text may lag behind token_ids while a character or a stop string is incomplete."""

    text: str
    token_ids: tuple[int, ...]
    origins: tuple[Origin, ...]
    round: Round


def chunks_of(row: Row, rounds: Iterable[Round], tokenizer: Tokenizer | None) -> Iterator[Chunk]:
    """A row's rounds as they come, with their text; raises what the row failed with."""
    text = None if tokenizer is None else VisibleText(tokenizer, params_of(row))
    for done in rounds:
        piece = ""
        if text is not None:
            piece = "".join(map(text.push, done.tokens))
            piece += text.flush() if done.finish_reason is not None else ""
        yield Chunk(piece, done.tokens, done.origins, done)
    if row.error is not None:
        raise row.error
