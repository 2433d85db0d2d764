"""Models in floating point: read by transformers, or unpacked from quantized files."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.loaded import PLAN, WHICH_FILES, LoadOptions
from slipstream.models.quantized_models import generation_settings, load_in_blocks
from slipstream.models.weights.adapters import Adapter, adapter_at
from slipstream.models.weights.model_files import is_gguf, not_loaded
from slipstream.models.weights.quantized_checkpoint import METHODS
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import INDEX, SINGLE, CheckpointFiles, check_not_quantized, file_of
from slipstream.models.weights.transformers_reader import (
    DTYPES,
    auto_class,
    check_finite,
    check_weights,
    device_named,
    is_applied_by_transformers,
    quietly,
    reader_errors,
    wrong_rotation,
)

PLACING = {"device_map", "distributed_config"}  # load options that say where weights go


def load_model(source: str, options: LoadOptions) -> tuple[str, Any]:
    """Load a model with transformers; return the folder or hub id of its tokenizer, and the model."""
    if PLAN in options.extra:
        raise UsageError(f"load_options {PLAN!r} for a model that is not a target; allowed: no {PLAN}")
    if is_gguf(source) and options.dtype == "float32" and not options.extra:
        return _dequantized(source, options.device)
    folder = resolve(source, options.extra)
    if (adapter := _adapter(source, folder, options)) is not None:
        return _adapted(adapter, options)
    generation_settings(source, folder, options.files)  # refuses a damaged file, which transformers ignores
    device = None if options.extra.keys() & PLACING else device_named(options.device)
    _read_ahead(Path(folder))
    from transformers import AutoConfig  # takes seconds

    config = None
    try:
        with quietly():
            config = options.extra.get("config") or AutoConfig.from_pretrained(folder, **options.files)
            _check_quantization(source, folder, config, options)
            arguments: dict[str, Any] = {"dtype": DTYPES[options.dtype], "ignore_mismatched_sizes": True}
            if device is not None and device.type == "cuda" and not is_quantized(config, options):
                arguments["device_map"] = {"": device}  # straight to the GPU, not through the host's memory
            arguments |= options.files | options.extra
            model, report = auto_class(config).from_pretrained(folder, **arguments, output_loading_info=True)
    except reader_errors() as error:
        raise wrong_rotation(source, config) or not_loaded(source, folder, error) from error
    check_weights(source, report, bool(options.extra.get("ignore_mismatched_sizes")))
    check_finite(source, model)
    if file_of(folder, SINGLE, options.files) is None and file_of(folder, INDEX, options.files) is not None:
        CheckpointFiles(source, folder, options.files).check_copies()
    if device is not None and not getattr(model, "is_quantized", False):
        model = model.to(device)
    return folder, model


def _check_quantization(source: str, folder: str, config: Any, options: LoadOptions) -> None:
    """Refuse quantized weights that transformers would read as plain ones."""
    quantization: Any = getattr(config, "quantization_config", None)
    if "quantization_config" in options.extra or is_applied_by_transformers(quantization):
        if not is_quantized(config, options):
            check_not_quantized(source, folder, options.files)
        return
    raise SlipstreamError(
        f"model {source!r}: quantization_config.quant_method of config.json is {quantization['quant_method']!r}, which "
        "transformers does not read; allowed: its own methods or, for language models without load_options, "
        f"{', '.join(METHODS)}"
    )


def is_quantized(config: Any, options: LoadOptions) -> bool:
    """True if transformers' quantizers read the model; they place its weights themselves."""
    return "quantization_config" in options.extra or getattr(config, "quantization_config", None) is not None


def _adapter(source: str, folder: str, options: LoadOptions) -> Adapter | None:
    try:
        return adapter_at(source, folder, options.files)
    except UsageError:
        raise
    except reader_errors() as error:
        raise not_loaded(source, folder, error) from error


def _adapted(adapter: Adapter, options: LoadOptions) -> tuple[str, Any]:
    """The base model of an adapter with the adapter merged into its weights; see `load_model`."""
    if "distributed_config" in options.extra:
        raise UsageError(f"load_options {PLAN!r} with the adapter {adapter.source!r}; allowed: a merged model")
    extra = {name: value for name, value in options.extra.items() if name not in WHICH_FILES}
    if adapter.revision and not expanded(adapter.base).exists():
        extra["revision"] = adapter.revision
    base = replace(options, fast=False, extra=extra, quantize=None)
    try:
        quantized = load_in_blocks(adapter.base, base)
        folder, model = load_model(adapter.base, base) if quantized is None else (quantized.folder, quantized.model)
    except SlipstreamError as error:
        raise type(error)(f"adapter {adapter.source!r} is for a base model that was not loaded: {error}") from error
    return adapter.place if adapter.has_tokenizer else folder, adapter.merged_into(model).eval()


def _dequantized(source: str, device: str) -> tuple[str, Any]:
    """Load a GGUF file in float32, which holds its numbers exactly; the cached bfloat16 conversion rounds them."""
    from slipstream.models.weights.gguf_configuration import described
    from slipstream.models.weights.gguf_conversion import dequantized
    from slipstream.models.weights.gguf_file import read_header

    header = read_header(expanded(source))
    header.check_model()
    folder = described(header)
    return str(folder), dequantized(header, folder, torch.float32).to(device_named(device))


def _read_ahead(folder: Path) -> None:
    """Ask the system to read the weights from disk while Python imports transformers."""
    if not hasattr(os, "posix_fadvise"):
        return
    for file in folder.glob("*.safetensors"):
        with suppress(OSError), file.open("rb") as stream:
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)


def load_unpacked(source: str, options: LoadOptions) -> Any:
    """Load a model in floating point; quantized weights are dequantized.

    options: only dtype, device, extra and rounding are used.
    """
    plain_options = LoadOptions(options.dtype, options.device, False, options.extra, rounding=options.rounding)
    quantized = load_in_blocks(source, plain_options)
    return (load_model(source, plain_options)[1] if quantized is None else quantized.model).eval()
