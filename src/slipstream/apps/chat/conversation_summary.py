"""What can be said about a conversation afterwards: totals, speed against plain decoding, JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from slipstream.apps.chat.conversation import Chat
from slipstream.apps.chat.turn import shortened
from slipstream.certificate.parity import TieJudge, verdict
from slipstream.errors import UsageError
from slipstream.text.results import Stats, statistics_line
from slipstream.text.round_view import time_split


def compare(chat: Chat) -> str:
    """The last question answered by plain decoding: both speeds, and whether the texts are the same."""
    turn, decoder = chat.last, chat.decoder
    if turn.target != decoder.target.name:
        raise UsageError(f"the last answer is by {turn.target}, not {decoder.target.name}; allowed: after /retry")
    ids, params = turn.token_ids, turn.params
    length = len(ids) if turn.finish_reason == "interrupted" else params.max_tokens
    plain_params = replace(shortened(params, length), prediction=None)
    plain = decoder.using("none", num_draft_tokens="auto").generate(turn.prompt_ids, plain_params)
    found = TieJudge(decoder).judge(turn.prompt_ids, plain.token_ids, ids, params, coupled=turn.coupled)
    fast, slow = _speed(turn.stats), _speed(plain.stats)
    speeds = f"{turn.drafter} {fast:.1f} tok/s, plain {slow:.1f} tok/s: {fast / slow:.2f}x, prompt not counted"
    return f"{speeds}; text {verdict(found)}"


def totals(chat: Chat) -> list[str]:
    """Lines about the whole conversation."""
    stats = Stats.of(done for turn in chat.turns for done in turn.rounds)
    prompts, prefilled = sum(len(t.prompt_ids) for t in chat.turns), sum(t.prefilled for t in chat.turns)
    interrupted = sum(turn.finish_reason == "interrupted" for turn in chat.turns)
    lines = [f"{len(chat.turns)} turns, {interrupted} interrupted"]
    if chat.turns:
        drafters = "+".join(dict.fromkeys(turn.drafter for turn in chat.turns))
        lines += [statistics_line(stats, drafters), f"prompts: {prompts} tokens, of which {prefilled} were read anew"]
        lines.append(f"time: {time_split(stats.to_dict()).partition(': ')[2]}")
    return lines


def save(chat: Chat, path: Path) -> None:
    """Write the conversation as JSON: its messages, and how every answer came about."""
    decoder = chat.decoder
    value = {
        "target": decoder.target.name,
        "draft": None if decoder.draft is None else decoder.draft.name,
        "config": vars(decoder.config),
        "messages": chat.messages,
        "turns": [turn.to_dict() for turn in chat.turns],
    }
    try:
        path.expanduser().write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise UsageError(f"file {str(path)!r} cannot be written: {error.strerror}") from error


def _speed(stats: Stats) -> float:
    """Output tokens per second of decoding alone."""
    return stats.num_output_tokens / max(stats.total_seconds - stats.prefill_seconds, 1e-9)
