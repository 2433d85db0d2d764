"""Prepares Hugging Face models: loads or wraps them, speeds them up, and checks that logits stay the same."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

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
from slipstream.models.cpu.thread_placement import separate_threads
from slipstream.models.cuda.graph_backend import GraphedBackend, use_kernels
from slipstream.models.cuda.graph_store import why_not_captured
from slipstream.models.cuda.indexed_cache import WIDTHS
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.decoder.fused_linear import called_by_none, fuse, linear_calls
from slipstream.models.decoder.recurrent_mixers import order_outputs, recurrent_layers
from slipstream.models.draft_vocabulary import Restriction
from slipstream.models.generation_settings import end_ids
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import make_faster
from slipstream.models.hf.model_view import ModelView, unwrapped
from slipstream.models.hf.own_caches import OwnCacheBackend
from slipstream.models.hf.state_trials import differ, is_causal, own_cache_backend, why_not_on_slots
from slipstream.models.hf.supported_models import not_by_position, without_weights
from slipstream.models.hf.trials import OwnLogits, PassedTrials, passed_trials
from slipstream.models.hf.vision import vision_of
from slipstream.models.loaded import PLAN, Loaded, LoadOptions
from slipstream.models.notices import warn_slower
from slipstream.models.quantized_models import QuantizedModel
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer

log = logging.getLogger("slipstream")

_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_PLAIN = "'auto', 'bfloat16', 'float16', 'float32'"  # dtypes of a draft model that is not quantized
Convert = Callable[[nn.Linear], nn.Module]
_TRIED: WeakSet[Any] = WeakSet()  # models whose logits over a slot cache have been checked
AnyBackend = HFBackend | GraphedBackend | OwnCacheBackend


def wrap_model(model: Any, tokenizer: Any, options: LoadOptions) -> Loaded:
    """Wrap the caller's `PreTrainedModel`. tokenizer: needed for text prompts only.

    The model itself does not change, only the modules of a view of it. Its weights stay in memory next to packed ones,
    so they are packed only if fast=True asks for it. Capturing its forwards copies no weights.
    """
    owned = unwrapped(model)
    if (reason := without_weights(owned)) is not None:
        raise UsageError(f"model {type(owned).__name__} is not supported: {reason}")
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else None
    view = ModelView(owned)
    model = view.model
    _declare_sizes(model)
    convert = _quantized(model, options, "'auto'") if options.quantize in BITS else None
    if convert is None and options.fast is True:
        convert = _packed(model, True)
    if convert is not None:
        separate_threads()
    elif options.vocabulary not in ("auto", "full"):
        raise UsageError(
            f"draft_vocabulary={options.vocabulary!r}, but the draft model is loaded already and stays as it is; "
            "allowed: 'auto' or 'full', or draft_dtype='int4' or 'int8', which replaces its layers"
        )
    restriction = Restriction(model, options.vocabulary, convert)
    backend = _backend(model, options.fast, convert, owned=owned)
    name, packed = model.config._name_or_path or type(model).__name__, convert is not None
    ends, fingerprint = end_ids(model, backend.vocab_size), _fingerprint(backend, packed)
    head = restriction.apply(by_position=isinstance(backend, HFBackend))
    if packed or head is not None or recurrent_layers(model):
        view.note_copies()
    vision = vision_of(None, backend, options)
    return Loaded(backend, name, ends, wrapped, owned, packed, fingerprint, head, view=view, vision=vision)


def wrap_again(loaded: Loaded, options: LoadOptions) -> Loaded:
    """Wrap a model again after its owner has changed it."""
    _TRIED.discard(loaded.model)
    return replace(wrap_model(loaded.model, None, options), tokenizer=loaded.tokenizer)


def _declare_sizes(model: Any) -> None:
    """Give linear layers the sizes of their weights: PEFT's copies of tied embeddings declare them swapped."""
    for module in model.modules():
        weight = module.weight if isinstance(module, nn.Linear) else None
        if isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point():
            module.out_features, module.in_features = weight.shape


