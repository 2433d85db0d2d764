"""Turns a name, a path or a model in memory into a `Loaded` model."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import torch

from slipstream.errors import UsageError
from slipstream.models.cpu.thread_placement import limit_threads
from slipstream.models.loaded import FETCHING, PLAN, WHICH_FILES, Loaded, LoadOptions, is_toy
from slipstream.models.paused_collection import paused_collection
from slipstream.models.weights.hub_files import local_file


def load(source: Any, options: LoadOptions, tokenizer: Any = None) -> Loaded:
    """Load a target or draft model.

    source: "toy" or "toy:ORDER", a short name, a hub id (with a quantization to select a GGUF file there), a local
    folder, a .gguf file, or a loaded Hugging Face model.
    """
    limit_threads()
    if options.rounding != "none" and (is_toy(source) or isinstance(source, torch.nn.Module)):
        why = "the toy model has no weights" if is_toy(source) else "the model is loaded already"
        raise UsageError(f"quantize={options.rounding!r}, but {why}; allowed: 'none'")
    if is_toy(source):
        from slipstream.models.toy import load_toy

        return load_toy(source)
    if isinstance(source, torch.nn.Module):
        with paused_collection():
            from slipstream.models.pretrained import wrap_model
        return wrap_model(source, tokenizer, options)
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        file = local_file(source, options.extra) if isinstance(source, str) else str(source)
        if file != str(source):  # a file of the hub, which is fetched by now
            extra = {name: value for name, value in options.extra.items() if name not in (*FETCHING, *WHICH_FILES)}
            loaded = load(file, replace(options, extra=extra), tokenizer)
            return replace(loaded, name=loaded.name.replace(file, str(source)))
        with paused_collection():
            if "transformers" not in sys.modules:  # else its own classes cost little, and callers get its objects
                from slipstream.models.described_checkpoints import load_described

                described = load_described(str(source), options, tokenizer)
                if described is not None:
                    return described
            from slipstream.models.decoder.planned_model import PlannedModel
            from slipstream.models.planned_models import load_planned
            from slipstream.models.quantized_models import load_in_blocks

            # before importing `pretrained`, which takes two seconds: a GGUF file is packed meanwhile
            quantized = None
            if PLAN not in options.extra:
                quantized = load_in_blocks(str(source), options, reads_tokenizer=tokenizer is None)
            if quantized is not None and isinstance(quantized.model, PlannedModel):
                planned = load_planned(str(source), options, tokenizer, quantized)
                if planned is not None:
                    return planned
                quantized = None
            from slipstream.models.pretrained import load_pretrained

            return load_pretrained(str(source), options, tokenizer, quantized)
    swapped = " (a tokenizer goes into tokenizer=)" if hasattr(source, "decode") else ""
    shown = f"{source!r}".splitlines()[0][:60]  # some objects print themselves over many lines
    raise UsageError(
        f"model {shown} is a {type(source).__name__}{swapped}; allowed: a hub id, a folder, a .gguf file, 'toy', "
        "or a loaded Hugging Face model"
    )
