"""Linear layers and embeddings that compute directly with the blocks of a GGUF file: no weight changes.

`csrc/blocks/panel_sums.c` multiplies the codes by activations that are rounded to integers: 8 bits (int8, one plane) or
15 (int15, two planes), with a scale per 32 inputs. Sums of integers are exact, so a token's result depends neither on
other tokens nor on the processor. The specification of a layer is the product with `BlockPart.rows` in float32, after
the same rounding of the activations.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from copy import copy
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.models.cpu.huge_pages import HugePages, Memory, as_tensor
from slipstream.models.cpu.kernel_libraries import address
from slipstream.models.cpu.structs import LANES, BlockFormat, BlockLinearStruct, PartStruct

ACTIVATIONS = {"int8": 1, "int15": 2, "float32": 1}  # planes of signed bytes; floating-point weights ignore them
PACKED_AT_A_TIME = 1 << 24  # bytes of the file

ReadRows = Callable[[int, int], Any]  # (first row, last row) -> their blocks, a contiguous array of bytes


class Table(Protocol):
    """A matrix whose rows can be unpacked: a `BlockPart`, or a matrix that stays in its file."""

    outputs: int
    inputs: int

    def rows(self, outputs: Tensor) -> Tensor: ...


class BlockPart:
    """A matrix of a GGUF file [outputs, inputs] as panels of 16 outputs."""

    def __init__(
        self,
        block: BlockFormat,
        shape: tuple[int, int],
        read: ReadRows | None,
        library: Any,
        memory: Memory | None = None,
    ) -> None:
        """shape: outputs and inputs; read: called for a few rows at a time, in order; memory: may be shared by parts.

        Without `read`, the caller fills the panels, see `from_row`.
        """
        self.block, self.library = block, library
        self.outputs, self.inputs = shape
        self.inputs_from: Tensor | None = None  # [inputs], the input that each column multiplies; None: in order
        self.scale: Tensor | None = None  # [1] float32 that multiplies all weights; None: 1
        self.is_finite = True  # whether all weights from `read` are
        self._panel_bytes: int = library.panel_bytes(block.code, self.inputs)
        self.data = as_tensor((memory or HugePages()).take(block.panels_size(shape, library)))
        if read is None:
            return
        for first, last in block.row_ranges(shape, PACKED_AT_A_TIME):
            rows = read(first, last)
            sizes = len(rows), self.inputs
            self.is_finite &= bool(library.pack_panels(block.code, rows.ctypes.data, *sizes, self.from_row(first), 1))

    def from_row(self, row: int) -> int:
        """The address of the panel that begins with this row. row: a multiple of 16."""
        return self.data.data_ptr() + row // LANES * self._panel_bytes

    @property
    def struct(self) -> ctypes.Structure:
        """`struct block_part`; valid while this object lives."""
        return self.first(self.outputs)

    def first(self, outputs: int) -> ctypes.Structure:
        """`struct block_part` of the first outputs."""
        return PartStruct(self.block.code, outputs, address(self.data), address(self.scale))

    def rows(self, outputs: Tensor) -> Tensor:
        """[N, inputs] float32: the weights of some outputs [N], exact unless scaled, which rounds them once."""
        indices = outputs.to(torch.int64).contiguous()
        if indices.numel() and not (int(indices.min()) >= 0 and int(indices.max()) < self.outputs):
            raise IndexError(
                f"outputs from {int(indices.min())} to {int(indices.max())}; allowed: 0 to {self.outputs - 1}"
            )
        out = torch.empty(len(indices), self.inputs, dtype=torch.float32)
        part = ctypes.byref(self.struct)
        self.library.unpack_rows(part, self.inputs, indices.data_ptr(), len(indices), out.data_ptr())
        return out


class BlockLinear(nn.Module):
    """A linear layer over one or more matrices of a file; it concatenates their outputs, in float32."""

    def __init__(self, parts: Sequence[BlockPart], bias: Tensor | None, activations: str) -> None:
        """bias: float32 or None; activations: a key of `ACTIVATIONS`."""
        super().__init__()
        self.parts, self.planes, self.activations = tuple(parts), ACTIVATIONS[activations], activations
        self.in_features, self.out_features = parts[0].inputs, sum(part.outputs for part in parts)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        # the kernels read `_bias`, since a change of the model's type or device reallocates this parameter
        self.bias = None if self._bias is None else nn.Parameter(self._bias, requires_grad=False)
        self._library = parts[0].library
        self._set([part.struct for part in parts])

    def _set(self, structs: list[ctypes.Structure]) -> None:
        self._structs = (PartStruct * len(structs))(*structs)  # kept, since the struct below has only its address
        outputs = sum(int(struct.outputs) for struct in structs)
        parts = ctypes.addressof(self._structs)
        self.weights = BlockLinearStruct(self.in_features, outputs, len(structs), parts, address(self._bias))

    def first(self, outputs: int) -> BlockLinear:
        """The layer of the first `outputs` outputs, over the same weights; for layers of one part only."""
        (part,) = self.parts
        layer = BlockLinear([part], None, self.activations)
        layer.bias, layer._bias, layer.out_features = self.bias, self._bias, outputs
        layer._set([part.first(outputs)])
        return layer

    def rows(self, outputs: Tensor) -> Tensor:
        """The outputs' rows of weights, see `BlockPart.rows`; for layers of one part only."""
        (part,) = self.parts
        return part.rows(outputs)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., in_features] float32 -> [..., out_features]."""
        if x.dtype != torch.float32 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: {x.dtype} [..., {x.shape[-1]}]; allowed: float32 [..., {self.in_features}]")
        order = self.parts[0].inputs_from
        rows = x.contiguous() if order is None else x[..., order]
        out = rows.new_empty(*x.shape[:-1], self.out_features)
        tokens, planes, weights = rows.numel() // self.in_features, self.planes, ctypes.byref(self.weights)
        space = torch.empty(self._library.activation_bytes(self.in_features, tokens, planes), dtype=torch.uint8)
        self._library.multiply_blocks(weights, rows.data_ptr(), tokens, planes, out.data_ptr(), space.data_ptr())
        return out

    def extra_repr(self) -> str:
        """Sizes, formats and activations."""
        formats = "+".join(dict.fromkeys(part.block.name for part in self.parts))
        return f"in_features={self.in_features}, out_features={self.out_features}, {formats}, {self.activations}"


class ScaledEmbedding(nn.Embedding):
    """An embedding whose rows are multiplied by a number."""

    def __init__(self, weight: Tensor, scale: float) -> None:
        rows, size = weight.shape
        super().__init__(rows, size, _weight=weight)
        self.scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """input: token ids [...] -> [..., size]."""
        return super().forward(input) * self.scale


class BlockEmbedding(nn.Module):
    """An embedding that unpacks rows on lookup. weight: its first rows only, which distinguish models."""

    def __init__(self, part: Table, embedding: nn.Embedding) -> None:
        """embedding: the model's own, whose weight is not used; it is called with the unpacked rows as its weight."""
        super().__init__()
        inner = copy(embedding)
        inner.padding_idx = None  # an index into the whole table, for training only
        self.part, self._inner = part, (inner,)  # a tuple hides it from the submodules, since it has no weight
        self.num_embeddings, self.embedding_dim = part.outputs, part.inputs
        first_rows = part.rows(torch.arange(min(LANES * 4, part.outputs)))
        self.weight = nn.Parameter(first_rows, requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [...] -> [..., embedding_dim]."""
        rows = self.part.rows(ids.flatten())
        (inner,) = self._inner
        if type(inner) in (nn.Embedding, ScaledEmbedding):
            rows = rows.view(*ids.shape, self.embedding_dim)
            return rows * inner.scale if isinstance(inner, ScaledEmbedding) else rows
        indices = torch.arange(len(rows)).view(ids.shape)
        return torch.func.functional_call(inner, {"weight": rows}, (indices,))


def block_linears(model: nn.Module) -> list[BlockLinear]:
    """The layers of a model that compute with a file's blocks."""
    return [module for module in model.modules() if isinstance(module, BlockLinear)]