def _backend(
    model: Any, fast: bool | str, convert: Convert | None, passed: PassedTrials | None = None, owned: Any = None
) -> AnyBackend:
    """The backend that runs a model.

    convert: makes the replacement of each linear layer; None if they stay plain, or a file's blocks have replaced them
    already. owned: the caller's model, if `model` is a view of it. On CUDA, unless `fast` is False, forwards are
    computed by Triton kernels, or else by transformers, and captured as graphs. A model whose state cannot be written
    by position runs on caches of its own.
    """
    if getattr(model.config.get_text_config(), "num_hidden_layers", None) == 0:
        raise UsageError(f"model {type(model).__name__} has num_hidden_layers=0; allowed: at least one layer")
    captured = _is_captured(model, fast)
    reason, runs_kernels = not_by_position(model), convert is not None or bool(arithmetic_of(model))
    if reason is None:
        reason = why_not_on_slots(lambda: is_causal(HFBackend(model), model))
    if convert is not None:
        _convert(model, convert)
    elif fast is not False and owned is None and model.device.type == "cpu":
        convert_experts(model)  # also where linear layers stay, as in some float16 models
    if reason is None:
        graphed = GraphedBackend(model) if captured else None
        backend = HFBackend(model) if graphed is None else graphed.eager
        own_logits, trial = OwnLogits(backend, passed), "slots of a cache"
        if convert is not None or owned not in _TRIED:  # a plain model that has passed needs no second trial
            reason = why_not_on_slots(lambda: trial in own_logits.passed or _gives_own_logits(model, own_logits))
        if reason is None:
            own_logits.passed.add(trial)
            if owned is not None:
                _TRIED.add(owned)
            if runs_kernels:
                make_faster(backend, own_logits)
            elif graphed is not None and (why := use_kernels(graphed, own_logits, may_join=owned is None)) is not None:
                warn_slower(f"{type(model).__name__} runs transformers' own forward, captured as CUDA graphs: {why}")
            return graphed or backend
    if captured and fast is True:
        raise _cannot_be_captured(model, reason)
    log.info("%s runs on caches of its own: %s", type(model).__name__, reason)
    return own_cache_backend(model)


def _gives_own_logits(model: Any, own_logits: OwnLogits) -> bool:
    """True if the backend's logits equal those of its model without a cache."""
    with own_logits.same_experts():
        return not differ(model, *own_logits.logits)


def _is_captured(model: Any, fast: bool | str) -> bool:
    """True if forwards will be captured as graphs. Raises `UsageError` if fast=True and they cannot be."""
    if fast is False or model.device.type != "cuda":
        return False
    reason = not_by_position(model) or why_not_captured(model)
    if reason is None and recurrent_layers(model):
        reason = "it has recurrent layers"
    if reason is not None and fast is True:
        raise _cannot_be_captured(model, reason)
    if reason is not None:
        log.info("%s runs without CUDA graphs: %s", type(model).__name__, reason)
    return reason is None


def _cannot_be_captured(model: Any, reason: str) -> UsageError:
    return UsageError(f"fast=True, but {type(model).__name__} cannot be captured: {reason}; allowed: 'auto' or False")


def _packed(model: Any, fast: bool | str) -> Convert | None:
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


def _quantized(model: Any, options: LoadOptions, allowed: str) -> Convert | None:
    """The function that quantizes a layer; for "auto", one that packs it where quantizing gains nothing.

    Raises `UsageError` if "int4" or "int8" is asked for and the layers cannot be quantized.
    """
    bits, is_required = options.quantize, options.quantize in BITS
    if not is_required and (options.fast is False or num_weights(model) < SMALLEST):
        return _packed(model, options.fast)
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
        return _packed(model, options.fast)
    return partial(quantized, bits=str(bits) if is_required else "int4", memory=HugePages())


