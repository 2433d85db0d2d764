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
from slipstream.models.cpu.block_linear import BlockLinear, block_linears
from slipstream.models.cpu.compiled_layers import (
    BlockLayerOps,
    CompiledOps,
    LayerStack,
    block_layer_ops,
    check_nothing_between,
    compiled_ops,
    is_of_blocks,
)
from slipstream.models.cpu.packed_linear import CompressedLinear, PackedLinear
from slipstream.models.cpu.quantised_linear import QuantisedLinear
from slipstream.models.decoder.attention import GROUPED, UngroupableError, repeats_of
from slipstream.models.decoder.fused_layer import FusedLayer, LayerOps, UnknownLayerError, fused_layers
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.declared_numbers import AROUND_LAYERS, OF_LAYERS, thresholds, unimplemented
from slipstream.models.hf.passed_trials import PassedTrials

log = logging.getLogger("slipstream")

START = 6  # tokens of the first of two forwards that a model is tried with
TOKENS = 9  # of both
CLOSE = 1e-3  # difference of a faster forward's numbers, relative to how they vary; both as RMS
ROUNDINGS = 2.5  # the same in half precision, in units of its last place: 0.02 for bfloat16
ROUNDED = {"int8": 0.1, "int15": 0.01}  # the same where activations are rounded: one may be rounded the other way
TOKENS_INDEPENDENT = "whole layers, each token as if it were alone"


class Trial:
    """Runs in place of a layer's forward: returns what `expected` computes, and notes how far `tried` is from it."""

    def __init__(self, expected: Callable[..., Any], tried: Callable[..., Tensor]) -> None:
        self._expected, self._found = expected, tried
        self.error = 0.0  # see `difference`

    def __call__(self, hidden: Tensor, *inputs: Any, **options: Any) -> Any:
        computed = self._found(hidden, *inputs, **options)
        expected = self._expected(hidden, *inputs, **options)
        error = difference(computed, expected, hidden) if isinstance(expected, Tensor) else math.inf
        self.error = max(self.error, error)
        return expected


def difference(computed: Tensor, expected: Tensor, start: Tensor | None = None) -> float:
    """How far numbers [..., N] are from the expected ones, relative to how much these vary, both as RMS.

    start: what the expected numbers were before a layer added to them. They vary as much as was added, or as the sum
    where that is so large that its rounding is what differs. Infinite where anything is NaN or infinite.
    """
    computed, expected = computed.float(), expected.float()
    if start is None:
        varies = _rms(expected - expected.mean(-1, keepdim=True))
    else:
        varies = max(_rms(expected - start.float()), _rms(expected) / ROUNDINGS)
    error = _rms(computed - expected)
    if not math.isfinite(error) or not math.isfinite(varies):
        return math.inf
    return error / varies if varies else math.inf if error else 0.0


def _rms(numbers: Tensor) -> float:
    return float(numbers.square().mean().sqrt())


class OwnLogits:
    """The logits of a few tokens by the model's own forward, which every faster forward has to reproduce.

    They are computed before the first change that is tried. passed: changes that passed in an earlier process.
    """

    def __init__(self, backend: HFBackend, passed: PassedTrials | None = None) -> None:
        self._backend, self.passed = backend, passed or PassedTrials()

    @cached_property
    def logits(self) -> Tensor:
        return a_few_logits(self._backend)

    @cached_property
    def later(self) -> Tensor:
        return later_logits(self._backend)

    def keep_if_same(self, name: str, change: Callable[[], None]) -> bool:
        """Apply a change of the forward and return whether the logits are still the model's own; the caller undoes it.

        name: of the trial, in `passed`.
        """
        if name in self.passed:
            change()
            return True
        pairs = [(a_few_logits, self.logits), (later_logits, self.later)]
        change()
        if max(difference(compute(self._backend), expected) for compute, expected in pairs) > tolerance(
            self._backend.model
        ):
            return False
        self.passed.add(name)
        return True


def make_faster(backend: HFBackend, own_logits: OwnLogits) -> None:
    """Give a model on the CPU grouped attention and then fused layers, each if it gives the model's own logits."""
    group_queries(backend, own_logits)
    if backend.cache.states is None:  # there is no fused form of recurrent layers
        fuse_layers(backend, own_logits)


