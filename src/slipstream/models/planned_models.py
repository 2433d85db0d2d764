"""Prepares models that are computed by their plan, without importing transformers."""

from __future__ import annotations

from typing import Any

from slipstream.models.cpu.block_experts import experts_of
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cpu.kernel_libraries import block_version
from slipstream.models.cpu.quantized_linear import arithmetic_of
from slipstream.models.cpu.thread_placement import separate_threads
from slipstream.models.decoder.planned_model import PlannedModel
from slipstream.models.draft_vocabulary import Restriction
from slipstream.models.generation_settings import end_ids
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import use_compiled_ops
from slipstream.models.hf.trials import OwnLogits, a_few_logits, check_logits, passed_trials
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.notices import warn_slower
from slipstream.models.quantized_models import QuantizedModel
from slipstream.tokenization.hf_tokenizer import HFTokenizer


def load_planned(source: str, options: LoadOptions, tokenizer: Any, quantized: QuantizedModel) -> Loaded | None:
    """Prepare a planned model; None if it must be unpacked. quantized: the model, with the weights of `source`."""
    model: PlannedModel = quantized.model
    if model.device.type == "cuda":
        return _load_on_gpu(source, options, tokenizer, quantized)
    separate_threads()
    wrapped = quantized.tokenizer if tokenizer is None else HFTokenizer(tokenizer)
    restriction = Restriction(model, options.vocabulary, None)
    backend = backend_of(source, quantized.folder, model, options, "in blocks")
    fingerprint = _fingerprint(backend, model)
    head = restriction.apply(by_position=True)
    ends = end_ids(model, backend.vocab_size)
    arithmetic = arithmetic_of(model)
    return Loaded(backend, source, ends, wrapped, model, True, fingerprint, head, arithmetic, source)


def backend_of(source: str, folder: str, model: PlannedModel, options: LoadOptions, layer_kind: str) -> HFBackend:
    """The backend that runs a planned model on the CPU; see `passed_trials`."""
    backend = HFBackend(model, model.new_cache())
    passed = passed_trials(source, folder, model, options, layer_kind)
    use_compiled_ops(backend, model.plan, model.fused_layers(), OwnLogits(backend, passed))
    # modules that mix tokens need the same number of them in each row
    attends = backend.stack is not None or all(layer.mixer is None for layer in model.plan.layers)
    backend.ragged = attends and backend.cache.states is None
    if backend.stack is None:
        check_logits(a_few_logits(backend))  # of PyTorch's operators, which no trial has checked
    return backend


def _load_on_gpu(source: str, options: LoadOptions, tokenizer: Any, quantized: QuantizedModel) -> Loaded | None:
    """`load_planned` on a GPU, where kernels compute with the blocks."""
    from slipstream.models.cuda.graph_backend import GraphedBackend, use_kernels

    model = quantized.model
    wrapped = quantized.tokenizer if tokenizer is None else HFTokenizer(tokenizer)
    restriction = Restriction(model, options.vocabulary, None)
    backend = GraphedBackend(model)
    own_logits = OwnLogits(backend.eager, passed_trials(source, quantized.folder, model, options, "stored"))
    if (reason := use_kernels(backend, own_logits, model.plan)) is not None:
        warn_slower(f"{source} is unpacked to bfloat16: {reason}")
        return None
    restriction.apply(by_position=False)
    fingerprint = f"{model.config.model_type} stored in blocks {model.dtype} graphed by kernels"
    ends = end_ids(model, backend.vocab_size)
    return Loaded(backend, source, ends, wrapped, model, True, fingerprint, source=source)


def _fingerprint(backend: HFBackend, model: PlannedModel) -> str:
    """Everything that the cost and the bits of a forward depend on."""
    how = "one by one" if backend.stack is None else "in one call"
    products = sorted({f"{linear.in_features} to {linear.out_features}" for linear in block_linears(model)})
    config = model.config
    sizes = f"{config.num_hidden_layers} layers {how} {config.num_attention_heads} heads of {config.head_dim}"
    kernels = f"{block_version()} {arithmetic_of(model)}"
    products += sorted(
        {f"{block.extra_repr()} {block.plan.inner}+{block.plan.shared_inner}" for block in experts_of(model)}
    )
    if (states := backend.cache.states) is not None:
        products += [f"compiled states {states.compiled}", *sorted({f"{tuple(p.shape)}" for p in model.parameters()})]
    return f"{config.model_type} {sizes} {backend.vocab_size} tokens {kernels} {' '.join(products)}"
