"""The setting `num_draft_tokens` and how it is spelled. Needs no PyTorch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.user_objects import is_users
from slipstream.errors import UsageError, did_you_mean

SPELLED = re.compile(
    r"(auto|chain)|(heuristic)(?::([1-9]\d?))?|(confidence):(0?\.(?:0[1-9]|[1-9]\d?))|([1-9]\d?)x([2-9])"
)
WORDS = "auto", "chain", "heuristic", "confidence"
ALLOWED = (
    f"'auto', 'chain', a whole number from 0 to {MAX_DRAFT_TOKENS}, 'heuristic', 'heuristic:MOST' up to "
    f"{MAX_DRAFT_TOKENS}, 'confidence:CHANCE' from 0.01 to 0.99, a tree 'DEPTHxWIDTH' at least 2 wide, of at most "
    f"{MAX_DRAFT_TOKENS} tokens, or 'MODULE:NAME' of a policy"
)


@dataclass(frozen=True)
class LengthChoice:
    """The setting `num_draft_tokens`, parsed."""

    kind: Literal["auto", "fixed", "heuristic", "confidence", "user"]
    count: int | None = None  # tokens of "fixed", or the upper limit of "heuristic" if the user set one
    confidence: float = 0.0  # probability below which a draft model stops; 0 without
    siblings: int = 0  # of a tree, alternatives to each token of its chain, included in `count`; -1: as many as pay
    policy: str = ""  # of "user": what `user_object` finds the policy by

    @staticmethod
    def parse(value: object) -> LengthChoice:
        """Read `num_draft_tokens` as the user wrote it; UsageError says what is allowed."""
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_DRAFT_TOKENS:
            return LengthChoice("fixed", value)
        match = SPELLED.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            word = str(value).partition(":")[0]
            if isinstance(value, str) and word not in WORDS and is_users("num_draft_tokens", value):
                return LengthChoice("user", policy=value)
            near = did_you_mean(word, *WORDS)
            raise UsageError(f"num_draft_tokens={value!r}; allowed: {ALLOWED}{near}")
        if match[4]:
            return LengthChoice("confidence", confidence=float(match[5]))
        if match[6]:
            return LengthChoice("fixed", int(match[6]) * int(match[7]), siblings=int(match[7]) - 1)
        if match[2]:
            return LengthChoice("heuristic", int(match[3]) if match[3] else None)
        return LengthChoice("auto", siblings=-1 if value == "auto" else 0)
