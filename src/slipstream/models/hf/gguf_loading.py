"""Whether a GGUF file is computed with in its own blocks, or unpacked, which is said once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from slipstream.errors import UsageError
from slipstream.models.hf.gguf_blocks import check_blocks, model_of_blocks
from slipstream.models.hf.gguf_description import described
from slipstream.models.hf.gguf_header import read_header
from slipstream.models.hf.gguf_tensors import NotInBlocksError
from slipstream.models.loaded import LoadOptions

log = logging.getLogger("slipstream")


def load_blocks(source: str, options: LoadOptions) -> tuple[str, Any] | None:
    """The folder to take the tokenizer from and the model that computes with a file's blocks.

    None where the model is no GGUF file, or is to be unpacked: because the options say so, or with a warning because
    its blocks cannot be computed with. Raises `UsageError` where the options ask for activations of blocks then.
    """
    asked = options.activations != "auto"
    reason = "it is no GGUF file" if not source.endswith(".gguf") else _otherwise(options)
    if reason is None:
        header = read_header(Path(source).expanduser())
        header.check()
        try:
            check_blocks(header)
            folder = described(header)
            return str(folder), model_of_blocks(header, folder, options.activations if asked else "int8")
        except NotInBlocksError as error:
            reason = str(error)
            if not asked:
                log.warning("%s is unpacked to bfloat16, which rounds its weights: %s", header.file.name, reason)
    if asked:
        raise UsageError(
            f"activations={options.activations!r}, but model {source!r} is not computed in its own blocks: {reason}; "
            "allowed: 'auto'"
        )
    return None


def _otherwise(options: LoadOptions) -> str | None:
    """Why these options ask for something else than a file's blocks."""
    if options.dtype != "auto":
        return f"dtype={options.dtype!r} unpacks it"
    if options.fast is False:
        return "fast=False unpacks it"
    if options.quantise in ("int4", "int8"):
        return f"draft_dtype={options.quantise!r} rounds it anew"
    if options.extra:
        return f"load_options {', '.join(options.extra)} are for transformers' reader"
    device = options.device
    if device == "auto" and torch.cuda.is_available():
        return "it is unpacked for the GPU"
    return None if device in ("auto", "cpu") else f"device={device!r}"
