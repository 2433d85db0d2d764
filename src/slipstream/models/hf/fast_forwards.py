"""Makes a backend's forwards faster; each change stays only if the model still gives its own logits."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.block_linear import BlockEmbedding, BlockLinear
from slipstream.models.cpu.compiled_layers import LayerStack, compiled_ops
from slipstream.models.cpu.packed_linear import KernelLinear, PackedLinear
from slipstream.models.decoder.around_layers import check_nothing_between
from slipstream.models.decoder.attention import GROUPED, UngroupableError, group_mask, repeats_of
from slipstream.models.decoder.families import FAMILIES, plan_of_model
from slipstream.models.decoder.fused_layer import FusedLayer, decoder_module, fused_layers
from slipstream.models.decoder.plan import DecoderPlan, UnknownLayerError
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import (
    CLOSE,
    ROUNDINGS,
    OwnLogits,
    Trial,
    a_few_logits,
    difference,
    largest_error,
    later_logits,
    tolerance,
)
from slipstream.models.notices import warn_slower

log = logging.getLogger("slipstream")

COMPARED = "slipstream_compared"  # runs transformers' attention and the grouped one
UNLIKE = 0.5  # difference of logits that no rounding explains
TOKENS_INDEPENDENT = "whole layers, each token as if it were alone"


def make_faster(backend: HFBackend, own_logits: OwnLogits) -> None:
    """Give a model on the CPU grouped attention, then fused layers; each stays if it gives the model's own logits."""
    group_queries(backend, own_logits)
    fuse_layers(backend, own_logits)


def group_queries(backend: HFBackend, own_logits: OwnLogits | None = None) -> None:
    """Use grouped attention if it gives this model's own logits."""
    config = backend.model.config.get_text_config()
    if config._attn_implementation == GROUPED or _heads_differ(backend):
        return
    repeats, is_capped = repeats_of(config), bool(getattr(config, "attn_logit_softcapping", None))
    has_plan = config.model_type in FAMILIES
    is_only_eager = is_capped or (has_plan and not backend.model._supports_sdpa)  # "sdpa" knows neither caps nor sinks
    if config._attn_implementation not in ("sdpa", "eager" if is_only_eager else "sdpa"):
        reason: str | None = f"its attention is {config._attn_implementation!r}"
    elif repeats is None:
        reason = "its heads are not arranged in groups"
    else:
        reason = _try_grouped(backend, repeats, own_logits or OwnLogits(backend))
    if reason is not None:
        warn_slower(f"{type(backend.model).__name__} keeps transformers' attention: {reason}")


def _heads_differ(backend: HFBackend) -> bool:
    """True for a model with a plan whose layers differ in their heads; only the kernels support that."""
    config = backend.model.config.get_text_config()
    return config.model_type in FAMILIES and repeats_of(config) is None


def _try_grouped(backend: HFBackend, repeats: int, own_logits: OwnLogits) -> str | None:
    """Turn grouped attention on. Returns None if the logits stay the same; else turns it off and returns the reason."""
    config, reason = backend.model.config, "Slipstream's gives other logits"
    original = config.get_text_config()._attn_implementation

    def turn_on() -> None:
        config._attn_implementation, backend.masks.repeats = GROUPED, repeats

    try:
        if own_logits.keep_if_same("grouped attention", turn_on):
            return None
        is_comparable = original == "sdpa" or config.get_text_config().model_type in FAMILIES
        if is_comparable and own_logits.error() < UNLIKE and _attends_alike(backend, repeats, original):
            turn_on()
            own_logits.passed.add("grouped attention")
            return None
    except (UngroupableError, RuntimeError) as error:  # some models' own code reshapes or adds to the mask
        reason = str(error)
    config._attn_implementation, backend.masks.repeats = original, None
    return reason


