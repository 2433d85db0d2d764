"""Reads a model's generation_config: takes its end tokens, and warns of settings that only `generate` applies."""

from __future__ import annotations

import logging
from typing import Any

from slipstream.checks import is_number
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded

log = logging.getLogger("slipstream")

PROCESSORS = "logits_processors"  # the field for everything that has no field of its own
# settings that change greedy text: the values without effect, and the field of `SamplingParams` to use instead
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "repetition_penalty": ((None, 1), "repetition_penalty"),
    "bad_words_ids": ((None, []), "bad_words"),
    "sequence_bias": ((None, {}, []), "logit_bias"),
    "min_length": ((None, 0), "min_tokens"),
    "min_new_tokens": ((None, 0), "min_tokens"),
    "stop_strings": ((None, []), "stop"),
    "suppress_tokens": ((None, []), PROCESSORS),
    "begin_suppress_tokens": ((None, []), PROCESSORS),
    "no_repeat_ngram_size": ((None, 0), PROCESSORS),
    "encoder_repetition_penalty": ((None, 1), PROCESSORS),
    "encoder_no_repeat_ngram_size": ((None, 0), PROCESSORS),
    "forced_bos_token_id": ((None,), PROCESSORS),
    "forced_eos_token_id": ((None,), PROCESSORS),
    "exponential_decay_length_penalty": ((None,), PROCESSORS),
    "guidance_scale": ((None, 1), PROCESSORS),
    "watermarking_config": ((None,), PROCESSORS),
}


def warn_of_unread_settings(target: Loaded) -> None:
    """Warn in the log of settings in a model's generation_config that `generate` applies and a decoder does not."""
    settings = getattr(target.model, "generation_config", None)
    if settings is None:
        return
    values = {name: _as_list(getattr(settings, name, None)) for name in SETTINGS}
    unread = {name: value for name, value in values.items() if value not in SETTINGS[name][0]}
    if unread:
        log.warning(
            "model %s: its generation_config has %s, which generate applies and a decoder leaves to SamplingParams: %s",
            target.name,
            ", ".join(f"{name}={value!r:.60}" for name, value in unread.items()),
            ", ".join(dict.fromkeys(SETTINGS[name][1] for name in unread)),
        )
    end = getattr(target.model.config.get_text_config(), "eos_token_id", None)
    if settings.eos_token_id is None and end is not None:
        ids = list(end) if isinstance(end, list | tuple) else [end]
        log.warning(
            "model %s: its generation_config names no end token, though its config does (eos_token_id=%r): texts run "
            "to max_tokens, as generate's do; SamplingParams(stop_token_ids=%r) ends them",
            target.name,
            end,
            ids,
        )


def end_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids `generate` would use."""
    settings = getattr(model, "generation_config", None) or model.config.get_text_config()
    return read_end_ids(type(model).__name__, getattr(settings, "eos_token_id", None), vocab_size)


def read_end_ids(name: str, ends: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids of a model's settings that its vocabulary has. ends: an id, several, or None.

    Raises `UsageError`, naming the model, for anything that is not a token id.
    """
    ends = _as_list(ends)
    if ends is None:
        return ()
    ids = [_as_list(i) for i in ends] if isinstance(ends, list | tuple) else [ends]
    if not all(is_number(i) and i == int(i) for i in ids):
        raise UsageError(f"model {name!r} has eos_token_id={ends!r:.60}; allowed: None, a token id or a list of them")
    return tuple(int(i) for i in ids if 0 <= i < vocab_size)


def _as_list(value: Any) -> Any:
    """Convert tensors and arrays, which `generate` accepts, to lists and numbers."""
    return value.tolist() if callable(getattr(value, "tolist", None)) else value
