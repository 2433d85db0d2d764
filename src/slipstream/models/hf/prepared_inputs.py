"""The inputs of a model's forward: their names, their device, and a check for models that prepare them differently."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slipstream.models.decoder.cache import KEYS_AND_VALUES
from slipstream.models.hf.thresholds import longest_text

if TYPE_CHECKING:
    from transformers import DynamicCache

STATES = ("cache", "cache_params")  # in models that have only recurrent layers
NAMES = (*KEYS_AND_VALUES, "cache_params")
BUCKETS = "past_buckets_states"  # Reformer's
SHORT, LONG = 9, 4096  # lengths in trials, in tokens
LATEST = 3  # tokens that are not cached in the trial with a cache


def cache_name(model: Any, names: tuple[str, ...] = NAMES) -> str | None:
    """The first of these names under which the model's forward takes a cache; None if it takes none."""
    accepted = inspect.signature(model.forward).parameters
    return next((name for name in names if name in accepted and _is_cache(accepted[name])), None)


def prepared_name(model: Any, name: str) -> str:
    """The name that `prepare_inputs_for_generation` gives the argument `name` of the model's forward."""
    if name != BUCKETS:
        return name
    accepted = inspect.signature(model.prepare_inputs_for_generation).parameters
    return next((name for name in KEYS_AND_VALUES if name in accepted), BUCKETS)


def _is_cache(parameter: inspect.Parameter) -> bool:
    return parameter.name != "cache" or "Cache" in str(parameter.annotation)  # XLM's `cache` is a dictionary of its own


def input_device(model: Any) -> torch.device:
    """The device on which a model takes token ids: its embedding's, or the one where accelerate runs the embedding."""
    embedding = model.get_input_embeddings()
    device: torch.device = embedding.weight.device
    if device.type != "meta":
        return device
    hook = getattr(embedding, "_hf_hook", None)
    places = [getattr(part, "execution_device", None) for part in (hook, *getattr(hook, "hooks", ()))]
    return torch.device(next((place for place in places if place is not None), "cpu"))


def vocab_size_of(model: Any) -> int:
    """The number of logits per token: the output layer's or, if that does not declare it, the configuration's."""
    size = getattr(model.get_output_embeddings(), "out_features", None)
    return int(size or model.config.get_text_config(decoder=True).vocab_size)


def prepares_inputs_differently(model: Any) -> bool:
    """True if a model's own `prepare_inputs_for_generation` prepares different inputs than transformers' would.

    Such a model gets the intended inputs only from a loop that calls the method at every step.
    """
    from transformers import GenerationMixin

    method = model.prepare_inputs_for_generation
    if str(method.__module__).startswith("transformers.") or not isinstance(model, GenerationMixin):
        return False
    config = model.config.get_text_config()
    longest = min(LONG, longest_text(config) or LONG)
    return any(
        not _is_usual(model, length, cached)
        for length in (min(SHORT, longest), longest)
        for cached in (0, max(0, length - LATEST))
    )


@torch.inference_mode()
def _is_usual(model: Any, length: int, cached: int) -> bool:
    """True if the inputs are those that transformers prepares. cached: number of tokens in the cache."""
    positions = torch.arange(length, device=input_device(model))[None]
    ids = positions % len(model.get_input_embeddings().weight)
    prepared = []
    for method in (model.prepare_inputs_for_generation, _usual_method(model)):
        cache: dict[str, Any] = {}
        if (name := cache_name(model)) is not None:
            cache[prepared_name(model, name)] = _filled(cached)
        try:
            inputs = method(
                ids,
                next_sequence_length=length - cached,
                is_first_iteration=not cached,
                attention_mask=torch.ones_like(ids),
                position_ids=positions,
                use_cache=True,
                **cache,
            )
        except Exception:  # third-party code may raise anything
            return False
        prepared.append({key: value for key, value in inputs.items() if value is not None and key not in NAMES})
        prepared[-1]["caches"] = [inputs.get(key) is cache[key] for key in cache]
    return _are_usual(prepared[0], prepared[1])


def _usual_method(model: Any) -> Any:
    """The method of transformers that the model's own method overrides."""
    bases = type(model).__mro__
    owner = next(
        base
        for base in bases
        if "prepare_inputs_for_generation" in vars(base) and base.__module__.startswith("transformers.")
    )
    return vars(owner)["prepare_inputs_for_generation"].__get__(model)


def _filled(length: int) -> DynamicCache:
    from transformers import DynamicCache

    cache = DynamicCache()
    if length:
        nothing = torch.zeros(1, 1, length, 1)
        cache.update(nothing, nothing, 0)
    return cache


def _are_usual(inputs: Mapping[str, Any], usual: Mapping[str, Any]) -> bool:
    """True if inputs equal the usual ones; positions and masks may be missing, since the forward makes the same."""
    if "input_ids" not in inputs:
        return False
    return all(name in usual and _same(usual[name], value) for name, value in inputs.items())


def _same(usual: Any, value: Any) -> bool:
    if isinstance(usual, Tensor) and isinstance(value, Tensor):
        return torch.equal(usual, value)
    return type(usual) is type(value) and bool(usual == value)
