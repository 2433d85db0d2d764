"""How many prompt tokens a step reads: as many as the rows under way may wait for."""

from __future__ import annotations

PAUSE = 0.05  # seconds that a step may spend on prompts while rows are under way
FIRST = 128  # tokens, before anything has been measured
LEAST, MOST = 32, 2048  # tokens; fewer would be read at a price per token that is much higher
STEP = 0.3  # how far one step moves what is known


class PromptBudget:
    """Learns what a prompt token costs on this machine."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    @property
    def tokens(self) -> int:
        """Prompt tokens that take about `PAUSE`."""
        if self._seconds_per_token is None:
            return FIRST
        return round(max(LEAST, min(MOST, PAUSE / self._seconds_per_token)))

    def learn(self, tokens: int, seconds: float) -> None:
        """A step has read so many tokens of prompts in so many seconds."""
        if tokens < LEAST or seconds <= 0:
            return
        cost, known = seconds / tokens, self._seconds_per_token
        self._seconds_per_token = cost if known is None else known + STEP * (cost - known)
