"""A tiny random model of every type that transformers calls a causal language model."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.support.architecture_configs import (
    CONFIGS,
    NOT_CAUSAL,
    ONLY_WIDE,
    ORIGINAL,
    POSITIONS,
    SCALES,
    SIZES,
    WIDE,
    widened,
)

MOST_PARAMETERS = 6_000_000
SCALE = 3.0  # of the initial weights: at scale 1 greedy texts repeat one token
PER_LAYER = ("layer_types", "mlp_layer_types", "no_rope_layers", "moe_layers", "indexer_types")


class Unbuilt(Exception):
    """Raised where a type has no tiny model; the message says why."""


def model_types() -> list[str]:
    """Every model type of transformers' mapping of causal language models."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, wide: bool = False) -> Any:
    """The configuration of a tiny model; of a type with several parts, that of the text part."""
    if model_type in NOT_CAUSAL:
        raise Unbuilt(NOT_CAUSAL[model_type])
    default, settings = CONFIG_MAPPING[model_type]().get_text_config(), CONFIGS.get(model_type, {})
    if wide:
        settings = widened(settings) | ONLY_WIDE.get(model_type, {})
    all_sizes = SIZES | WIDE if wide else SIZES
    sizes = {field: size for name, size in all_sizes.items() if (field := settable(default, name))}
    # the default has more layers; lists per layer are rebuilt for fewer, except those with several kinds
    lists = {field: None for name in PER_LAYER if (field := settable(default, name)) and getattr(default, name)}
    stretched = stretched_early(default)
    return type(default)(**lists | sizes | stretched | layer_kinds(default, lists, settings) | settings)


def stretched_early(default: Any) -> dict[str, Any]:
    """Stretched rotations of a configuration, changed to begin at a position that the checks' texts reach."""
    rope = getattr(default, "rope_parameters", None)
    if not isinstance(rope, dict) or "original_max_position_embeddings" not in rope:
        return {}
    new_values = {"original_max_position_embeddings": ORIGINAL, "max_position_embeddings": POSITIONS}
    return {"rope_parameters": rope | {name: new_values[name] for name in new_values.keys() & rope.keys()}}


def settable(config: Any, name: str) -> str | None:
    """The field of a configuration with this name; None if there is none, or only a property."""
    name = config.attribute_map.get(name, name)
    computed = isinstance(attribute := getattr(type(config), name, None), property) and attribute.fset is None
    return name if not computed and (name in vars(config) or name in config.__dataclass_fields__) else None


def layer_kinds(default: Any, lists: dict[str, None], settings: dict[str, Any]) -> dict[str, Any]:
    """Layer types in which each kind of the default occurs, in the order of first occurrence."""
    kinds = list(dict.fromkeys(default.layer_types)) if "layer_types" in lists else []
    if len(kinds) < 2 or settings.keys() & {"layer_types", "layers_block_type", "block_types"}:
        return {}
    count = max(int(SIZES["num_hidden_layers"]), len(kinds))
    return {"layer_types": (kinds * count)[:count], "num_hidden_layers": count}


def tiny_model(model_type: str, wide: bool = False) -> Any:
    """A model on the CPU whose greedy texts vary; always the same weights. wide: in bfloat16, else in float32."""
    config = tiny_config(model_type, wide)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in make(model_type, config, torch.float32).parameters())
    if size > MOST_PARAMETERS:
        raise Unbuilt(f"its tiny configuration has {size} parameters; allowed: {MOST_PARAMETERS}")
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        model = make(model_type, config, torch.bfloat16 if wide else torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():  # a router of zeros prefers no expert
                parameter.normal_(std=0.02)
            parameter.mul_(SCALES.get(model_type, SCALE))
    return model


def make(model_type: str, config: Any, dtype: torch.dtype) -> Any:
    """The model of a configuration; some types are mapped only by the configuration of the whole model."""
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    model_class = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])
    return model_class._from_config(config, dtype=dtype)
