"""The matrices of each head of latent attention, for the kernels.

A model projects each token's latent to keys and values of all heads. The kernels attend to the latents themselves: they
multiply queries by the transposed key matrices, and attention's results by the value matrices, so the cache keeps one
latent per token instead of a key and a value for each head. `forward` computes the model's own projection, the
specification.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.block_experts import Stack, numbers_part
from slipstream.models.cpu.block_linear import ACTIVATIONS, BlockPart
from slipstream.models.cpu.structs import INPUTS, MAX_HEAD_SIZE, ExpertMatrixStruct, LatentStruct
from slipstream.models.decoder.families import latent_plan
from slipstream.models.decoder.fused_linear import is_plain
from slipstream.models.decoder.plan import LatentPlan

LatentStacks = tuple[Stack, Stack]  # for each head a matrix [rank, plain], and one [values, rank]


class LatentHeads(nn.Module):
    """Replaces the layer that projects latents to keys and values."""

    def __init__(self, plan: LatentPlan, stacks: LatentStacks, activations: str) -> None:
        super().__init__()
        self.plan, self.stacks = plan, stacks
        matrices = []
        self._pointers = [(ctypes.c_void_p * len(stack.addresses))(*stack.addresses) for stack in stacks]
        for stack, pointers in zip(stacks, self._pointers, strict=True):
            scales = None if stack.scales is None else stack.scales.data_ptr()
            matrices.append(ExpertMatrixStruct(stack.block.code, ctypes.addressof(pointers), None, scales))
        planes = ACTIVATIONS[activations]
        self.struct = LatentStruct(plan.rank, plan.plain, plan.values, planes, *matrices)

    @property
    def formats(self) -> list[str]:
        """The block formats of the matrices."""
        return [stack.block.name for stack in self.stacks]

    def forward(self, latents: Tensor) -> Tensor:
        """latents: [..., rank] -> [..., heads * (plain + values)]. Unpacks the matrices at each call."""
        outputs = self.plan.rank, self.plan.values
        weight = self.plan.joined(*map(self._unpacked, self.stacks, outputs))
        return nn.functional.linear(latents.float(), weight).to(latents.dtype)

    def _unpacked(self, stack: Stack, outputs: int) -> Tensor:
        """[heads * outputs, inputs] float32."""
        (part,) = stack.parts
        rows = part.rows(torch.arange(part.outputs)).view(self.plan.count, -1, part.inputs)[:, -outputs:]
        if stack.scales is not None and part.scale is None:
            rows = rows * stack.scales.view(-1, 1, 1)
        return rows.flatten(0, 1)


def stacks_of_part(part: BlockPart, plan: LatentPlan) -> LatentStacks:
    """The matrices of a layer's heads: for values the part's own rows, for queries its transposed weights, unpacked."""
    keys = numbers_part(plan.parts(part.rows(torch.arange(part.outputs)))[0], part.library)
    values = Stack.rows_of(part, plan.count, plan.plain, plan.values)
    return Stack.rows_of(keys, plan.count, 0, plan.rank), values


def stacks_of_weight(weight: Tensor, plan: LatentPlan, pack: Callable[[Tensor], BlockPart]) -> LatentStacks:
    """The matrices of the heads of a layer with this weight. pack: packs a matrix into panels."""
    keys, values = (pack(part.contiguous()) for part in plan.parts(weight))
    return Stack.rows_of(keys, plan.count, 0, plan.rank), Stack.rows_of(values, plan.count, 0, plan.values)


def replace_latent(model: Any, stacks: Callable[[str, nn.Linear, LatentPlan], LatentStacks], activations: str) -> None:
    """Replace a model's layers that project latents to keys and values, where the kernels can attend to latents.

    stacks: gives the matrices of the heads of the layer with this name.
    """
    config = model.config.get_text_config()
    for name, layer in list(model.named_modules()):
        if (plan := latent_of(config, name)) is not None and is_plain(layer):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, LatentHeads(plan, stacks(name, layer, plan), activations))


def latent_of(config: Any, name: str) -> LatentPlan | None:
    """The plan of the latents that the layer with this name projects, if the kernels can attend to them."""
    plan = latent_plan(config)
    if plan is None or not name.endswith(f".{plan.heads}"):
        return None
    rotated = config.qk_rope_head_dim
    are_whole = not any(size % INPUTS or not size for size in (plan.rank, plan.plain, plan.values, rotated))
    return plan if are_whole and plan.rank + rotated <= MAX_HEAD_SIZE else None


def latent_heads(model: nn.Module) -> list[LatentHeads]:
    """The layers that `replace_latent` has put into a model."""
    return [module for module in model.modules() if isinstance(module, LatentHeads)]
