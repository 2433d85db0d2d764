"""What the engine is doing, for people: rows under way, speed and acceptance of the last seconds."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from time import monotonic
from typing import Any

from slipstream.apps.server.answer_parts import ModelFacts, shares
from slipstream.apps.server.live_request import Ended, Event, Job, LiveRequest, Started
from slipstream.core.rounds import Round
from slipstream.text.stats import Stats

WINDOW = 10.0  # seconds of the figures that speak of now


class EngineRoom:
    """Folds events and rounds. Lanes are numbered as rows come and go; a freed lane is taken again."""

    def __init__(self) -> None:
        self._lanes: dict[Job, int] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._drafted: Counter[str] = Counter()
        self._accepted: Counter[str] = Counter()
        self._drafted_at: list[int] = []
        self._accepted_at: list[int] = []
        self._seconds: Counter[str] = Counter()
        self._prompt_tokens = self._cached_tokens = 0

    def event(self, live: LiveRequest, event: Event) -> None:
        """Rows take lanes and leave them."""
        job = live.jobs[event.choice]
        if isinstance(event, Started):
            taken = set(self._lanes.values())
            self._lanes[job] = next(lane for lane in range(len(taken) + 1) if lane not in taken)
            self._prompt_tokens += job.row.prompt_length
            self._cached_tokens += event.cached
        elif isinstance(event, Ended):
            self._lanes.pop(job, None)

    def step(self, rounds: Sequence[Round], facts: ModelFacts) -> None:
        """Note a step."""
        now = monotonic()
        self._recent.append((now, sum(len(done.tokens) for done in rounds)))
        self._trim(now)
        seconds = rounds[0].seconds
        parts = {part: getattr(seconds, part) for part in ("prefill", "draft", "verify", "accept")}
        self._seconds.update(parts | {"overhead": max(0.0, seconds.total - sum(parts.values()))})
        for done in rounds:
            for share in shares(done, facts):
                self._drafted[share.source] += share.drafted
                self._accepted[share.source] += share.accepted
        folded = Stats.of(rounds)
        for known, new in (
            (self._drafted_at, folded.drafted_per_position),
            (self._accepted_at, folded.accepted_per_position),
        ):
            known.extend([0] * (len(new) - len(known)))
            for position, count in enumerate(new):
                known[position] += count

    def _trim(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    @property
    def num_running(self) -> int:
        """Rows under way."""
        return len(self._lanes)

    def state(self) -> dict[str, Any]:
        """Everything, for JSON."""
        self._trim(monotonic())
        tokens = sum(count for _, count in self._recent)
        total = sum(self._seconds.values())
        return {
            "running": [self._lane(job, lane) for job, lane in sorted(self._lanes.items(), key=lambda pair: pair[1])],
            "tokens_per_second": tokens / WINDOW,
            "acceptance_by_source": {
                source: {"drafted": count, "accepted": self._accepted[source], "rate": self._accepted[source] / count}
                for source, count in sorted(self._drafted.items())
            },
            "acceptance_by_position": [
                accepted / drafted for accepted, drafted in zip(self._accepted_at, self._drafted_at, strict=True)
            ],
            "round_shares": {part: spent / total if total else 0.0 for part, spent in self._seconds.items()},
            "cache": {"prompt_tokens": self._prompt_tokens, "cached_tokens": self._cached_tokens},
        }

    def _lane(self, job: Job, lane: int) -> dict[str, Any]:
        stats = Stats.of(list(job.row.rounds))
        return {
            "lane": lane,
            "id": job.request.id[:8],
            "prompt_tokens": job.row.prompt_length,
            "tokens": stats.num_output_tokens,
            "max_tokens": job.row.params.max_tokens,
            "acceptance_rate": stats.acceptance_rate,
        }
