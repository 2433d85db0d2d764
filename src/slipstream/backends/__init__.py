"""Backends: a model with a slot-addressed memory, behind one protocol; and how a name becomes one.

A new backend is one file in this folder with a class that has these methods.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

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


@runtime_checkable
class Unrolled(Protocol):
    """What a backend is besides if it can do a greedy round's work without coming back to the host in between.

    Both methods read and write slots 0 to B - 1. tokens: [B, W], of which row i has counts[i] real columns, written
    from position starts[i] on.
    """

    def draft_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], *, steps: int, vocab_size: int
    ) -> Tensor:
        """[B, steps] int64: the likeliest of the first `vocab_size` tokens after each row, fed and repeated.

        The last of them is not fed.
        """

    def verify_greedy(
        self, tokens: Tensor, starts: list[int], counts: list[int], lengths: Sequence[int], *, width: int
    ) -> Tensor:
        """[B, 2] int64: how many draft tokens the model itself would have said, and the token it says then.

        The last `width` real columns of a row are its draft, of which the first lengths[i] were proposed.
        """


@runtime_checkable
class Answering(Protocol):
    """What a backend is besides if a long forward can give the logits of few of its columns."""

    def answer(self, tokens: Tensor, start: int, *, slot: int, columns: Tensor) -> Tensor:
        """As `forward` of one row, tokens [1, W]; returns the logits [1, C, V] of the given columns [C] only."""


@runtime_checkable
class Frugal(Protocol):
    """What a backend is besides if forwards, and blocks of long ones, can read less of the memory than a whole view.

    reads: the lengths they may read where that is enough, ascending; none to read whole views.
    """

    reads: tuple[int, ...]

    def reads_agree(self, widths: Sequence[int], read: int, whole: int) -> bool:
        """Whether attention of these widths, and of prompts, gives the same bits over `read` positions as `whole`."""


def read_memory(backend: Backend, view: int, reads: tuple[int, ...]) -> None:
    """Make forwards read the memory up to one of `reads` if they can and it is enough, else a multiple of `view`."""
    backend.view = view
    if isinstance(backend, Frugal):
        backend.reads = reads


def cache_folder() -> Path:
    """Where converted models and calibrations are kept: $SLIPSTREAM_MODELS, or ~/.cache/slipstream/models."""
    return Path(os.environ.get("SLIPSTREAM_MODELS") or Path.home() / ".cache" / "slipstream" / "models")


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

    fast: True packs CPU weights, and captures graphs on CUDA, or says why it cannot; "auto" packs those of models it
    loads itself; False does neither.
    quantise: "int4" or "int8" does so or says why it cannot, "auto" uses int4 where it is faster and `fast` allows it.
    extra: further arguments of Hugging Face `from_pretrained` (device_map, quantization_config, ...).
    """

    dtype: str = "auto"
    device: str = "auto"
    fast: bool | str = "auto"
    extra: dict[str, Any] = field(default_factory=dict)
    quantise: str | None = None

    def for_draft(self, dtype: str) -> LoadOptions:
        """The same for the draft model, whose precision is its own matter."""
        if dtype in ("auto", "int4", "int8"):
            return replace(self, quantise=dtype)
        return replace(self, dtype=dtype)


def load(source: Any, options: LoadOptions, tokenizer: Any = None) -> Loaded:
    """Load a target or draft model.

    source: "toy" or "toy:ORDER", the embedded model's name, a hub id, a local folder, a .gguf file, or a loaded
    Hugging Face model.
    """
    if is_toy(source):
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


def is_toy(source: Any) -> bool:
    """Whether this names the built-in toy model."""
    return isinstance(source, str) and (source == "toy" or source.startswith("toy:"))


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
