"""Arms as a reader who has not run them would name them: `model@4/rejection~0.8` in words."""

from __future__ import annotations

from datetime import datetime

from slipstream.bench.arms import ASSISTED, HF, LLAMA, LLAMA_LOOKUP, LOOKUP, PLAIN, TUNED, parse_arm

_BASELINES = {
    HF: "Hugging Face",
    ASSISTED: "Hugging Face assisted",
    TUNED: "Hugging Face assisted",
    LOOKUP: "Hugging Face prompt lookup",
    LLAMA: "llama.cpp",
    LLAMA_LOOKUP: "llama.cpp prompt lookup",
}


def label(name: str, *, temperature: bool = True) -> str:
    """An arm's name in words. temperature: whether to say it, where the arm has one of its own."""
    arm = parse_arm(name)
    parts = [_BASELINES.get(arm.baseline or "") or ("plain" if arm.drafter == PLAIN else str(arm.drafter))]
    if isinstance(arm.num_draft_tokens, str):
        parts.append("no trees" if arm.num_draft_tokens == "chain" else f"tree {arm.num_draft_tokens}")
    elif arm.num_draft_tokens is not None:
        parts.append(f"{arm.num_draft_tokens} token{'s' if arm.num_draft_tokens > 1 else ''}")
    if arm.acceptance is not None:
        parts.append(f"{arm.acceptance} rule")
    if arm.fast is False:
        parts.append("unpacked weights")
    if arm.predicted:
        parts.append("with predictions")
    if temperature and arm.temperature is not None:
        parts.append("greedy" if arm.temperature == 0 else f"temperature {arm.temperature:g}")
    return ", ".join(parts)


def counted(number: int, noun: str) -> str:
    """A number and its noun, in the plural where that is right."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def local_time(text: str) -> str:
    """A time in ISO format as the reader's clock shows it, with the zone's name; another text as it is."""
    try:
        moment = datetime.fromisoformat(text).astimezone()
    except ValueError:
        return text
    return f"{moment.day} {moment:%B %Y, %H:%M} {moment.tzname()}"
