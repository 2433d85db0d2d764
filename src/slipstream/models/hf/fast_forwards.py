"""Makes a backend's forwards faster; each change stays only if the model still gives its own logits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.core.interfaces import Backend
from slipstream.models.cpu.block_layer import BlockLayerOps, block_layer_ops, is_of_blocks
from slipstream.models.cpu.block_linear import BlockLinear, block_linears
from slipstream.models.cpu.compiled_layer import CompiledOps, compiled_ops
from slipstream.models.cpu.compressed_linear import CompressedLinear
from slipstream.models.cpu.layer_stack import LayerStack
from slipstream.models.cpu.packed_linear import PackedLinear
from slipstream.models.cpu.quantised_linear import QuantisedLinear
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf import grouped_attention as grouped
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fused_layer import FusedLayer, LayerOps, UnknownLayerError, fused_layers
from slipstream.models.hf.passed_trials import PassedTrials

log = logging.getLogger("slipstream")

START = 6  # tokens of the first of two forwards that a model is tried with
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}  # of a faster forward's logits, relative to the largest
ALONE = "whole layers, each token as if it were alone"
ROUNDED = {"int8": 0.1, "int15": 0.01}  # the same where activations are rounded: one may be rounded the other way


class Trial:
    """A layer's forward that also computes what other ops would give, and notes the largest difference."""

    def __init__(self, forward: FusedLayer, ops: Any) -> None:
        """ops: see `fused_layer.Ops`."""
        self._forward, self.ops = forward, ops
        self.error = 0.0  # relative to the largest of the layer's outputs

    def __call__(self, *inputs: Any, **options: Any) -> Tensor:
        """The layer's own output."""
        own = self._forward.ops
        self._forward.ops = self.ops
        found = self._forward(*inputs, **options)
        self._forward.ops = own
        expected = self._forward(*inputs, **options)
        error = float((found.float() - expected.float()).abs().max() / expected.float().abs().max())
        self.error = max(self.error, error if math.isfinite(error) else math.inf)
        return expected


class OwnLogits:
    """The logits of a few tokens that a model gives by itself, which every faster forward has to give too.

    They are computed before the first change that is tried. passed: which changes need not be tried.
    """

    def __init__(self, backend: HFBackend, passed: PassedTrials | None = None) -> None:
        self._backend, self.passed = backend, passed or PassedTrials()

    @cached_property
    def logits(self) -> Tensor:
        """`a_few_logits`."""
        return a_few_logits(self._backend)

    def stay(self, name: str, change: Callable[[], None]) -> bool:
        """Make a change of the forward and return whether the logits stay what they were. name: of the trial."""
        if name in self.passed:
            change()
            return True
        expected = self.logits
        change()
        error = (a_few_logits(self._backend) - expected).abs().max()
        if not bool(error <= tolerance(self._backend.model) * expected.abs().max()):  # NaN differs from everything
            return False
        self.passed.add(name)
        return True


def make_faster(backend: HFBackend, own: OwnLogits) -> None:
    """Give a model on the CPU grouped attention and then fused layers, each if it gives the model's own logits."""
    group_queries(backend, own)
    if backend.cache.states is None:  # there is no fused form of recurrent layers
        fuse_layers(backend, own)


def group_queries(backend: HFBackend, own: OwnLogits | None = None) -> None:
    """Use grouped attention if it gives this model's own logits."""
    config = backend.model.config.get_text_config()
    if config._attn_implementation == grouped.NAME:
        return
    repeats = grouped.repeats_of(config)
    if config._attn_implementation != "sdpa":
        reason: str | None = f"its attention is {config._attn_implementation!r}"
    elif repeats is None:
        reason = "its heads are not laid out in groups"
    else:
        reason = _try_grouped(backend, repeats, own or OwnLogits(backend))
    if reason is not None:
        warn_slower(f"{type(backend.model).__name__} keeps its own attention: {reason}")


def _try_grouped(backend: HFBackend, repeats: int, own: OwnLogits) -> str | None:
    """Turn grouped attention on; None if the logits stay the same, else it is off again and this is the reason."""
    config, reason = backend.model.config, "the grouped one gives other logits"

    def turn_on() -> None:
        config._attn_implementation, backend.masks.repeats = grouped.NAME, repeats

    try:
        if own.stay("grouped attention", turn_on):
            return None
    except (grouped.UngroupableError, RuntimeError) as error:  # some models' own code reshapes or adds to the mask
        reason = str(error)
    config._attn_implementation, backend.masks.repeats = "sdpa", None
    return reason


