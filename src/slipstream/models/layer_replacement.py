"""Replaces a model's linear layers by packed or quantized ones, and names the result."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from slipstream.errors import UsageError
from slipstream.models.cpu.block_experts import experts_of
from slipstream.models.cpu.float16_linear import are_tied, in_panels, not_in_panels, widen
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import bfloat16_version, block_version, kernels
from slipstream.models.cpu.packed_linear import KernelLinear, compressed_or_packed, pack, unsupported
from slipstream.models.cpu.quantized_linear import (
    BITS,
    SMALLEST,
    arithmetic_of,
    convert_experts,
    convert_latent,
    formats_of,
    num_weights,
    quantized,
)
from slipstream.models.cpu.structs import INPUTS
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.decoder.fused_linear import Calls, called_by_none, fuse, linear_calls
from slipstream.models.decoder.recurrent_mixers import order_outputs
from slipstream.models.hf.backend import HFBackend
from slipstream.models.loaded import LoadOptions
from slipstream.models.notices import warn_slower

Convert = Callable[[nn.Linear], nn.Module]
_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
PLAIN = "'auto', 'bfloat16', 'float16', 'float32'"  # dtypes of a draft model that is not quantized


def packing(model: Any, fast: bool | str) -> Convert | None:
    """The function that packs a layer; None if layers stay plain. Raises `UsageError` if fast=True and they must."""
    if fast is False or model.device.type == "cuda":
        return None
    is_float16 = model.dtype == torch.float16
    reason = not_in_panels(model) if is_float16 else unsupported(model)
    if reason is None:
        return in_panels if is_float16 else compressed_or_packed
    if fast is True:
        raise UsageError(f"fast=True, but {type(model).__name__} cannot be packed: {reason}; allowed: 'auto' or False")
    warn_slower(f"the weights of {type(model).__name__} are not packed: {reason}")
    return None


def quantizing(model: Any, options: LoadOptions, allowed: str) -> Convert | None:
    """The function that quantizes a layer; for "auto", one that packs it where quantizing gains nothing.

    Raises `UsageError` if "int4" or "int8" is asked for and the layers cannot be quantized.
    """
    bits, is_required = options.quantize, options.quantize in BITS
    if not is_required and (options.fast is False or num_weights(model) < SMALLEST):
        return packing(model, options.fast)
    reason = unsupported(model)
    if reason is None and num_weights(model) == 0:
        reason = f"no linear layer has a multiple of {INPUTS} inputs"
    if reason is None and kernels() is None:
        reason = "Slipstream's own kernels are not available"
    if reason is not None:
        if is_required:
            raise UsageError(
                f"draft_dtype={bits!r}, but {type(model).__name__} cannot be quantized: {reason}; allowed: {allowed}"
            )
        return packing(model, options.fast)
    return partial(quantized, bits=str(bits) if is_required else "int4", memory=HugePages())


def replace_layers(model: Any, convert: Convert, calls: Calls | None = None) -> None:
    """Replace each linear layer that runs by `convert` of it; layers that share an input become one.

    calls: the result of `linear_calls`; None computes it here.
    """
    order_outputs(model)
    convert_experts(model, convert)
    convert_latent(model, convert)
    calls, is_tied = linear_calls(model) if calls is None else calls, are_tied(model)
    unused = called_by_none(model, calls)
    fuse(model, convert, calls)
    pack(model, convert, unused)
    if model.dtype == torch.float16:
        widen(model, is_tied)


def fingerprint(backend: Any, name: str, kind: str) -> str:
    """All that the cost and the bits of a forward depend on. name: of the model's class; kind: of its weights."""
    model = backend.model
    shapes = sorted({f"{tuple(p.shape)} {p.dtype}" for p in model.parameters()})
    config = model.config.get_text_config()
    experts = experts_of(model)
    is_compressed = any(isinstance(module, KernelLinear) for module in model.modules())
    exact = f"{bfloat16_version()} " if experts or is_compressed else ""
    if experts:
        exact += f"experts {'+'.join(sorted({name for block in experts for name in block.formats}))} "
    if formats := formats_of(model):
        exact += f"{formats} "
    if arithmetic := arithmetic_of(model):
        exact = f"{block_version()} {arithmetic} "
    fused = "fused " if any(is_fused(module) for module in model.modules()) else ""
    states = backend.cache.states if isinstance(backend, HFBackend) else None
    recurrent = "" if states is None else "compiled states " if states.compiled else "states "
    layers, hidden, heads, inner = (getattr(config, name, "") for name in _SIZES)
    layers = f"{name} {layers} {fused}{recurrent}layers {config._attn_implementation}"
    sizes = f"{hidden} {heads} {inner} {backend.vocab_size}"
    return f"{layers} {sizes} {model.dtype} {exact}{kind} {' '.join(shapes)}"
