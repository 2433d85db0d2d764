"""The matrices of GPTQ, AWQ, compressed-tensors and torchao checkpoints as codes, scales and zero points.

The layouts are those that gptqmodel, AutoAWQ, compressed-tensors 0.20 and torchao 0.18 write.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.models.cpu.grouped_blocks import CENTRE, GroupedMatrix
from slipstream.models.weights.quantisation_schemes import BITS, Scheme
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles

WORD = (torch.int32,)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs of a word of AWQ, from its lowest bits on
TORCHAO = ("Int4Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor")
ROUNDS_INPUTS = ("activation_quantization", "act_quant_kwargs")  # of torchao, where activations are rounded too


@dataclass(frozen=True)
class PackedMatrices:
    """Reads the quantised matrices of a checkpoint."""

    files: CheckpointFiles
    scheme: Scheme

    def of(self, module: str, shape: tuple[int, int]) -> GroupedMatrix | None:
        """The matrix [outputs, inputs] of a layer; None if the layer is not quantised.

        Raises `SlipstreamError` where its tensors are missing, damaged or not known.
        """
        key, read = self._reader(module)
        return read(module, *shape) if key in self.files else None

    def modules(self) -> dict[str, tuple[int, int]]:
        """The quantised layers, with their outputs and inputs."""
        ending = self._reader("")[0]
        return {
            name.removesuffix(ending): self._shape(name.removesuffix(ending), name)
            for name in self.files.shapes
            if name.endswith(ending)
        }

    def tensors_of(self, module: str) -> list[str]:
        """The tensors that belong to a quantised layer, its bias aside."""
        return [
            name
            for name in self.files.shapes
            if name.rpartition(".")[0] == module and name.rpartition(".")[2] not in ("weight", "bias")
        ]

    def _reader(self, module: str) -> tuple[str, Callable[[str, int, int], GroupedMatrix]]:
        ending, read = {
            "gptq": ("qweight", self._gptq),
            "awq": ("qweight", self._awq),
            "compressed-tensors": ("weight_packed", self._compressed),
            "torchao": ("_weight_qdata", self._torchao),
        }[self.scheme.method]
        return f"{module}.{ending}", read

    def _shape(self, module: str, name: str) -> tuple[int, int]:
        """Outputs and inputs of a layer, from its tensors."""
        found, method = self.files.shapes[name], self.scheme.method
        if len(found) != 2:
            raise self.files.wrong(name, f"is {list(found)}", "two dimensions")
        if method == "gptq":
            return found[1], found[0] * 32 // self.scheme.bits
        if method == "awq":
            return found[1] * 8, found[0]
        if method == "compressed-tensors":
            stored = self.files.tensor(f"{module}.weight_shape", (2,), (torch.int64, torch.int32)).tolist()
            return int(stored[0]), int(stored[1])
        return found[0], found[1] * (2 if self._kind(module) == "Int4Tensor" else 1)

    def _gptq(self, module: str, outputs: int, inputs: int) -> GroupedMatrix:
        bits, group = self.scheme.bits, self.scheme.group or inputs
        groups, words = -(-inputs // group), 32 // bits
        codes = self._words(f"{module}.qweight", (inputs // words, outputs), bits, 0)
        zeros = self._words(f"{module}.qzeros", (groups, outputs // words), bits, 1) + self.scheme.zeros_from
        if bool((zeros >= 1 << bits).any()):
            raise self.files.wrong(
                f"{module}.qzeros", f"stores {(1 << bits) - 1}, a zero point of {1 << bits}", f"0 to {(1 << bits) - 1}"
            )
        scales = self.files.tensor(f"{module}.scales", (groups, outputs), FLOATS).float()
        owners = self._owners(f"{module}.g_idx", inputs, group, groups)
        return _matrix(bits, codes.T, scales.T, zeros.T, group, owners)

    def _owners(self, name: str, inputs: int, group: int, groups: int) -> Tensor | None:
        """The group of each input where it is not that of its neighbours."""
        if name not in self.files:
            return None
        owners = self.files.tensor(name, (inputs,), (torch.int32, torch.int64)).long()
        if bool(((owners < 0) | (owners >= groups)).any()):
            raise self.files.wrong(
                name, f"names groups from {int(owners.min())} to {int(owners.max())}", f"0 to {groups - 1}"
            )
        return None if torch.equal(owners, torch.arange(inputs) // group) else owners

    def _awq(self, module: str, outputs: int, inputs: int) -> GroupedMatrix:
        group = self.scheme.group or inputs
        groups = -(-inputs // group)
        found = [
            self._words(f"{module}.{name}", (rows, outputs // 8), 4, 1).unflatten(1, (-1, 8))
            for name, rows in (("qweight", inputs), ("qzeros", groups))
        ]
        codes, zeros = (words[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1) for words in found)
        scales = self.files.tensor(f"{module}.scales", (groups, outputs), FLOATS).float()
        return _matrix(4, codes.T, scales.T, zeros.T, group)

    def _compressed(self, module: str, outputs: int, inputs: int) -> GroupedMatrix:
        packed, stored = f"{module}.weight_packed", f"{module}.weight_shape"
        shape = tuple(self.files.tensor(stored, (2,), (torch.int64, torch.int32)).tolist())
        if shape != (outputs, inputs):
            raise self.files.wrong(stored, f"says {list(shape)}", f"{[outputs, inputs]}, by config.json")
        bits = self.files.shapes[packed][-1] * 32 // inputs
        if bits not in BITS:
            raise self.files.wrong(packed, f"has {bits} bits a weight", ", ".join(map(str, BITS)))
        codes = self._words(packed, (outputs, -(-inputs * bits // 32)), bits, 1)[:, :inputs]
        name = f"{module}.weight_scale"
        scales = self.files.tensor(name, None, FLOATS).float()
        if (
            scales.dim() != 2
            or len(scales) != outputs
            or not 1 <= scales.shape[1] <= inputs
            or inputs % scales.shape[1]
        ):
            raise self.files.wrong(name, f"is {list(scales.shape)}", f"{outputs} rows of scales that divide {inputs}")
        groups, centre = scales.shape[1], 1 << (bits - 1)
        zeros = torch.full((outputs, groups), centre, dtype=torch.int32)
        if (zero := f"{module}.weight_zero_point") in self.files:
            if self.files.shapes[zero] == (outputs, groups):
                zeros = self.files.tensor(zero, None, (torch.int8,)).int() + centre
            else:
                zeros = self._words(zero, (-(-outputs * bits // 32), groups), bits, 0)[:outputs].int()
        owners = self._owners(f"{module}.weight_g_idx", inputs, inputs // groups, groups)
        return _matrix(bits, codes, scales, zeros, inputs // groups, owners)

    def _kind(self, module: str) -> str:
        """The class of a torchao tensor. Raises for those that are not known."""
        name = f"{module}.weight"
        try:
            described = json.loads(self.files.metadata[name])
            kind, data = described["_type"], described["_data"]
            rounds = [key for key in ROUNDS_INPUTS if data.get(key) is not None]
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise self.files.wrong(name, "has no description of torchao in the file", "torchao's metadata") from error
        if kind not in TORCHAO:
            raise self.files.wrong(name, f"is of torchao's type {kind}", ", ".join(TORCHAO))
        if rounds or f"{module}._weight_act_pre_scale" in self.files:
            raise self.files.wrong(name, f"({kind}) changes activations too", "only weights that are quantised")
        return str(kind)

    def _torchao(self, module: str, outputs: int, inputs: int) -> GroupedMatrix:
        kind, (data, scale, zero) = (
            self._kind(module),
            (f"{module}._weight_{n}" for n in ("qdata", "scale", "zero_point")),
        )
        scales = self.files.tensor(scale, None, FLOATS).float()
        if kind == "Int4Tensor":
            packed = self.files.tensor(data, (outputs, inputs // 2), (torch.uint8, torch.int8)).view(torch.uint8)
            codes = torch.stack([packed & 15, packed >> 4], -1).flatten(1) ^ 8  # two's complement
            minima = self.files.tensor(zero, tuple(scales.shape), FLOATS).float()
            return self._grouped(scale, 4, codes, scales.T, None, minima.T)
        bits = 8
        codes = self.files.tensor(data, (outputs, inputs), (torch.int8,))
        if kind == "IntxUnpackedToInt8Tensor" and int(codes.min()) >= -8 and int(codes.max()) <= 7:
            bits = 4
        zeros = None
        if zero in self.files:
            zeros = self.files.tensor(zero, None, (torch.int8, torch.int32, torch.int64)).int().view(outputs, -1)
        unsigned = (codes.int() + CENTRE[bits]).to(torch.uint8)
        return self._grouped(scale, bits, unsigned, scales.reshape(len(scales), -1), zeros, None)

    def _grouped(
        self, name: str, bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None
    ) -> GroupedMatrix:
        """A matrix of torchao; its groups follow from the number of scales."""
        outputs, inputs = codes.shape
        if scales.dim() != 2 or len(scales) != outputs or inputs % max(scales.shape[1], 1):
            raise self.files.wrong(name, f"has {scales.numel()} scales", f"{outputs} times a divisor of {inputs}")
        shift = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.expand_as(scales)
        found = _matrix(bits, codes, scales, shift + CENTRE[bits], inputs // scales.shape[1])
        return GroupedMatrix(bits, found.codes, found.scales, found.zeros, minima, found.group)

    def _words(self, name: str, shape: tuple[int, int], bits: int, along: int) -> Tensor:
        """The codes of int32 words, of which those along a dimension are in one word; the lowest bits first."""
        words = self.files.tensor(name, shape, WORD)
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        codes = (words.unsqueeze(along + 1) >> shifts.view(-1, *([1] * (1 - along)))) & ((1 << bits) - 1)
        return codes.flatten(along, along + 1)


def _matrix(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor, group: int, owners: Tensor | None = None
) -> GroupedMatrix:
    return GroupedMatrix(
        bits, codes.to(torch.uint8).contiguous(), scales.contiguous(), zeros.int().contiguous(), None, group, owners
    )
