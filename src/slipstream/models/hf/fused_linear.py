"""Linear layers that are fed the same input become one: query, key and value, or gate and up, in a single product.

Which layers these are is seen in a forward of two tokens: siblings called one after the other with the very same
tensor. The model's own code stays as it is; each layer hands out its part of the common product.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("slipstream")


class Fused(nn.Module):
    """Several `nn.Linear`s of one input as one, computed when the first of them is called with a new input."""

    def __init__(self, linears: list[nn.Linear]) -> None:
        super().__init__()
        self.sizes = [linear.out_features for linear in linears]
        self.whole: Any = nn.Linear(linears[0].in_features, sum(self.sizes), linears[0].bias is not None, device="meta")
        self.whole.weight = _joined([linear.weight for linear in linears])
        if linears[0].bias is not None:
            self.whole.bias = _joined([linear.bias for linear in linears])
        self._kept: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def part(self, x: Tensor, index: int) -> Tensor:
        """Output number `index` for x [..., in_features]. The product is kept until its last part was handed out."""
        kept = self._kept  # read once: another thread may be running the same model
        if kept is None or kept[0] is not x:
            kept = x, self.whole(x).split(self.sizes, -1)
        self._kept = kept if index < len(self.sizes) - 1 else None
        return kept[1][index]


class Part(nn.Module):
    """What stands where one of the fused layers was."""

    def __init__(self, fused: Fused, index: int) -> None:
        super().__init__()
        if index == 0:
            self.fused = fused  # the first one holds it as a submodule
        self._source, self._index = (fused,), index

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return self._source[0].part(x, self._index)


def fuse(model: Any, keep: Callable[[nn.Linear], nn.Module] | None = None) -> int:
    """Fuse layers of a model in place; their weights are freed. Returns how many groups there were.

    keep: makes the module that computes a group's product, at once, so that no two copies of all weights are held.
    """
    groups = _same_input(model)
    for parent, names in groups:
        fused = Fused([getattr(parent, name) for name in names])
        if keep is not None:
            fused.whole = keep(fused.whole)
        for index, name in enumerate(names):
            setattr(parent, name, Part(fused, index))
    return len(groups)


def _joined(parts: list[Any]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)


def _same_input(model: Any) -> list[tuple[nn.Module, list[str]]]:
    """Names of sibling layers that were called in a row with one tensor, and once each."""
    homes = {
        child: (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear
    }
    calls = _calls(model, list(homes))
    groups: list[tuple[Tensor, nn.Module, list[nn.Linear]]] = []
    for linear, x in calls:
        parent = homes[linear][0]
        if groups and groups[-1][0] is x and groups[-1][1] is parent and _alike(groups[-1][2][0], linear):
            groups[-1][2].append(linear)
        else:
            groups.append((x, parent, [linear]))
    often = [linear for linear, _ in calls]
    return [
        (parent, [homes[linear][1] for linear in linears])
        for _, parent, linears in groups
        if len(linears) > 1 and all(often.count(linear) == 1 for linear in linears)
    ]


def _alike(one: nn.Linear, other: nn.Linear) -> bool:
    return (one.bias is None) == (other.bias is None) and one.weight.dtype == other.weight.dtype


@torch.inference_mode()
def _calls(model: Any, linears: list[nn.Linear]) -> list[tuple[nn.Linear, Tensor]]:
    """Every call of a linear layer and its input, in a forward of two tokens."""
    seen: list[tuple[nn.Linear, Tensor]] = []
    hooks = [
        linear.register_forward_pre_hook(lambda module, inputs: seen.append((module, inputs[0]))) for linear in linears
    ]
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        log.info("%s: layers stay apart: %s", type(model).__name__, error)
        return []
    finally:
        for hook in hooks:
            hook.remove()
    return seen
