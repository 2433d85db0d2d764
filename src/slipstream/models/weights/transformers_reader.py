"""Reads models with transformers: its errors, its classes, its report on weights, and silencing it."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from slipstream.errors import MODEL_ERRORS, SlipstreamError, UsageError, first_line
from slipstream.models.weights.unused_tensors import refuse_unused

DTYPES = {"auto": "auto", "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHOWN = 3  # names in a message


@cache
def reader_errors() -> tuple[type[Exception], ...]:
    """Errors of transformers, huggingface_hub and safetensors for files that are damaged, missing or of another
    version.

    Call it only after an error, since importing huggingface_hub takes time.
    """
    from huggingface_hub.errors import StrictDataclassError

    return (
        *MODEL_ERRORS,
        OSError,
        ImportError,
        EOFError,
        UnpicklingError,
        struct.error,
        SafetensorError,
        StrictDataclassError,
    )


def auto_class(config: Any) -> Any:
    """The auto class for a configuration: for causal language models, or for multimodal models.

    Raises `ValueError` for other configurations.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    for auto in (AutoModelForCausalLM, AutoModelForMultimodalLM):
        if type(config) in auto._model_mapping or auto.__name__ in (getattr(config, "auto_map", None) or {}):
            return auto
    raise ValueError(f"{type(config).__name__} is not for a causal language model; allowed: models that generate text")


def from_config(config: Any, files: Mapping[str, Any], **options: Any) -> Any:
    """The model of a configuration, with fresh weights. files: see `LoadOptions.files`."""
    code = {name: value for name, value in files.items() if name in ("trust_remote_code", "code_revision")}
    return auto_class(config).from_config(config, **({"trust_remote_code": False} | code), **options)


def names_in_model(model: Any) -> Callable[[str], str]:
    """A function from a tensor's name in files to the model's parameter, by transformers' rules."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming

    rules = get_model_conversion_mapping(model, add_legacy=False)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]

    def renamed(name: str) -> str:
        for renaming in renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    return renamed


def is_applied_by_transformers(quantization: Any) -> bool:
    """True for a `quantization_config` that transformers applies, or refuses with its own message."""
    from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING

    method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
    return method in (None, "bitsandbytes") or method in AUTO_QUANTIZER_MAPPING


def check_weights(source: str, report: dict[str, Any], allow_mismatches: bool = False) -> None:
    """Refuse weights that do not fit the configuration: transformers fills what is missing with random numbers.

    report: what `from_pretrained` returns with output_loading_info=True; tied weights are not missing.
    """
    if missing := sorted(report["missing_keys"]):
        raise SlipstreamError(
            f"model {source!r}: the weights do not fit config.json: {len(missing)} are missing, "
            f"first {_first_few(missing)}; allowed: weights of the architecture and sizes that config.json names"
        )
    other = [
        f"{key} is {tuple(saved)} in the file and {tuple(needed)} by config.json"
        for key, saved, needed in sorted(report["mismatched_keys"])
    ]
    if other and not allow_mismatches:
        raise SlipstreamError(
            f"model {source!r}: {len(other)} weights have another shape, first {_first_few(other, '; ')}"
        )
    refuse_unused(source, report["unexpected_keys"])


def check_finite(source: str, model: Any) -> None:
    """Refuse weights that are infinite or NaN, since logits would be, too."""
    for name, weight in model.named_parameters():
        if not weight.is_floating_point() or weight.itemsize == 1 or weight.is_meta:
            continue
        # the sum is fast; it is not finite if a number is not, or if it overflows
        if not torch.isfinite(weight.detach().sum()) and not torch.isfinite(weight.detach()).all():
            raise SlipstreamError(
                f"model {source!r}: tensor {name!r} holds numbers that are not finite; allowed: finite numbers"
            )


def wrong_rotation(source: str, config: Any) -> SlipstreamError | None:
    """The error to raise if rotary settings made building a model fail; transformers' own error names no field."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = getattr(config.get_text_config(), "rope_parameters", None) if config is not None else None
    if not isinstance(parameters, Mapping):
        return None
    kinds = ["default", *ROPE_INIT_FUNCTIONS]
    for settings in [value for value in parameters.values() if isinstance(value, Mapping)] or [parameters]:
        for name, value in settings.items():
            wrong = None
            if name == "rope_type":
                wrong = None if value in kinds else ", ".join(dict.fromkeys(kinds))
            elif name != "type" and (value is None or isinstance(value, str)):
                wrong = "a number"
            if wrong is not None:
                return SlipstreamError(
                    f"model {source!r}: the rotary settings of config.json have {name}={value!r}; allowed: {wrong}"
                )
    return None


def _first_few(items: Sequence[str], separator: str = ", ") -> str:
    return separator.join(items[:SHOWN])


@contextmanager
def quietly() -> Iterator[None]:
    """Silence transformers' progress bars and reports inside the block."""
    from transformers.utils import logging as transformers_logging

    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def device_named(device: str) -> torch.device:
    """The device of this name. Raises `UsageError` for one that this machine does not have."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    allowed = "allowed: auto, cpu, cuda, cuda:N"
    try:
        named = torch.device(device)
    except RuntimeError:  # its message lists every type of device
        raise UsageError(f"device={device!r}; {allowed}") from None
    try:
        return torch.empty(0, device=named).device
    except (RuntimeError, AssertionError) as error:
        # a C++ stack follows the first line
        raise UsageError(f"device={device!r}: {first_line(error)}; {allowed}") from error
