"""What is left in the folder: the advice as JSON, a configuration for `--config`, and settings for other engines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from slipstream.bench.arms import PLAIN
from slipstream.bench.tuning.advice import Advice
from slipstream.bench.tuning.candidates import Candidate
from slipstream.bench.tuning.engine_settings import Settings, engine_settings
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError


def config_of(candidate: Candidate | None, config: DecoderConfig) -> DecoderConfig:
    """The decoder's settings under a candidate; None is plain decoding."""
    if candidate is None:
        return replace(config, drafter=PLAIN, num_draft_tokens="auto")
    return replace(config, drafter=candidate.drafter, num_draft_tokens=candidate.length or "auto")


def files_for(candidate: Candidate | None, config: DecoderConfig, *, stops_early: bool) -> dict[str, str]:
    """File name to text. vLLM's object is null where the answer is not to speculate."""
    settings = {one.engine: one for one in engine_settings(candidate, stops_early=stops_early)}
    texts = {f"{engine}.txt": one.text for engine, one in settings.items()}
    value: Settings = settings["vllm"]
    return {
        "slipstream.json": config_of(candidate, config).to_json() + "\n",
        "vllm.json": json.dumps(value.value, indent=2) + "\n",
        **texts,
    }


def write_files(
    folder: Path, advice: Sequence[tuple[Advice, bool]], config: DecoderConfig, result: dict[str, Any]
) -> list[Path]:
    """Write tune.json and the settings; returns their paths.

    advice: the first batch size first, and whether its draft model stops early. The settings of another batch size
    have its number in their names, and are there only where they differ from the first one's.
    """
    texts, first = {"tune.json": json.dumps(result, indent=2) + "\n"}, dict[str, str]()
    for one, stops_early in advice:
        own = files_for(one.best.candidate if one.best else None, config, stops_early=stops_early)
        first = first or own
        if own is first:
            texts |= own
        elif own != first:
            texts |= {_numbered(name, one.batch): text for name, text in own.items()}
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"folder {str(folder)!r} cannot be written: {error.strerror}") from error
    return [folder / name for name in texts]


def _numbered(name: str, batch: int) -> str:
    stem, _, ending = name.partition(".")
    return f"{stem}-batch{batch}.{ending}"
