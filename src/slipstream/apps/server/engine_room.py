"""What the engine is doing, for people: rows under way, speed and acceptance of the last seconds."""

from __future__ import annotations

from collections import deque
from time import monotonic
from typing import Any

from slipstream.apps.server.live_request import Ended, Event, Job, LiveRequest, Started
from slipstream.apps.server.step_totals import StepTotals
from slipstream.text.results import Stats

WINDOW = 10.0  # seconds of the figures that speak of now


class EngineRoom:
    """Folds events. Lanes are numbered as rows come and go; a freed lane is taken again."""

    def __init__(self) -> None:
        self._lanes: dict[Job, int] = {}
        self._recent: deque[tuple[float, int]] = deque()
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

    def stepped(self, at: float, tokens: int) -> None:
        """Note how many tokens a step has committed, and when."""
        self._recent.append((at, tokens))
        self._trim(at)

    def _trim(self, now: float) -> None:
        while self._recent and self._recent[0][0] < now - WINDOW:
            self._recent.popleft()

    @property
    def num_running(self) -> int:
        """Rows under way."""
        return len(self._lanes)

    def state(self, totals: StepTotals) -> dict[str, Any]:
        """Everything, for JSON."""
        self._trim(monotonic())
        tokens = sum(count for _, count in self._recent)
        stats = totals.stats
        seconds = {part: getattr(stats, f"{part}_seconds") for part in ("prefill", "draft", "verify", "accept")}
        seconds["overhead"] = stats.overhead_seconds
        total = sum(seconds.values())
        return {
            "running": [self._lane(job, lane) for job, lane in sorted(self._lanes.items(), key=lambda pair: pair[1])],
            "tokens_per_second": tokens / WINDOW,
            "acceptance_by_source": {
                source: {"drafted": count, "accepted": totals.accepted[source], "rate": totals.accepted[source] / count}
                for source, count in sorted(totals.drafted.items())
            },
            "acceptance_by_position": [
                accepted / drafted
                for accepted, drafted in zip(stats.accepted_per_position, stats.drafted_per_position, strict=True)
            ],
            "round_shares": {part: spent / total if total else 0.0 for part, spent in seconds.items()},
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
