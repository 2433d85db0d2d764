"""Numbers in a model's configuration: factors that a faster forward must know, and positions where forwards change.

A faster forward that overlooks such a number computes another model, perhaps only at positions that no trial reaches.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from typing import Any

# in the names of fields by which a model multiplies or limits something; a factor of 1 is neutral
FACTORS = re.compile(r"scal|multipl|temperature|gain|mup_")
LIMITS = re.compile(r"soft_?cap|clip|clamp|beta|logn|tuning|alpha")
# computed by the model's own modules, whatever runs its layers: rotations, and the scaling of attention
ROTATION = frozenset(
    ("rope_scaling", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "long_mscale", "short_mscale")
)
BY_LAYER = frozenset(("layer_types", "long_factor", "short_factor"))  # lists that the layers are made by
OF_LAYERS = ROTATION | {"query_pre_attn_scalar", "attention_multiplier"}
# outside the layers, so that layers may be fused whatever these are
AROUND_LAYERS = frozenset(("embedding_multiplier", "logits_scaling", "logit_scale", "final_logit_softcapping"))
# for sampling, training and the storage of weights
ELSEWHERE = frozenset(("temperature", "quantization_config", "router_scaling_factor", "initializer_scale"))
THRESHOLDS = re.compile(r"max_position|max_seq|n_positions|max_sequence|chunk|window(?!_layers)")


def unimplemented(config: Any, implemented: Set[str]) -> str | None:
    """The first field of a text configuration that changes what is computed and is not implemented, with its value."""
    for name, value in _fields(config.to_dict()):
        if name not in implemented and (not _is_neutral(name, value) or _differs_by_layer(config, name, value)):
            return f"{name}={value!r}"
    return None


def _differs_by_layer(config: Any, name: str, value: Any) -> bool:
    """True if a list has a value for each layer, and not the same one: which layers rotate, are wider, are mixtures."""
    is_by_layer = isinstance(value, list) and len(value) == config.num_hidden_layers
    return is_by_layer and name not in BY_LAYER and any(item != value[0] for item in value)


def thresholds(config: Any, end: int) -> list[int]:
    """Positions below `end` from which on a text configuration may change what is computed, and `end`, ascending."""
    named = {value for name, value in _fields(config.to_dict()) if THRESHOLDS.search(name) and type(value) is int}
    return sorted({value for value in named if 0 < value < end} | {end})


def _is_neutral(name: str, value: Any) -> bool:
    if not isinstance(value, bool | int | float) or not value:
        return True
    if LIMITS.search(name):
        return False
    return not FACTORS.search(name) or (value == 1 and value is not True)


def _fields(values: dict[Any, Any]) -> Iterator[tuple[str, Any]]:
    """All fields, including those of nested dictionaries."""
    for name, value in values.items():
        if isinstance(value, dict):
            if name not in ELSEWHERE:
                yield from _fields(value)
        elif str(name) not in ELSEWHERE:
            yield str(name), value
