"""The experts of a mixture as packed linear layers of their own.

A token is multiplied by a few experts only, so a forward of few tokens takes as long as reading these. Transformers
keeps all of a layer in two tensors, which no linear layer of `packed_linear` reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

STACKED = "gate_up_proj", "down_proj"  # [experts, out, in] each


class PackedExperts(nn.Module):
    """Transformers' experts, each as two layers that `convert` has made."""

    def __init__(self, experts: Any, convert: Callable[[nn.Linear], nn.Module]) -> None:
        """experts: those that `are_packable`; their weights are freed."""
        super().__init__()
        self._gate = experts._apply_gate
        stacked = []
        for name in STACKED:
            weights = getattr(experts, name).detach()
            experts.register_parameter(name, None)  # the gate keeps the rest
            stacked.append(nn.ModuleList(convert(_linear(weight)) for weight in weights))
        self._up, self._down = stacked

    def forward(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """x: [N, H]; chosen: [N, K] the experts of each token; shares: [N, K] what they count."""
        out = torch.zeros_like(x)
        for number in sorted(set(chosen.flatten().tolist())):
            tokens, places = torch.where(chosen == number)
            outputs = self._down[number](self._gate(self._up[number](x[tokens])))
            out.index_add_(0, tokens, outputs * shares[tokens, places, None].to(x.dtype))
        return out


def are_packable(module: nn.Module) -> bool:
    """Whether a module has experts of two products each, with a gate and without biases."""
    weights = [getattr(module, name, None) for name in STACKED]
    are_stacked = all(isinstance(weight, nn.Parameter) and weight.dim() == 3 for weight in weights)
    others = ("is_transposed", "has_bias", "has_post_expert_norm", "_is_expert_parallel")
    return (
        are_stacked and getattr(module, "has_gate", False) and not any(getattr(module, name, True) for name in others)
    )


def pack_experts(model: nn.Module, convert: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the experts of a model in place by what `convert` makes of their layers."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if are_packable(child):
                setattr(parent, name, PackedExperts(child, convert))


def _linear(weight: Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear
