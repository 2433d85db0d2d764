"""Weights of a GGUF file on a GPU, in the file's blocks: nothing is unpacked in memory.

Triton kernels unpack them while they multiply, rounded to the type of the activations, so results are those of the
unpacked weights in this type. The modules' own forwards are the specification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from slipstream.models.cpu.block_linear import ScaledEmbedding
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.decoder.planned_model import PlannedModel
from slipstream.models.weights.gguf_tensors import GGUFTensors

KINDS = ("Q8_0", "Q4_0", "Q4_K", "Q5_K", "Q6_K")
GROUP, BLOCK = 16, 256  # rows, and numbers of each, that one program unpacks
FIRST_ROWS = 64


@dataclass(frozen=True)
class Weight:
    """A matrix of numbers [outputs, inputs], or of a file's blocks."""

    data: Tensor  # the numbers, or [outputs, bytes] uint8
    inputs: int
    kind: str = ""  # a key of `KINDS`; empty for numbers

    @property
    def halves(self) -> Tensor:
        """The same memory as float16, which blocks have as scales."""
        return self.data.view(torch.float16) if self.kind else self.data

    def rows(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """[N, inputs]: some rows [N], unpacked."""
        if not self.kind:
            return self.data[rows].to(dtype)
        out = torch.empty(len(rows), self.inputs, dtype=dtype, device=self.data.device)
        if len(rows):
            with torch.cuda.device_of(rows):
                kernels().unpack[(-(-len(rows) // GROUP), -(-self.inputs // BLOCK))](
                    self.data,
                    self.halves,
                    rows,
                    out,
                    len(rows),
                    self.inputs,
                    self.data.shape[1],
                    kind=self.kind,
                    group=GROUP,
                    block=BLOCK,
                )
        return out


class StoredLinear(nn.Module):
    """A linear layer over one or more matrices of a file; it concatenates their outputs."""

    def __init__(self, weights: Sequence[Weight], bias: Tensor | None) -> None:
        super().__init__()
        groups = [list(group) for _, group in groupby(weights, lambda weight: weight.kind)]
        self.weights = [group[0] if len(group) == 1 else _joint(group) for group in groups]
        self.in_features, self.out_features = weights[0].inputs, sum(len(weight.data) for weight in weights)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] -> [..., out_features]."""
        parts = [weight.rows(torch.arange(len(weight.data), device=x.device), x.dtype) for weight in self.weights]
        return linear(x, torch.cat(parts), None if self.bias is None else self.bias.to(x.dtype))


def _joint(weights: Sequence[Weight]) -> Weight:
    return Weight(torch.cat([weight.data for weight in weights]), weights[0].inputs, weights[0].kind)


def stored_weights(model: nn.Module) -> list[Weight]:
    """The matrices of a model's linear layers that are stored in a file's blocks."""
    return [weight for module in model.modules() if isinstance(module, StoredLinear) for weight in module.weights]


class StoredEmbedding(nn.Module):
    """An embedding that unpacks rows when they are looked up. weight: its first rows only, which distinguish models."""

    def __init__(self, weight: Weight, dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = len(weight.data), weight.inputs
        self._weight, self._dtype, self._scale = weight, dtype, scale
        first_rows = weight.rows(torch.arange(min(FIRST_ROWS, len(weight.data)), device=weight.data.device), dtype)
        self.weight = nn.Parameter(first_rows, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...] -> [..., embedding_dim]."""
        rows = self._weight.rows(ids.flatten(), self._dtype).view(*ids.shape, self.embedding_dim)
        return rows if self._scale == 1 else rows * self._scale


def fill_on_gpu(model: PlannedModel, tensors: GGUFTensors, device: torch.device, dtype: torch.dtype) -> None:
    """Give an empty model its tensors, matrices in their blocks. It then computes on this device in this type.

    Raises `NotInBlocksError` where a matrix must be unpacked.
    """
    names = {module: name for name, module in model.named_modules()}
    tokens, output = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = model.config.tie_word_embeddings
    (table,) = _placed(tensors, names[tokens], tokens, device)

    def weights_of(module: Any) -> list[Weight]:
        return [table] if is_tied and module is output else _placed(tensors, names[module], module, device)

    def stored_linear(linears: Sequence[nn.Linear]) -> StoredLinear:
        biased = [layer for layer in linears if layer.bias is not None]
        biases = [tensors.values(f"{names[layer]}.bias", (layer.out_features,)) for layer in biased]
        weights = [weight for layer in linears for weight in weights_of(layer)]
        return StoredLinear(weights, torch.cat(biases).to(device) if biases else None)

    for module, name in names.items():
        if not isinstance(module, nn.Linear | nn.Embedding):
            for key, parameter in list(module.named_parameters(recurse=False)):
                values = tensors.values(f"{name}.{key}", tuple(parameter.shape)).to(device)
                setattr(module, key, nn.Parameter(values, requires_grad=False))
    fuse(model, calls=model.linear_calls(), join=stored_linear)
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear:
            model.set_submodule(name, stored_linear([module]))
    scale = tokens.scale if isinstance(tokens, ScaledEmbedding) else 1.0
    model.set_submodule(names[tokens], StoredEmbedding(table, dtype, scale))
    model.compute_on(device, dtype)


def _placed(tensors: GGUFTensors, name: str, module: Any, device: torch.device) -> list[Weight]:
    """The matrices of a linear layer or embedding of this name."""
    weights = []
    for stored in tensors.stored(f"{name}.weight", tuple(module.weight.shape)):
        kind = stored.block.name
        if kind not in KINDS:
            raise NotInBlocksError(f"tensor {stored.name!r} is of type {kind}; on a GPU: {', '.join(KINDS)}")
        weights.append(Weight(torch.from_numpy(stored.rows).to(device), stored.inputs, kind))
    return weights


def kernels() -> Any:
    """The module of kernels, which imports Triton. Layers do not store it, since models may be copied."""
    from slipstream.models.cuda import triton_kernels

    return triton_kernels
