"""What models call the cache that their forward takes and returns: transformers 5.24 has one new name for all."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

KEYS_AND_VALUES = ("cache", "past_key_values")  # the new name before the old one, which is accepted beside it
STATES = ("cache", "cache_params")  # of models that have recurrent layers alone
NAMES = (*KEYS_AND_VALUES, "cache_params")
BUCKETS = "past_buckets_states"  # Reformer's


def cache_name(model: Any, names: tuple[str, ...] = NAMES) -> str | None:
    """The first of these names that is an argument of the model's forward, and no other thing by that name."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in names if name in accepted and _is_cache(accepted[name])), None)


def given_cache(options: Mapping[str, Any]) -> Any:
    """The cache of keys and values among the arguments of a forward, None if there is none."""
    return next((options[name] for name in KEYS_AND_VALUES if name in options), None)


def prepared_name(model: Any, name: str) -> str:
    """What `prepare_inputs_for_generation` calls the argument `name` of the model's forward."""
    if name != BUCKETS:
        return name
    accepted = inspect.signature(model.prepare_inputs_for_generation).parameters
    return next((name for name in KEYS_AND_VALUES if name in accepted), BUCKETS)


def _is_cache(parameter: inspect.Parameter) -> bool:
    return parameter.name != "cache" or "Cache" in str(parameter.annotation)  # XLM's is a dictionary of its own
