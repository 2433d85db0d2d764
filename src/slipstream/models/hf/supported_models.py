"""Decides which models can run on a slot-addressed KV cache: those that write their state at explicit positions."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from transformers import DynamicCache, cache_utils
from transformers.cache_utils import LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from slipstream.errors import UsageError, one_line
from slipstream.models.decoder.attention import GROUPED, STATEFUL, unmasked_window
from slipstream.models.decoder.cache import KEYS_AND_VALUES
from slipstream.models.decoder.families import KINDS
from slipstream.models.decoder.recurrent_mixers import recurrent_layers
from slipstream.models.hf import interfaces  # noqa: F401 (registers grouped attention)
from slipstream.models.hf.prepared_inputs import STATES, cache_name, prepares_inputs_differently

# the last one, in transformers from 5.23 on, reads another layer's keys
NAMES = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")
ATTENTION = tuple(layer for name in NAMES if (layer := vars(cache_utils).get(name)) is not None)
STATELESS = ("mlp", "moe")  # types of layers that neither attend nor have a state
RECURRENT = (LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)


def without_weights(model: Any) -> str | None:
    """The reason a model has no weights in memory; None if it has some, or if hooks load them when needed."""
    moved = any(module._forward_pre_hooks or "forward" in vars(module) for module in model.modules())
    if not moved and any(parameter.device.type == "meta" for parameter in model.parameters()):
        return "its weights are on the meta device, without numbers; allowed: a model whose weights are loaded"
    return None


def check_supported(model: Any) -> None:
    """Refuse, by name and with the reason, models whose state cannot be addressed by position."""
    if (reason := not_by_position(model)) is not None:
        raise UsageError(f"model {type(model).__name__} is not supported: {reason}")


def not_by_position(model: Any) -> str | None:
    """The reason a model's state cannot be written at explicit positions and read through a mask; None if it can."""
    config = model.config.get_text_config()
    parameters = inspect.signature(model.forward).parameters
    try:
        layers = DynamicCache(config=config).layers
    except (AttributeError, TypeError, ValueError, LookupError) as error:
        return f"transformers makes no cache for its configuration ({one_line(error)})"
    attends = any(type(layer) is not LinearAttentionLayer for layer in layers)
    names = KEYS_AND_VALUES if attends else STATES
    cached = cache_name(model, names) or names[-1]
    needed = ("position_ids", cached, "logits_to_keep") if attends else (cached, "logits_to_keep")
    reason = None
    if getattr(model.config, "is_encoder_decoder", False):
        reason = "it is an encoder-decoder model; allowed: decoder-only models"
    elif not _known_layers(model, config, layers):
        reason = "it carries recurrent state or compressed attention"
    elif missing := [p for p in needed if p not in parameters]:
        reason = f"its forward takes no {missing[0]}"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-modelling head"
    elif attends and config._attn_implementation not in ("sdpa", "eager", GROUPED):
        reason = f"attn_implementation={config._attn_implementation!r} takes no explicit mask; allowed: 'sdpa', 'eager'"
    elif attends and unmasked_window(model) is not None:
        reason = "its cache has a sliding window that its attention masks lack"
    elif prepares_inputs_differently(model):
        reason = "its prepare_inputs_for_generation prepares different inputs than transformers' method"
    return reason


def _known_layers(model: Any, config: Any, layers: Sequence[Any]) -> bool:
    """True if all layers attend to keys and values, or are recurrent layers that run on Slipstream's states."""
    recurrent = {i for i, layer in enumerate(layers) if type(layer) in RECURRENT}
    if not all(type(layer) in (*ATTENTION, *RECURRENT) for layer in layers):
        return False
    kinds = set(getattr(config, "layer_types", None) or [])
    if recurrent:
        return recurrent == recurrent_layers(model).keys() and kinds <= KINDS | STATEFUL | {"hybrid", *STATELESS}
    return kinds <= KINDS and not getattr(model, "_is_stateful", False)
