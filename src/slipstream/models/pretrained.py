"""Prepares Hugging Face models: loads or wraps them, speeds them up, and checks that logits stay the same."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.models.cpu.block_experts import experts_of
from slipstream.models.cpu.quantized_linear import (
    BITS,
    arithmetic_of,
    convert_experts,
)
from slipstream.models.cpu.structs import INPUTS
from slipstream.models.cpu.thread_placement import separate_threads
from slipstream.models.cuda.graph_backend import GraphedBackend, use_kernels
from slipstream.models.cuda.graph_store import why_not_captured
from slipstream.models.cuda.indexed_cache import WIDTHS
from slipstream.models.decoder.recurrent_mixers import recurrent_layers
from slipstream.models.described_checkpoints import checkpoint_identity, describe, description_of
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
from slipstream.models.layer_replacement import PLAIN, Convert, fingerprint, packing, quantizing, replace_layers
from slipstream.models.loaded import PLAN, Loaded, LoadOptions
from slipstream.models.notices import warn_slower
from slipstream.models.quantized_models import QuantizedModel
from slipstream.models.weights.tokenizer_loading import load_tokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer

log = logging.getLogger("slipstream")

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
    convert = quantizing(model, options, "'auto'") if options.quantize in BITS else None
    if convert is None and options.fast is True:
        convert = packing(model, True)
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
        replace_layers(model, convert)
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


def load_pretrained(source: str, options: LoadOptions, tokenizer: Any, quantized: QuantizedModel | None) -> Loaded:
    """Load a folder, a .gguf file, the default model or a hub id. quantized: the result of `load_in_blocks`."""
    from slipstream.models.plain_models import load_model

    if PLAN in options.extra:
        return _load_parallel(source, options, tokenizer)
    identity = checkpoint_identity(source, options) if quantized is None and tokenizer is None else None
    folder, model = load_model(source, options) if quantized is None else (quantized.folder, quantized.model)
    _declare_sizes(model)
    description = None if identity is None else description_of(source, folder, model)
    in_blocks = quantized is not None and quantized.in_blocks
    if model.device.type == "cpu":
        separate_threads()
    read = None if quantized is None else quantized.tokenizer
    wrapped = HFTokenizer(tokenizer) if tokenizer is not None else read or load_tokenizer(source, folder, options)
    convert = None
    if not in_blocks:
        convert = quantizing(model, options, PLAIN) if options.quantize else packing(model, options.fast)
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
    loaded = replace(loaded, source=source, rounding=options.rounding, vision=vision)
    if identity is not None and description is not None:
        describe(description, identity, folder, options, loaded)
    return loaded


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
    kind = "packed" if packed else "plain"
    if isinstance(backend, GraphedBackend):
        kind = f"graphed at {WIDTHS}{' by kernels' if backend.shape_independent else ''}"
    return fingerprint(backend, type(backend.model).__name__, kind)
