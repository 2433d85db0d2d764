"""Makes what graphs replay faster: joint products, and Triton kernels between them, if the logits stay the model's."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.graph_store import Rerun
from slipstream.models.cuda.triton_layer import TritonOps, has_kernels, unsupported
from slipstream.models.hf.fast_forwards import (
    OwnLogits,
    Trial,
    fuse_layers,
    group_queries,
    largest_error,
    tolerance,
)
from slipstream.models.hf.fused_layer import FusedLayer

log = logging.getLogger("slipstream")


def make_graphs_faster(backend: GraphedBackend, own: OwnLogits) -> None:
    """Give a model whose products are fused grouped attention, fused layers and then Triton kernels.

    Each stays if it gives the model's own logits; the log says what does not.
    """
    group_queries(backend.eager, own)
    layers = fuse_layers(backend.eager, own)
    if not layers:
        return
    reason = _use_triton(backend, layers)
    if reason is not None:
        log.info("%s keeps PyTorch's operators: %s", type(backend.model).__name__, reason)


def uses_triton(model: Any, num_layers: int) -> bool:
    """Whether all of a model's layers compute by the kernels."""
    forwards = [module.__dict__.get("forward") for module in model.modules()]
    fused = [forward for forward in forwards if isinstance(forward, FusedLayer)]
    return len(fused) == num_layers and all(isinstance(forward.ops, TritonOps) for forward in fused)


def _use_triton(backend: GraphedBackend, layers: list[tuple[nn.Module, FusedLayer]]) -> str | None:
    """Turn the kernels on if they give the layers' own numbers; None, or the reason why they are off."""
    if not has_kernels():
        return "Triton is not installed"
    plain = [forward.plain for _, forward in layers]
    if (reason := next(filter(None, map(unsupported, plain)), None)) is not None:
        return reason
    trials = [Trial(forward, TritonOps(forward.plain)) for _, forward in layers]
    rerun = GraphedBackend(backend.model, Rerun(), cache=backend.cache)
    try:
        error = largest_error(rerun, layers, trials)
    except Exception as failed:  # kernels are compiled at first use, by compilers that may raise anything
        return (
            f"the kernels cannot be compiled or run: {(str(failed).strip().splitlines() or [type(failed).__name__])[0]}"
        )
    if error > tolerance(backend.model):
        return f"the kernels give other numbers (by {error:.2g} of the largest)"
    for (_, forward), trial in zip(layers, trials, strict=True):
        forward.ops = trial.ops
    backend.attends_itself = True
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None
