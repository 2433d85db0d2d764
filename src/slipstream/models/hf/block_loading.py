"""Whether a model is computed with in blocks: a GGUF file's, a quantised checkpoint's, or those made at load."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from slipstream.errors import UsageError
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.hf.checkpoint_loading import checkpoint_of
from slipstream.models.hf.gguf_loading import GGUFFile
from slipstream.models.hf.model_files import is_gguf
from slipstream.models.loaded import LoadOptions

log = logging.getLogger("slipstream")


@dataclass(frozen=True)
class FromBlocks:
    """A loaded model. folder: to take its tokenizer from; in_blocks: whether it is computed with in blocks."""

    folder: str
    model: Any
    in_blocks: bool


class Quantised(Protocol):
    """A model whose weights are, or are to be, quantised."""

    @property
    def name(self) -> str:
        """How the log calls it."""

    def in_blocks(self, activations: str) -> tuple[str, Any]:
        """The folder of the tokenizer and the model. Raises `NotInBlocksError` where it must be unpacked."""

    def unpacked(self, options: LoadOptions) -> tuple[str, Any] | None:
        """The same in floating point; None if `weights.load_model` does that."""


def load_in_blocks(source: str, options: LoadOptions) -> FromBlocks | None:
    """A model that is quantised, in its blocks or unpacked; None if `weights.load_model` is to load it.

    It is unpacked because the options say so, or with a warning because its blocks cannot be computed with. Raises
    `UsageError` where the options ask for activations of blocks then.
    """
    asked = options.activations != "auto"
    found: Quantised | None = GGUFFile(source, options) if is_gguf(source) else checkpoint_of(source, options)
    reason = "it is no GGUF file and not quantised" if found is None else _otherwise(options)
    if found is not None and reason is None:
        try:
            return FromBlocks(*found.in_blocks(options.activations if asked else "int8"), True)
        except NotInBlocksError as error:
            reason = str(error)
            if not asked:
                log.warning("%s is unpacked to bfloat16, which rounds its weights: %s", found.name, reason)
                options = replace(options, dtype="bfloat16" if options.dtype == "auto" else options.dtype)
    if asked:
        raise UsageError(
            f"activations={options.activations!r}, but model {source!r} is not computed in its own blocks: {reason}; "
            "allowed: 'auto'"
        )
    unpacked = None if found is None else found.unpacked(options)
    return None if unpacked is None else FromBlocks(*unpacked, False)


def _otherwise(options: LoadOptions) -> str | None:
    """Why these options ask for something else than blocks."""
    if options.dtype != "auto":
        return f"dtype={options.dtype!r} unpacks it"
    if options.fast is False:
        return "fast=False unpacks it"
    if options.quantise in ("int4", "int8"):
        return f"draft_dtype={options.quantise!r} rounds it anew"
    if options.for_reader:
        return f"load_options {', '.join(options.for_reader)} are for transformers' reader"
    device = options.device
    if device == "auto" and torch.cuda.is_available():
        return "it is unpacked for the GPU"
    return None if device in ("auto", "cpu") else f"device={device!r}"


def load_unpacked(source: str, options: LoadOptions) -> Any:
    """A model in floating point, on the weights as transformers loads them or, of quantised ones, what they mean.

    options: of them dtype, device, extra and rounding count.
    """
    from slipstream.models.hf.weights import load_model

    wanted = LoadOptions(options.dtype, options.device, False, options.extra, rounding=options.rounding)
    found = load_in_blocks(source, wanted)
    return (load_model(source, wanted)[1] if found is None else found.model).eval()
