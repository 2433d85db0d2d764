"""Hugging Face models from wherever they come, ready for use: loaded, wrapped, packed where that is faster."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from slipstream.errors import UsageError
from slipstream.models.cpu.compressed_linear import CompressedLinear, compressed_or_packed
from slipstream.models.cpu.kernel_build import version
from slipstream.models.cpu.packed_linear import pack, unsupported
from slipstream.models.cpu.quantised_linear import BITS, SMALLEST, is_faster, num_weights, rounded
from slipstream.models.cpu.thread_placement import separate_threads
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.graph_store import unsupported as not_captured
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf.backend import HFBackend, not_by_position
from slipstream.models.hf.fast_forwards import make_faster
from slipstream.models.hf.fused_layer import is_fused
from slipstream.models.hf.fused_linear import called_by_none, fuse, linear_calls
from slipstream.models.hf.hf_tokenizer import HFTokenizer, load_tokenizer
from slipstream.models.hf.own_caches import OwnCacheBackend
from slipstream.models.hf.state_trials import check_causal, own_cache_backend
from slipstream.models.loaded import Loaded, LoadOptions

log = logging.getLogger("slipstream")

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
AnyBackend = HFBackend | GraphedBackend | OwnCacheBackend


def wrap_model(model: Any, tokenizer: Any, options: LoadOptions) -> Loaded:
    """A loaded `PreTrainedModel` as a backend; its tokenizer is needed for text prompts only.

    The model is the caller's, so its weights are packed only if fast=True asks for it.
    """
    if not hasattr(model, "config") or not hasattr(model, "get_output_embeddings"):
        raise UsageError(f"model of type {type(model).__name__}; allowed: a Hugging Face PreTrainedModel")
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else None
    backend = _backend(model, options.fast)
    packed = _quantise(backend, options) if options.quantise in BITS else options.fast is True and _pack(backend, True)
    name = model.config._name_or_path or type(model).__name__
    ends = end_ids(model, backend.vocab_size)
    return Loaded(backend, name, ends, wrapped, model, packed, _fingerprint(backend, packed))


def _backend(model: Any, fast: bool | str) -> AnyBackend:
    """With fast=True on CUDA captured graphs, which leave the model as it is; else the plain backend.

    A model whose state cannot be written by position runs on caches of its own.
    """
    captured = fast is True and model.device.type == "cuda"
    reason = not_by_position(model)
    if reason is not None and not captured:
        return own_cache_backend(model)
    if not captured:
        backend = HFBackend(model)
        check_causal(backend, model)
        return backend
    reason = reason or not_captured(model)
    if reason is not None:
        raise UsageError(
            f"fast=True, but {type(model).__name__} cannot be captured: {reason}; allowed: 'auto' or False"
        )
    return GraphedBackend(model)


def _pack(backend: AnyBackend, fast: bool | str) -> bool:
    if fast is False or isinstance(backend, GraphedBackend) or backend.device.type == "cuda":
        return False
    model = backend.model
    reason = unsupported(model)
    if reason is None:
        _convert(backend, compressed_or_packed)
    elif fast is True:
        raise UsageError(f"fast=True, but {type(model).__name__} cannot be packed: {reason}; allowed: 'auto' or False")
    else:
        warn_slower(f"{type(model).__name__} keeps its plain weights: {reason}")
    return reason is None


def _quantise(backend: AnyBackend, options: LoadOptions) -> bool:
    """Quantise as asked, or say why that cannot be; "auto" packs instead where that is no gain."""
    model, bits, asked = backend.model, options.quantise, options.quantise in BITS
    if not asked and (options.fast is False or num_weights(model) < SMALLEST or not is_faster(model.dtype)):
        return _pack(backend, options.fast)
    reason = unsupported(model)
    if reason is None and num_weights(model) == 0:
        reason = "no linear layer has a shape that the kernels take"
    if reason is not None:
        if asked:
            raise UsageError(f"draft_dtype={bits!r}, but {type(model).__name__} cannot be quantised: {reason}")
        return _pack(backend, options.fast)
    assert not isinstance(backend, GraphedBackend)  # no model on CUDA gets here
    bits = bits if bits in BITS else BITS[0]
    _convert(backend, lambda linear: rounded(linear, bits))
    return True


def _convert(backend: HFBackend | OwnCacheBackend, convert: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linear layers that run by what `convert` makes of them, those of one input together."""
    calls = linear_calls(backend.model)
    leave = called_by_none(backend.model, calls)
    fuse(backend.model, convert, calls)
    pack(backend.model, convert, leave)
    if isinstance(backend, HFBackend):
        make_faster(backend)


def end_ids(model: Any, vocab_size: int) -> tuple[int, ...]:
    """The end-of-sequence ids `generate` would use."""
    ends = model.generation_config.eos_token_id if model.generation_config is not None else None
    if ends is None:
        ends = model.config.get_text_config().eos_token_id
    ids = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]
    return tuple(i for i in ids if 0 <= i < vocab_size)


def load_pretrained(source: str, options: LoadOptions, tokenizer: Any) -> Loaded:
    """Load a folder, a .gguf file, the embedded model or a hub id."""
    from slipstream.models.hf.weights import load_model

    folder, model = load_model(source, options)
    if model.device.type == "cpu":
        separate_threads()
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else load_tokenizer(source, folder)
    backend = _backend(model, options.fast)
    packed = _quantise(backend, options) if options.quantise else _pack(backend, options.fast)
    ends = end_ids(model, backend.vocab_size)
    return Loaded(backend, source, ends, wrapped, model, packed, _fingerprint(backend, packed))


def _fingerprint(backend: AnyBackend, packed: bool) -> str:
    model, kind = backend.model, "packed" if packed else "graphed" if isinstance(backend, GraphedBackend) else "plain"
    shapes = sorted({f"{tuple(p.shape)} {p.dtype}" for p in model.parameters()})
    config = model.config.get_text_config()
    exact = f"{version()} " if any(isinstance(module, CompressedLinear) for module in model.modules()) else ""
    fused = "fused " if any(is_fused(module) for module in model.modules()) else ""
    layers, hidden, heads, inner = (getattr(config, name, "") for name in _SIZES)
    layers = f"{type(model).__name__} {layers} {fused}layers {config._attn_implementation}"
    sizes = f"{hidden} {heads} {inner} {backend.vocab_size}"
    return f"{layers} {sizes} {model.dtype} {exact}{kind} {' '.join(shapes)}"
