"""The frequencies of a head's rotary positions, as transformers computes them for Llama."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from slipstream.errors import UsageError, one_line

KINDS = ("default", "linear", "llama3", "yarn")  # the others depend on the length of a text
SETTINGS = ("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings", "rope_theta")


def rope_theta(layer: Mapping[str, Any]) -> float:
    """The base of the frequencies. layer: settings of a head's decoder layer."""
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    theta: float = given.get("rope_theta") or layer.get("rope_theta") or 10000.0
    return theta


def scaled_frequencies(source: str, layer: Mapping[str, Any]) -> tuple[Tensor | None, float]:
    """[D / 2] inverse frequencies, None without scaling, and the factor of cosines and sines.

    layer: settings of a head's decoder layer. Raises `UsageError` for kinds of scaling that are not computed, and for
    settings that are missing.
    """
    given = layer.get("rope_parameters") or layer.get("rope_scaling") or {}
    parameters = {name: value for name, value in given.items() if name != "type"}
    parameters["rope_type"] = kind = given.get("rope_type", given.get("type", "default"))
    if kind not in KINDS:
        allowed = ", ".join(map(repr, KINDS))
        raise UsageError(f"draft head {source!r} has rope_type={kind!r}; allowed: {allowed}")
    if kind == "default":
        return None, 1.0
    from transformers import LlamaConfig  # takes seconds
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    from slipstream.models.weights.transformers_reader import quietly

    parameters["rope_theta"] = rope_theta(layer)
    settings = {name: layer[name] for name in SETTINGS if layer.get(name) is not None}
    try:
        with quietly():
            rope = LlamaRotaryEmbedding(LlamaConfig(**settings, rope_parameters=parameters))
    except Exception as error:  # transformers' checks of settings raise errors of their own
        raise UsageError(
            f"draft head {source!r} has rope_type={kind!r} without what it needs: {one_line(error)}"
        ) from error
    return rope.inv_freq, rope.attention_scaling
