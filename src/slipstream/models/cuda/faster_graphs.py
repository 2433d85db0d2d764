"""Makes what graphs replay faster: joint products, and Triton kernels between them, if the logits stay the model's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.graph_store import Rerun, first_line
from slipstream.models.cuda.triton_layer import TritonOps, has_kernels, unsupported
from slipstream.models.decoder.fused_layer import FusedLayer, is_fused
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf.fast_forwards import (
    OwnLogits,
    Trial,
    fuse_layers,
    group_queries,
    largest_error,
    tolerance,
)


def make_graphs_faster(backend: GraphedBackend, own: OwnLogits) -> None:
    """Give a model whose products are fused grouped attention, fused layers and then Triton kernels.

    Each stays if it gives the model's own logits; a warning says what does not.
    """
    if any(map(is_fused, backend.model.modules())):
        return  # an earlier decoder has done it
    group_queries(backend.eager, own)
    layers = fuse_layers(backend.eager, own)
    reason = _use_kernels(backend, layers) if layers else None
    if reason is not None:
        warn_slower(f"{type(backend.model).__name__} keeps PyTorch's operators: {reason}")


def _use_kernels(backend: GraphedBackend, layers: Sequence[tuple[nn.Module, FusedLayer]]) -> str | None:
    """Turn the kernels on if they give the layers' own numbers; None, or the reason why they are off."""
    if not has_kernels():
        return "Triton is not installed"
    reasons = (unsupported(forward.plain) for _, forward in layers)
    if (reason := next(filter(None, reasons), None)) is not None:
        return reason
    kernels = [TritonOps(forward.plain) for _, forward in layers]
    trials = [Trial(forward, forward.by(ops)) for (_, forward), ops in zip(layers, kernels, strict=True)]
    rerun = GraphedBackend(backend.model, Rerun(), cache=backend.cache)
    try:
        with torch.cuda.device_of(backend.eager.key_positions()):  # Triton launches on the current device
            error = largest_error(rerun, layers, trials)
    except Exception as failed:  # kernels are compiled at first use, by compilers that may raise anything
        return f"the kernels cannot be compiled or run: {first_line(failed)}"
    if error > tolerance(backend.model):
        return f"the kernels give other numbers (by {error:.2g} of what they add)"
    for (_, forward), ops in zip(layers, kernels, strict=True):
        forward.ops = ops
    return None