def group_queries(backend: HFBackend, own_logits: OwnLogits | None = None) -> None:
    """Use grouped attention if it gives this model's own logits."""
    config = backend.model.config.get_text_config()
    if config._attn_implementation == GROUPED:
        return
    repeats = repeats_of(config)
    if config._attn_implementation != "sdpa":
        reason: str | None = f"its attention is {config._attn_implementation!r}"
    elif repeats is None:
        reason = "its heads are not laid out in groups"
    else:
        reason = _try_grouped(backend, repeats, own_logits or OwnLogits(backend))
    if reason is not None:
        warn_slower(f"{type(backend.model).__name__} keeps its own attention: {reason}")


def _try_grouped(backend: HFBackend, repeats: int, own_logits: OwnLogits) -> str | None:
    """Turn grouped attention on; None if the logits stay the same, else it is off again and this is the reason."""
    config, reason = backend.model.config, "the grouped one gives other logits"

    def turn_on() -> None:
        config._attn_implementation, backend.masks.repeats = GROUPED, repeats

    try:
        if own_logits.keep_if_same("grouped attention", turn_on):
            return None
    except (UngroupableError, RuntimeError) as error:  # some models' own code reshapes or adds to the mask
        reason = str(error)
    config._attn_implementation, backend.masks.repeats = "sdpa", None
    return reason


def fuse_layers(backend: HFBackend, own_logits: OwnLogits | None = None) -> list[tuple[nn.Module, FusedLayer]]:
    """Give decoder layers a forward of fewer operators if it gives this model's own logits; returns those layers."""
    if backend.masks.repeats is None:
        return []  # said by `group_queries`
    name, own_logits = type(backend.model).__name__, own_logits or OwnLogits(backend)
    try:
        layers = fused_layers(backend.model, backend.masks.windows)
    except UnknownLayerError as error:
        warn_slower(f"{name} keeps its layers' own forward: {error}")
        return []
    if number := unimplemented(backend.model.config.get_text_config(), OF_LAYERS | AROUND_LAYERS):
        warn_slower(f"{name} keeps its layers' own forward: its configuration has {number}")
        return []
    if "fused layers" not in own_logits.passed:
        trials = [Trial(layer.forward, forward) for layer, forward in layers]
        if largest_error(backend, layers, trials) > tolerance(backend.model):
            warn_slower(f"{name} keeps its layers' own forward: the fused one gives other numbers")
            return []
        own_logits.passed.add("fused layers")
    for layer, forward in layers:
        layer.forward = forward
    if backend.device.type == "cpu":  # elsewhere forwards are captured as rectangles
        _compile(backend, layers, own_logits)
        backend.ragged = True
    return layers


def _compile(backend: HFBackend, layers: Sequence[tuple[nn.Module, FusedLayer]], own_logits: OwnLogits) -> None:
    """Give these layers compiled ops if all have them and they compute the same from the same input."""
    compiled = [ops for ops in (_compiled(forward.plain) for _, forward in layers) if ops is not None]
    if len(compiled) < len(layers):
        return
    trials = [Trial(forward, forward.with_ops(ops)) for (_, forward), ops in zip(layers, compiled, strict=True)]
    if "compiled layers" not in own_logits.passed:
        if largest_error(backend, layers, trials) > tolerance(backend.model):
            warn_slower(f"{type(backend.model).__name__} keeps its layers' operators: compiled ones give other numbers")
            return
        own_logits.passed.add("compiled layers")
    for (_, forward), ops in zip(layers, compiled, strict=True):
        forward.ops = ops
    _stack(backend, layers, own_logits)
    if all(ops.shape_independent for ops in compiled):
        own_logits.passed.add(TOKENS_INDEPENDENT)
    backend.shape_independent = TOKENS_INDEPENDENT in own_logits.passed and _multiplies_tokens_independently(
        backend.model
    )