def _attends_alike(backend: HFBackend, repeats: int, original: str) -> bool:
    """True if grouped attention gives the same results as the model's own, call by call.

    In models such as Gemma 3, later layers amplify a layer's rounding so much that comparing logits shows nothing.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    errors, registered, config = list[float](), AttentionInterface(), backend.model.config
    is_eager = original == "eager"

    def compared(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float | None, **options: Any
    ) -> tuple[Tensor, None]:
        allowed, inputs = mask if mask.dtype is torch.bool else mask == 0, (query, key, value)
        if is_eager:  # in float32, since it would round scores
            eager = sys.modules[type(module).__module__].eager_attention_forward
            wide = eager(module, *(part.float() for part in inputs), mask.float(), scaling=scaling, **options)[0]
            expected = wide.to(query.dtype), None
        else:
            expected = sdpa_attention_forward(module, *inputs, mask, scaling=scaling, **options)
        if is_eager or mask.dtype is torch.bool:
            grouped_mask = group_mask(allowed, repeats, query.dtype)
            grouped, _ = registered[GROUPED](module, *inputs, grouped_mask, scaling=scaling, **options)
            errors.append(difference(grouped, expected[0]) / max(CLOSE, ROUNDINGS * torch.finfo(query.dtype).eps))
        return expected

    AttentionInterface.register(COMPARED, compared)
    AttentionMaskInterface.register(COMPARED, sdpa_mask)
    config._attn_implementation, backend.masks.repeats = COMPARED, None
    a_few_logits(backend)
    later_logits(backend)
    return max(errors, default=math.inf) <= 1


def fuse_layers(backend: HFBackend, own_logits: OwnLogits | None = None) -> list[tuple[nn.Module, FusedLayer]]:
    """Give decoder layers a forward of fewer operators if it gives this model's own logits; returns those layers."""
    if backend.masks.repeats is None and not _heads_differ(backend):
        return []  # `group_queries` has logged the reason
    own_logits = own_logits or OwnLogits(backend)
    try:
        plan = plan_of_model(backend.model, backend.masks.windows)
        layers = fused_layers(backend.model, plan)
        if "fused layers" not in own_logits.passed:
            trials = [Trial(layer, layer.forward, forward) for layer, forward in layers]
            if largest_error(backend, trials) > tolerance(backend.model):
                raise UnknownLayerError("the fused one gives different results")
            own_logits.passed.add("fused layers")
    except UnknownLayerError as error:
        warn_slower(f"{type(backend.model).__name__} keeps its layers' own forward: {error}")
        return []
    for layer, forward in layers:
        layer.forward = forward
    use_compiled_ops(backend, plan, layers, own_logits)
    # recurrent layers and transformers' attention need the same number of tokens in each row
    own_attention = backend.masks.repeats is not None and all(layer.mixer is None for layer in plan.layers)
    attends = own_attention or backend.stack is not None
    backend.ragged = attends and backend.cache.states is None
    return layers


def use_compiled_ops(
    backend: HFBackend, plan: DecoderPlan, layers: Sequence[tuple[nn.Module, FusedLayer]], own_logits: OwnLogits
) -> None:
    """Give these layers compiled ops if all have them and they compute the same from the same input."""
    compiled = [ops for ops in (compiled_ops(forward.plain) for _, forward in layers) if ops is not None]
    if len(compiled) < len(layers):
        return
    if all(ops.attends for ops in compiled):
        backend.cache.store_as(compiled[0].cached_dtype)
    trials = [
        Trial(layer, forward, forward.with_ops(ops)) for (layer, forward), ops in zip(layers, compiled, strict=True)
    ]
    if "compiled layers" not in own_logits.passed:
        if largest_error(backend, trials) > tolerance(backend.model):
            backend.cache.store_as(None)
            warn_slower(
                f"{type(backend.model).__name__} keeps its layers' operators: compiled ones give different results"
            )
            return
        own_logits.passed.add("compiled layers")
    for (_, forward), ops in zip(layers, compiled, strict=True):
        forward.ops = ops
    _use_stack(backend, plan, layers, own_logits)
    if all(ops.shape_independent for ops in compiled):
        own_logits.passed.add(TOKENS_INDEPENDENT)
    layers_are_independent = TOKENS_INDEPENDENT in own_logits.passed
    # with a stack, modules outside the decoder, such as an image tower, do not run
    scope = backend.model if backend.stack is None else decoder_module(backend.model, plan)
    head = backend.model.get_output_embeddings()
    backend.shape_independent = layers_are_independent and _multiplies_tokens_independently(
        scope, head, [layer for layer, _ in layers]
    )


def _use_stack(
    backend: HFBackend, plan: DecoderPlan, layers: Sequence[tuple[nn.Module, FusedLayer]], own_logits: OwnLogits
) -> None:
    """Compute all layers in one call if that gives the same logits as these layers, which have been checked."""
    model, trial = backend.model, "all layers in one call"
    try:
        if trial not in own_logits.passed:
            check_nothing_between(model, [layer for layer, _ in layers], plan)
        stack = LayerStack(model, plan, [forward for _, forward in layers])
    except UnknownLayerError as error:
        log.info("%s calls its layers one by one: %s", type(model).__name__, error)
        return

    def use_stack() -> None:
        backend.stack = stack

    if not OwnLogits(backend, own_logits.passed).keep_if_same(trial, use_stack):
        backend.stack = None
        log.info("%s calls its layers one by one: in one call they give other logits", type(model).__name__)


def _multiplies_tokens_independently(model: Any, head: Any, layers: Sequence[nn.Module]) -> bool:
    """True if all products outside the decoder layers are the kernels'.

    Any module may multiply by a matrix of its own, as the routers of mixtures do.
    """
    within = {module for layer in layers for module in layer.modules()}
    others = [
        module
        for module in model.modules()
        if module not in within
        and (
            isinstance(module, nn.Linear | PackedLinear)
            or (
                not isinstance(module, nn.Embedding | BlockEmbedding)
                and any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
            )
        )
    ]
    return not others and isinstance(head, KernelLinear | BlockLinear)
