"""Estimates from a model's configuration how many weights a forward of one token reads.

The estimate needs no loaded model and no plain weights. It reveals a draft model that is larger than its target.
"""

from __future__ import annotations

from typing import Any

from slipstream.models.decoder.families import latent_plan

GATED = 3  # matrices in a feed-forward layer of most architectures


def num_weights_read(config: Any) -> int | None:
    """About how many weights a token reads; None for configurations that do not say.

    Counts attention, feed-forward layers (in a mixture, the experts that a token uses) and the output layer. config: of
    the text model.
    """
    layers, width, heads, vocabulary = (
        _size(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size")
    )
    if layers is None or width is None or heads is None or vocabulary is None:
        return None
    head_size = _size(config, "head_dim") or width // heads
    key_value_heads = _size(config, "num_key_value_heads") or heads
    experts = _size(config, "num_experts_per_tok")
    inner = _size(config, "intermediate_size") or 4 * width
    if experts is not None:
        inner = experts * (_size(config, "moe_intermediate_size") or inner)
    layer = 2 * width * head_size * (heads + key_value_heads) + GATED * width * inner
    return layers * layer + width * vocabulary


def cached_bytes(config: Any) -> int | None:
    """About how many bytes a token's keys and values take in a KV cache. None for configurations that do not say.

    config: of the text model.
    """
    layers, width, heads = (_size(config, name) for name in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    if layers is None or width is None or heads is None:
        return None
    head_size = _size(config, "head_dim") or width // heads
    size = getattr(getattr(config, "dtype", None), "itemsize", 4)
    if (latent := latent_plan(config)) is not None:
        return layers * (latent.rank + int(config.qk_rope_head_dim)) * size
    return 2 * layers * (_size(config, "num_key_value_heads") or heads) * head_size * size


def larger(target: int | None, draft: int | None) -> str:
    """Says that a draft model has at least as many weights as its target; empty if it has fewer, or if unknown."""
    if target is None or draft is None or draft < target:
        return ""
    weights = f"about {_in_words(draft)} weights per token"
    if draft == target:
        return f"is as large as its target, with {weights}"
    return f"is larger than its target, with {weights} against {_in_words(target)}"


def _in_words(number: int) -> str:
    return f"{number / 1e6:,.0f} million" if number >= 1e6 else f"{number:,}"


def _size(config: Any, name: str) -> int | None:
    """A number in a configuration; None if it is missing or differs between layers."""
    try:
        value = getattr(config, name, None)
    except RuntimeError:  # transformers raises it for a field that differs between layers
        return None
    return value if type(value) is int and value > 0 else None
