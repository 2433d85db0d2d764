"""Backends: a model with a slot-addressed memory, behind one protocol; and how a name becomes one.

A new backend is one file in this folder with a class that has these methods.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from slipstream.text import Tokenizer
from slipstream.types import UsageError


class Backend(Protocol):
    """A causal language model and its key-value memory of `reserve`d slots, addressed by absolute position."""

    vocab_size: int
    max_length: int
    device: torch.device
    view: int  # the memory is read up to the next multiple of this

    def reserve(self, rows: int, length: int) -> None:
        """Hold at least `rows` slots of `length` positions; what is held already stays."""

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """Write tokens [B, W] at positions starts[i]... of slots first_slot... and attend to what lies before them.

        Returns [B, W, V] logits, or an empty tensor when `logits` is False. Positions of a slot beyond those written
        may hold leftovers; they are never attended to.
        """

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot to another."""


def cache_folder() -> Path:
    """Where converted models and calibrations are kept: $SLIPSTREAM_MODELS, or ~/.cache/slipstream/models."""
    return Path(os.environ.get("SLIPSTREAM_MODELS", Path.home() / ".cache" / "slipstream" / "models"))


@dataclass(frozen=True)
class Loaded:
    """A model ready for use.

    end_ids: its end-of-sequence tokens; model: the framework's own object, if any; fingerprint: architecture, sizes
    and precision, all that forward shapes can depend on.
    """

    backend: Backend
    name: str
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None
    model: Any = None
    packed: bool = False
    fingerprint: str = ""


@dataclass(frozen=True)
class LoadOptions:
    """How to load models.

    fast: True packs CPU weights or says why it cannot, "auto" packs those of models it loads itself, False never.
    extra: further arguments of Hugging Face `from_pretrained` (device_map, quantization_config, ...).
    """

    dtype: str = "auto"
    device: str = "auto"
    fast: bool | str = "auto"
    extra: dict[str, Any] = field(default_factory=dict)


def load(source: Any, options: LoadOptions, tokenizer: Any = None) -> Loaded:
    """Load a target or draft model.

    source: "toy" or "toy:ORDER", the embedded model's name, a hub id, a local folder, a .gguf file, or a loaded
    Hugging Face model.
    """
    if isinstance(source, str) and (source == "toy" or source.startswith("toy:")):
        from slipstream.backends.toy import load_toy

        return load_toy(source)
    if isinstance(source, torch.nn.Module):
        from slipstream.backends.loading import wrap_model

        return wrap_model(source, tokenizer, options)
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        from slipstream.backends.loading import load_pretrained

        return load_pretrained(str(source), options, tokenizer)
    raise UsageError(
        f"model {source!r} is a {type(source).__name__}; allowed: a hub id, a folder, a .gguf file, 'toy', "
        "or a loaded Hugging Face model"
    )


def is_loaded(model: Any) -> bool:
    """Whether this is a model, and not the name of one."""
    return not isinstance(model, str | os.PathLike)


def refuse_unused(options: LoadOptions, models: Sequence[Any]) -> None:
    """Refuse loading options where nothing is left to load."""
    if any(not is_loaded(model) and not str(model).startswith("toy") for model in models if model is not None):
        return
    for name, value, default in (
        ("dtype", options.dtype, "auto"),
        ("device", options.device, "auto"),
        ("load_options", options.extra, {}),
    ):
        if value != default:
            raise UsageError(f"{name}={value!r}, but the models are loaded already; allowed: {default!r}")
