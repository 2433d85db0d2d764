"""Checkpoints quantised by GPTQ, AWQ, compressed-tensors or torchao: their settings and their matrices.

The layouts are those that gptqmodel, AutoAWQ, compressed-tensors 0.20 and torchao 0.18 write; none of these packages is
needed. What a checkpoint leaves in floating point (norms, embeddings, mostly the output layer) stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.grouped_blocks import CENTRE, GroupedMatrix, NotInBlocksError, number_format
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles

METHODS = ("gptq", "awq", "compressed-tensors", "torchao")
BITS = (2, 4, 8)
PACKED = "pack-quantized"  # the format of compressed-tensors
WORD = (torch.int32,)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the outputs of a word of AWQ, from its lowest bits on
TORCHAO = ("Int4Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor")
ROUNDS_INPUTS = ("activation_quantization", "act_quant_kwargs")  # of torchao, where activations are rounded too
WEIGHT = ".weight"


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised. method: of `METHODS`; bits: of the codes; group: inputs that share a scale, 0 for all.

    zeros_from: what a stored zero point of 0 means, 1 in the first format of GPTQ. For compressed-tensors and torchao
    bits and group are 0: they differ by tensor.
    """

    method: str
    bits: int = 0
    group: int = 0
    zeros_from: int = 0


class _Settings:
    """Reads `quantization_config`; raises `SlipstreamError` for unknown values."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self._source, self._config = source, config

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, bool) or value not in allowed:
            raise self.wrong(name, value, ", ".join(str(choice) for choice in allowed if choice is not None))
        return value

    def group(self) -> int:
        value = self._config.get("group_size", 128)
        if isinstance(value, bool) or not isinstance(value, int) or not (value == -1 or value > 0):
            raise self.wrong("group_size", value, "a whole number from 1, or -1 for whole rows")
        return max(value, 0)

    def wrong(self, name: str, value: Any, allowed: str) -> SlipstreamError:
        return SlipstreamError(
            f"model {self._source!r}: quantization_config.{name} of config.json is {value!r}; allowed: {allowed}"
        )


def scheme_of(source: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a model's configuration; None if it is not quantised, or by an unknown method.

    Raises `SlipstreamError` for unknown settings of a known method.
    """
    quantisation = config.get("quantization_config")
    if not isinstance(quantisation, Mapping) or quantisation.get("quant_method") not in METHODS:
        return None
    method, read = str(quantisation["quant_method"]), _Settings(source, quantisation)
    if method == "gptq":
        form = read.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
        return Scheme(method, read.one_of("bits", BITS), read.group(), int(form == "gptq"))
    if method == "awq":
        name = "format" if "format" in quantisation else "version"
        read.one_of(name, ("gemm",), "gemm")
        return Scheme(method, read.one_of("bits", (4,), 4), read.group())
    if method == "compressed-tensors":
        _check_packed(read, quantisation)
    return Scheme(method)


def _check_packed(read: _Settings, quantisation: Mapping[str, Any]) -> None:
    groups = quantisation.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise read.wrong("config_groups", groups, "a mapping")
    read.one_of("format", (PACKED, "mixed-precision"))
    for name in ("transform_config", "kv_cache_scheme"):
        if quantisation.get(name):
            raise read.wrong(name, quantisation[name], "none: only weights are quantised, and not rotated on the way")
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type", "int") != "int":
            raise read.wrong(f"config_groups.{name}.weights", weights, "weights of type int")
        if group.get("format", PACKED) not in (PACKED, None):
            raise read.wrong(f"config_groups.{name}.format", group["format"], PACKED)
        if weights.get("num_bits") not in BITS:
            raise read.wrong(f"config_groups.{name}.weights.num_bits", weights.get("num_bits"), "2, 4, 8")
        for which in ("input_activations", "output_activations"):
            if group.get(which) is not None:
                raise read.wrong(f"config_groups.{name}.{which}", group[which], "null: only weights are quantised")


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
        shape, method = self.files.shapes[name], self.scheme.method
        if len(shape) != 2:
            raise self.files.wrong(name, f"is {list(shape)}", "two dimensions")
        if method == "gptq":
            return shape[1], shape[0] * 32 // self.scheme.bits
        if method == "awq":
            return shape[1] * 8, shape[0]
        if method == "compressed-tensors":
            stored = self.files.tensor(f"{module}.weight_shape", (2,), (torch.int64, torch.int32)).tolist()
            return int(stored[0]), int(stored[1])
        return shape[0], shape[1] * (2 if self._kind(module) == "Int4Tensor" else 1)

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
        """The group of each input; None where groups are runs of neighbouring inputs."""
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
        unpacked_words = [
            self._words(f"{module}.{name}", (rows, outputs // 8), 4, 1).unflatten(1, (-1, 8))
            for name, rows in (("qweight", inputs), ("qzeros", groups))
        ]
        codes, zeros = (words[..., torch.tensor(AWQ_ORDER).argsort()].flatten(1) for words in unpacked_words)
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
        """The class of a torchao tensor. Raises `SlipstreamError` for unknown ones."""
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
        kind = self._kind(module)
        data, scale, zero = (f"{module}._weight_{part}" for part in ("qdata", "scale", "zero_point"))
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
        matrix = _matrix(bits, codes, scales, shift + CENTRE[bits], inputs // scales.shape[1])
        return replace(matrix, minima=minima)

    def _words(self, name: str, shape: tuple[int, int], bits: int, along: int) -> Tensor:
        """Unpack the codes of int32 words, the lowest bits first, into neighbours along dimension `along`."""
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


class CheckpointTensors:
    """The tensors of a checkpoint for `block_model.fill`."""

    def __init__(self, matrices: PackedMatrices) -> None:
        self._matrices, self._files = matrices, matrices.files

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        self._files.used.add(parameter)
        return self._files.tensor(parameter, shape, FLOATS).float()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        module = parameter.removesuffix(WEIGHT)
        matrix = self._matrices.of(module, shape)
        if matrix is None:
            return self._numbers(parameter, shape, library)
        self._files.used.update(self._matrices.tensors_of(module))
        try:
            block, rows = matrix.in_blocks()
        except NotInBlocksError as error:
            raise NotInBlocksError(f"tensor {parameter!r} {error}") from error
        return BlockPart(block, shape, lambda first, last: rows[first:last], library)

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        return self.part(parameter, shape, library)

    def _numbers(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix that was not quantised."""
        self._files.used.add(parameter)
        dtype = self._files.rows(parameter, shape, FLOATS, 0, 1).dtype
        try:
            block = number_format(dtype, shape[1])
        except NotInBlocksError as error:
            raise NotInBlocksError(f"tensor {parameter!r} {error}") from error

        def rows(first: int, last: int) -> Any:
            return self._files.rows(parameter, shape, FLOATS, first, last).contiguous().view(torch.uint8).numpy()

        return BlockPart(block, shape, rows, library)


def unpacked_weights(matrices: PackedMatrices, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint in floating point, by the names of the model's parameters."""
    files, weights = matrices.files, dict[str, Tensor]()
    packed_names = set[str]()
    for module, shape in matrices.modules().items():
        matrix = matrices.of(module, shape)
        if matrix is None:
            raise SlipstreamError(f"model {files.source!r}: layer {module!r} has no quantised weights")
        weights[f"{module}{WEIGHT}"] = matrix.values().to(dtype)
        packed_names.update(matrices.tensors_of(module))
    for name in files.shapes:
        if name not in packed_names:
            weights[name] = files.tensor(name, None, FLOATS).to(dtype)
    return weights