def fuse_layers(backend: HFBackend, own: OwnLogits | None = None) -> list[tuple[nn.Module, FusedLayer]]:
    """Give decoder layers a forward of fewer operators if it gives this model's own logits; those that have one now."""
    if backend.masks.repeats is None:
        return []  # said by `group_queries`
    name, own = type(backend.model).__name__, own or OwnLogits(backend)
    try:
        layers = fused_layers(backend.model, backend.masks.windows)
    except UnknownLayerError as error:
        warn_slower(f"{name} keeps its layers' own forward: {error}")
        return []

    def replace_forwards() -> None:
        for layer, forward in layers:
            layer.forward = forward

    if not own.stay("fused layers", replace_forwards):
        for layer, _ in layers:
            del layer.forward
        warn_slower(f"{name} keeps its layers' own forward: the fused one gives other logits")
        return []
    if backend.device.type == "cpu":  # elsewhere forwards are captured as rectangles
        _compile(backend, layers, own)
        backend.ragged = True
    return layers


def _compile(backend: HFBackend, layers: Sequence[tuple[nn.Module, FusedLayer]], own: OwnLogits) -> None:
    """Give these layers compiled ops if all have them and they compute the same from the same input."""
    compiled = [_compiled(forward.plain) for _, forward in layers]
    trials = [Trial(forward, ops) for (_, forward), ops in zip(layers, compiled, strict=True) if ops is not None]
    if len(trials) < len(layers):
        return
    if "compiled layers" not in own.passed:
        if largest_error(backend, layers, trials) > tolerance(backend.model):
            warn_slower(f"{type(backend.model).__name__} keeps its layers' operators: compiled ones give other numbers")
            return
        own.passed.add("compiled layers")
    for (_, forward), trial in zip(layers, trials, strict=True):
        forward.ops = trial.ops
    _stack(backend, layers, own)
    if all(trial.ops.shape_independent for trial in trials):
        own.passed.add(ALONE)
    backend.shape_independent = ALONE in own.passed and _multiplies_as_if_alone(backend.model)


def largest_error(backend: Backend, layers: Sequence[tuple[nn.Module, FusedLayer]], trials: Sequence[Trial]) -> float:
    """The largest relative difference of any layer's outputs in a few forwards of the backend."""
    for (layer, _), trial in zip(layers, trials, strict=True):
        layer.forward = trial
    try:
        a_few_logits(backend)
    finally:
        for layer, forward in layers:
            layer.forward = forward
    return max(trial.error for trial in trials)


def _stack(backend: HFBackend, layers: Sequence[tuple[nn.Module, FusedLayer]], own: OwnLogits) -> None:
    """Compute all layers in one call if that gives the logits of these layers, which were compared themselves."""
    model = backend.model
    try:
        stack = LayerStack(model, [forward for _, forward in layers])
    except UnknownLayerError as error:
        log.info("%s calls its layers one by one: %s", type(model).__name__, error)
        return

    def put_in() -> None:
        backend.stack = stack

    if not OwnLogits(backend, own.passed).stay("all layers in one call", put_in):
        backend.stack = None
        log.info("%s calls its layers one by one: it computes more around them", type(model).__name__)


def _compiled(ops: LayerOps) -> CompiledOps | BlockLayerOps | None:
    return block_layer_ops(ops) if is_of_blocks(ops) else compiled_ops(ops)


def _multiplies_as_if_alone(model: Any) -> bool:
    """Whether nothing outside the decoder layers multiplies by other weights than compressed ones or blocks."""
    others = [module for module in model.modules() if isinstance(module, nn.Linear | PackedLinear | QuantisedLinear)]
    return not others and isinstance(model.get_output_embeddings(), CompressedLinear | BlockLinear)


def tolerance(model: Any) -> float:
    """The largest difference of a faster forward's logits, relative to the largest of them."""
    linears = block_linears(model)
    return ROUNDED[linears[0].activations] if linears else TOLERANCE[model.dtype]


def a_few_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """[1, 9] token ids to try a model with: any, since special ones may be read as nothing else is."""
    return torch.randint(0, vocab_size, (1, 9), generator=torch.Generator().manual_seed(11)).to(device)


def a_few_logits(backend: Backend) -> Tensor:
    """Logits of a few tokens, float32: some at the start, and some that attend to them."""
    backend.reserve(1, 2 * backend.attended_unit)
    tokens = a_few_tokens(backend.vocab_size, backend.device)
    first = backend.forward(tokens[:, :START], [0], first_slot=0, logits=True)
    return torch.cat([first, backend.forward(tokens[:, START:], [START], first_slot=0, logits=True)], 1).float()