def largest_error(backend: Backend, layers: Sequence[tuple[nn.Module, FusedLayer]], trials: Sequence[Trial]) -> float:
    """The largest difference of any layer's outputs in a few forwards of the backend."""
    replaced = [layer.__dict__.get("forward") for layer, _ in layers]
    for (layer, _), trial in zip(layers, trials, strict=True):
        layer.forward = trial
    try:
        a_few_logits(backend)
        if isinstance(backend, HFBackend):
            later_logits(backend)
    finally:
        for (layer, _), forward in zip(layers, replaced, strict=True):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward
    return max(trial.error for trial in trials)


def _stack(backend: HFBackend, layers: Sequence[tuple[nn.Module, FusedLayer]], own_logits: OwnLogits) -> None:
    """Compute all layers in one call if that gives the logits of these layers, which were compared themselves."""
    model, trial = backend.model, "all layers in one call"
    try:
        if number := unimplemented(model.config.get_text_config(), OF_LAYERS):
            raise UnknownLayerError(f"its configuration has {number}")
        if trial not in own_logits.passed:
            check_nothing_between(model, [layer for layer, _ in layers])
        stack = LayerStack(model, [forward for _, forward in layers])
    except UnknownLayerError as error:
        log.info("%s calls its layers one by one: %s", type(model).__name__, error)
        return

    def put_in() -> None:
        backend.stack = stack

    if not OwnLogits(backend, own_logits.passed).keep_if_same(trial, put_in):
        backend.stack = None
        log.info("%s calls its layers one by one: in one call they give other logits", type(model).__name__)


def _compiled(ops: LayerOps) -> CompiledOps | BlockLayerOps | None:
    return block_layer_ops(ops) if is_of_blocks(ops) else compiled_ops(ops)


def _multiplies_tokens_independently(model: Any) -> bool:
    """Whether nothing outside the decoder layers multiplies by other weights than compressed ones or blocks."""
    others = [module for module in model.modules() if isinstance(module, nn.Linear | PackedLinear | QuantisedLinear)]
    return not others and isinstance(model.get_output_embeddings(), CompressedLinear | BlockLinear)


def tolerance(model: Any) -> float:
    """The largest `difference` of a faster forward's numbers that is rounding."""
    linears, dtype = block_linears(model), model.dtype
    if linears:
        return ROUNDED[linears[0].activations]
    return max(CLOSE, ROUNDINGS * torch.finfo(dtype).eps)


def a_few_tokens(vocab_size: int, device: torch.device) -> Tensor:
    """[1, TOKENS] token ids to try a model with: any, since special ones may be read as nothing else is."""
    return torch.randint(0, vocab_size, (1, TOKENS), generator=torch.Generator().manual_seed(11)).to(device)


def a_few_logits(backend: Backend) -> Tensor:
    """Logits of a few tokens, float32: some at the start, and some that attend to them."""
    backend.reserve(1, 2 * backend.attended_unit)
    tokens = a_few_tokens(backend.vocab_size, backend.device)
    first = backend.forward(tokens[:, :START], [0], first_slot=0, logits=True)
    return torch.cat([first, backend.forward(tokens[:, START:], [START], first_slot=0, logits=True)], 1).float()


def later_logits(backend: HFBackend) -> Tensor:
    """Logits [T, TOKENS, V] of the same tokens at the positions from each of `later_starts` on, float32.

    Each row attends to itself alone: its model is told other positions than those at which its tokens are cached.
    """
    starts = later_starts(backend.model)
    backend.reserve(len(starts), 2 * backend.attended_unit)
    tokens = a_few_tokens(backend.vocab_size, backend.device).expand(len(starts), -1)
    backend.position_offsets = torch.tensor(starts, device=backend.device)[:, None]
    short = backend.longest_short
    for slot, start in enumerate(starts):
        backend.read_as(slot, is_long=short is not None and start + TOKENS > short)
    try:
        return backend.forward(tokens, [0] * len(starts), first_slot=0, logits=True).float()
    finally:
        backend.position_offsets = None
        for slot in range(len(starts)):
            backend.read_as(slot, is_long=False)


def later_starts(model: Any) -> list[int]:
    """Start positions for texts of TOKENS tokens: 0, and one text across each position at which models change."""
    config = model.config.get_text_config()
    end = getattr(config, "max_position_embeddings", None) or 0
    starts = {min(position - START, end - TOKENS) for position in thresholds(config, end)}
    return [0, *sorted(start for start in starts if start > 0)]
