"""Fuses linear layers that have the same input: query, key and value, or gate and up, in a single product.

A forward of two tokens reveals them: siblings called one after the other with the same tensor object. The model's own
code does not change; each layer returns its part of the common product.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from slipstream.errors import MODEL_ERRORS
from slipstream.models.notices import warn_slower


class FusedLinear(nn.Module):
    """Several `nn.Linear`s with one input as one product, computed when the first of them gets a new input."""

    def __init__(self, joint: Any, sizes: list[int]) -> None:
        """joint: the layer that computes all outputs; sizes: the number of outputs of each original layer."""
        super().__init__()
        self.joint, self.sizes = joint, sizes
        self._last: tuple[Tensor, tuple[Tensor, ...]] | None = None

    def output(self, x: Tensor, index: int) -> Tensor:
        """The output of layer `index` for x [..., in_features]. The product is kept until its last part is returned."""
        last = self._last  # read once: another thread may be running the same model
        if last is None or last[0] is not x:
            last = x, self.joint(x).split(self.sizes, -1)
        self._last = last if index < len(self.sizes) - 1 else None
        return last[1][index]


class FusedOutput(nn.Module):
    """Replaces one of the fused layers: returns that layer's part of the common product."""

    def __init__(self, fused: FusedLinear, index: int) -> None:
        super().__init__()
        if index == 0:
            self.fused = fused  # a submodule of the first output only
        self._source, self.index = (fused,), index

    @property
    def source(self) -> FusedLinear:
        """The fused layer that computes this output."""
        return self._source[0]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        return self._source[0].output(x, self.index)


Calls = Sequence[tuple[nn.Linear, Tensor]]  # linear layers in the order in which they ran, each with its input


def fuse(
    model: Any,
    convert: Callable[[Any], nn.Module] | None = None,
    calls: Calls | None = None,
    join: Callable[[list[nn.Linear]], nn.Module] | None = None,
) -> int:
    """Fuse layers of a model in place, which frees their weights. Returns the number of groups.

    convert: makes the module that computes a group's product. It is called group by group, so that there are never two
    copies of all weights. calls: `linear_calls` of the model. join: makes one layer of several, by default `joined`.
    """
    groups = _same_input(model, linear_calls(model) if calls is None else calls)
    for parent, names in groups:
        linears: list[nn.Linear] = [getattr(parent, name) for name in names]
        joint: nn.Module = joined(linears) if join is None else join(linears)
        if convert is not None:
            joint = convert(joint)
        fused = FusedLinear(joint, [linear.out_features for linear in linears])
        for index, name in enumerate(names):
            setattr(parent, name, FusedOutput(fused, index))
    return len(groups)


def joined(linears: list[nn.Linear]) -> nn.Linear:
    """One layer that computes the outputs of several layers with the same input."""
    outputs, biased = sum(linear.out_features for linear in linears), linears[0].bias is not None
    joint = nn.Linear(linears[0].in_features, outputs, biased, device="meta")
    joint.weight = _concatenated([linear.weight for linear in linears])
    if biased:
        joint.bias = _concatenated([linear.bias for linear in linears])
    return joint


def _concatenated(parts: list[Any]) -> nn.Parameter:
    return nn.Parameter(torch.cat([part.detach() for part in parts]), requires_grad=False)


def called_by_none(model: nn.Module, calls: Calls) -> list[nn.Linear]:
    """Linear layers that must not be replaced: they did not run as modules, so other code may use their weights.

    Layers whose names differ only in numbers count as one, since two tokens reach only a few of many experts.
    """
    names = _names(model)
    called = {names[linear] for linear, _ in calls}
    return [linear for linear, name in names.items() if name not in called]


def _names(model: nn.Module) -> dict[nn.Linear, str]:
    """The linear layers with their names, in which "#" replaces every number."""
    return {module: re.sub(r"\d+", "#", name) for name, module in model.named_modules() if type(module) is nn.Linear}


def _same_input(model: Any, calls: Calls) -> list[tuple[nn.Module, list[str]]]:
    """Groups of sibling layers that were called one after the other with the same tensor, and only once each.

    One other group may be called in between, as in latent attention. A group is the parent module and the names of its
    children.
    """
    parents = {
        child: (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if is_plain(child)
    }
    groups: list[tuple[Tensor, nn.Module, list[nn.Linear]]] = []
    for linear, x in calls:
        if linear not in parents:
            continue
        parent = parents[linear][0]
        for entering, owner, linears in groups[-2:]:
            if entering is x and owner is parent and _alike(linears[0], linear):
                linears.append(linear)
                break
        else:
            groups.append((x, parent, [linear]))
    called = [linear for linear, _ in calls]
    return [
        (parent, [parents[linear][1] for linear in linears])
        for _, parent, linears in groups
        if len(linears) > 1 and all(called.count(linear) == 1 for linear in linears)
    ]


def _alike(first: nn.Linear, second: nn.Linear) -> bool:
    return (first.bias is None) == (second.bias is None) and first.weight.dtype == second.weight.dtype


class _ObservedLinear(nn.Linear):
    """A linear layer that notes whether other code reads its weight, as adapters do."""

    is_used_by_others = False

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        parameters: Any = self._parameters
        return nn.functional.linear(x, parameters["weight"], parameters["bias"])

    def __getattr__(self, name: str) -> Any:
        if name in vars(self)["_parameters"]:
            self.is_used_by_others = True
        return super().__getattr__(name)


@torch.inference_mode()
def linear_calls(model: Any) -> list[tuple[nn.Linear, Tensor]]:
    """The calls of linear layers in a forward of two tokens: each layer and its input.

    Leaves out layers whose weights other code reads, and all whose names differ from theirs only in numbers.
    """
    seen: list[tuple[nn.Linear, Tensor]] = []
    names, device = _names(model), next(model.parameters()).device
    plain = [linear for linear in names if is_plain(linear)]  # pruning, for example, hides the weight
    hooks = [
        linear.register_forward_pre_hook(lambda linear, inputs: seen.append((linear, inputs[0]))) for linear in names
    ]
    for linear in plain:
        linear.__class__ = _ObservedLinear
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=device), use_cache=False)
    except MODEL_ERRORS as error:  # the model needs other inputs
        warn_slower(f"{type(model).__name__} keeps its linear layers separate: a forward of two tokens fails: {error}")
        return []
    finally:
        for hook in hooks:
            hook.remove()
        used = {name for linear, name in names.items() if vars(linear).pop("is_used_by_others", False)}
        for linear in plain:
            linear.__class__ = nn.Linear
    return [(linear, x) for linear, x in seen if names[linear] not in used]


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """True if this is a plain `nn.Linear`. One with hooks or a replaced `forward` computes more, so it must stay."""
    hooked = bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    return type(module) is nn.Linear and not hooked
