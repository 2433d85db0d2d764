"""A question and its answer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from slipstream.core.rounds import FinishReason, Round
from slipstream.sampling.params import SamplingParams
from slipstream.text.results import Stats, statistics_line


@dataclass(frozen=True)
class Turn:
    """A question, its answer, and how the answer came about.

    params: as used, with the seed that was chosen. prefilled: prompt tokens the target had to read, the others being in
    its KV cache; the last few of a prompt are read together with the first draft and not counted. coupled: every token
    was the target's own draw.
    """

    user: str
    answer: str
    target: str
    drafter: str
    prompt_ids: list[int]
    params: SamplingParams
    rounds: list[Round]
    finish_reason: FinishReason | Literal["interrupted"]
    prefilled: int
    lossless: bool
    coupled: bool

    @property
    def token_ids(self) -> list[int]:
        """The answer's tokens."""
        return [token for done in self.rounds for token in done.tokens]

    @property
    def stats(self) -> Stats:
        """The answer's statistics."""
        return Stats.of(self.rounds, lossless=self.lossless)

    @property
    def summary(self) -> str:
        """One line: tokens, speed, drafter, acceptance, end."""
        return f"{statistics_line(self.stats, self.drafter)}, ended by {self.finish_reason}"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the rounds, for JSON."""
        kept = ("user", "answer", "target", "drafter", "finish_reason", "token_ids", "prefilled")
        counts = {"prompt_tokens": len(self.prompt_ids), "params": self.params.to_dict(), "stats": self.stats.to_dict()}
        return {name: getattr(self, name) for name in kept} | counts


def shortened(params: SamplingParams, max_tokens: int) -> SamplingParams:
    """The same options with another limit."""
    return replace(params, max_tokens=max_tokens, min_tokens=min(params.min_tokens, max_tokens))