def _convert(model: Any, convert: Convert) -> None:
    """Replace each linear layer that runs by `convert` of it; layers that share an input become one."""
    order_outputs(model)
    convert_experts(model, convert)
    convert_latent(model, convert)
    calls, is_tied = linear_calls(model), are_tied(model)
    unused = called_by_none(model, calls)
    fuse(model, convert, calls)
    pack(model, convert, unused)
    if model.dtype == torch.float16:
        widen(model, is_tied)


def load_pretrained(source: str, options: LoadOptions, tokenizer: Any, quantized: QuantizedModel | None) -> Loaded:
    """Load a folder, a .gguf file, the default model or a hub id. quantized: the result of `load_in_blocks`."""
    from slipstream.models.plain_models import load_model

    if PLAN in options.extra:
        return _load_parallel(source, options, tokenizer)
    folder, model = load_model(source, options) if quantized is None else (quantized.folder, quantized.model)
    _declare_sizes(model)
    in_blocks = quantized is not None and quantized.in_blocks
    if model.device.type == "cpu":
        separate_threads()
    read = None if quantized is None else quantized.tokenizer
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else read or load_tokenizer(source, folder, options)
    convert = None
    if not in_blocks:
        convert = _quantized(model, options, _PLAIN) if options.quantize else _packed(model, options.fast)
    restriction = Restriction(model, options.vocabulary, convert)
    layer_kind = "in blocks" if in_blocks else f"{options.quantize} {getattr(convert, '__name__', None)}"
    # captured forwards score the whole vocabulary
    fast = options.fast if options.vocabulary in ("auto", "full") else options.fast is True
    backend = _backend(model, fast, convert, passed_trials(source, folder, model, options, layer_kind))
    ends, packed = end_ids(model, backend.vocab_size), convert is not None or in_blocks or bool(experts_of(model))
    fingerprint = _fingerprint(backend, packed)
    head = restriction.apply(by_position=isinstance(backend, HFBackend))
    name = source if options.rounding == "none" else f"{source} quantized to {options.rounding}, group {INPUTS}"
    loaded = Loaded(backend, name, ends, wrapped, model, packed, fingerprint, head, arithmetic_of(model))
    vision = vision_of(folder, backend, options)
    if not isinstance(vision, str) and wrapped is not None and not wrapped.has_chat_template:
        wrapped.inner.chat_template = vision.chat_template()
    return replace(loaded, source=source, rounding=options.rounding, vision=vision)


def _load_parallel(source: str, options: LoadOptions, tokenizer: Any) -> Loaded:
    """Load a target across the processes of torchrun; on ranks other than 0 this does not return."""
    from slipstream.models.hf.tensor_parallel import check_heads, join_ranks, lead_or_follow, loading_options
    from slipstream.models.plain_models import load_model

    ranks = join_ranks()
    options = loading_options(options)
    folder, model = load_model(source, options)
    check_heads(source, model, ranks.size())
    _backend(model, False, None)  # on every rank: tries the model's forward
    backend = lead_or_follow(model, ranks)
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else load_tokenizer(source, folder, options)
    fingerprint = f"{_fingerprint(backend, False)} over {ranks.size()} ranks"
    return Loaded(backend, source, end_ids(model, backend.vocab_size), wrapped, model, False, fingerprint)


def _fingerprint(backend: AnyBackend, packed: bool) -> str:
    model, kind = backend.model, "packed" if packed else "plain"
    if isinstance(backend, GraphedBackend):
        kind = f"graphed at {WIDTHS}{' by kernels' if backend.shape_independent else ''}"
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
    layers = f"{type(model).__name__} {layers} {fused}{recurrent}layers {config._attn_implementation}"
    sizes = f"{hidden} {heads} {inner} {backend.vocab_size}"
    return f"{layers} {sizes} {model.dtype} {exact}{kind} {' '.join(shapes)}"
