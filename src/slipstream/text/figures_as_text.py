"""Figures and verdicts as the commands, the conversation and the reports write them. Nothing is computed here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slipstream.certificate.parity import Difference
    from slipstream.text.stats import Stats


def percent(value: float | None) -> str:
    """A share as a percentage; a dash where there is none."""
    return "-" if value is None else f"{value:.0%}"


def verdict(difference: Difference | None) -> str:
    """One word on whether a text equals plain decoding's."""
    if difference is None:
        return "identical"
    if not difference.compared:
        return f"differs at {difference.position}, as sampled text may"
    if difference.tie:
        gap = abs(difference.expected_gap - difference.got_gap)
        return f"tie at {difference.position} (gap {gap:.2g}, noise {difference.noise:.2g})"
    return f"DIFFERS at {difference.position}"


def statistics_line(stats: Stats, drafter: str) -> str:
    """Tokens, speed and acceptance in one line."""
    rate, efficiency = percent(stats.acceptance_rate), f"{stats.block_efficiency:.2f}"
    speed = f"{stats.num_output_tokens} tokens, {stats.tokens_per_second:.1f} tok/s"
    forced = f", {stats.num_forced_tokens} forced by the constraint" if stats.num_forced_tokens else ""
    line = f"{speed}, {drafter}: acceptance rate {rate}, block efficiency {efficiency}{forced}"
    if stats.accepted_prediction_tokens is None:
        return line
    told = f"{stats.accepted_prediction_tokens} accepted, {stats.rejected_prediction_tokens} rejected"
    return f"{line}, prediction: {told}"


def time_split(stats: dict[str, Any]) -> str:
    """Where the speculative arm's time went."""
    total = stats["total_seconds"] or 1.0
    parts = ("prefill", "draft", "verify", "accept", "overhead")
    shares = "  ".join(f"{part} {stats[f'{part}_seconds'] / total:.1%}" for part in parts)
    return f"time of the speculative arm: {shares}"
