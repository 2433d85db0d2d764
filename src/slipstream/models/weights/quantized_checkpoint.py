"""Reads checkpoints quantized by GPTQ, AWQ, compressed-tensors, torchao or to FP8: their settings and their matrices.

The layouts are those of AutoGPTQ, gptqmodel 7.7, AutoAWQ, compressed-tensors 0.20, torchao 0.18 and ModelOpt 0.47; none
of these packages is needed. Floating-point tensors of a checkpoint (norms, embeddings, usually the output layer) stay
as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.checks import is_whole
from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cpu.block_experts import ExpertStacks, stacks_of_single_experts
from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.grouped_blocks import CENTER, GroupedMatrix, NotInBlocksError, number_format
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.latent_heads import LatentStacks, stacks_of_part
from slipstream.models.cpu.structs import BlockFormat
from slipstream.models.decoder.plan import ExpertsPlan, LatentPlan
from slipstream.models.weights.safetensors_files import FLOATS, CheckpointFiles

FP8_METHODS = ("modelopt", "fp8", "fbgemm_fp8")
METHODS = ("gptq", "awq", "compressed-tensors", "torchao", *FP8_METHODS)
BITS = (2, 4, 8)
GPTQ_BITS = (2, 3, 4, 8)
# the formats of compressed-tensors: codes in 32-bit words, or one number of 8 bits per weight
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
MODELOPT_FILE = "hf_quant_config.json"  # ModelOpt's settings, usually next to config.json
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# tensors that only tell how to round activations, keys and values
OF_ACTIVATIONS = re.compile(r"(?:input|output|activation|prob_output|[qkv])_(?:scale|scale_ub|zero_point)")
WORD = (torch.int32,)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # outputs in a word of AWQ, from its lowest bits on
TORCHAO = ("Int4Tensor", "IntxUnpackedToInt8Tensor", "Int8Tensor")
ROUNDS_INPUTS = ("activation_quantization", "act_quant_kwargs")  # torchao's settings that also round activations
WEIGHT, SCALES = ".weight", {"weight_scale", "weight_scale_inv"}


@dataclass(frozen=True)
class Scheme:
    """The quantization of a checkpoint's weights. Except with GPTQ and AWQ, bits and groups differ by tensor."""

    method: str  # of `METHODS`
    bits: int = 0
    group: int = 0  # inputs that share a scale; 0 for all
    less: int = 0  # subtracted from stored zero points in GPTQ's first format
    borrows: bool = False  # subtracts from whole words, so a zero point of 0 borrows from the next one
    symmetric: bool = False  # all of GPTQ's zero points are in the middle
    layers: tuple[tuple[str, Scheme], ...] = ()  # for layers whose names match a pattern; the first match counts
    blocks: tuple[tuple[int, int], ...] = ()  # rectangles of outputs and inputs that may share a scale
    rounds_activations: bool = False  # the settings also round activations, keys or values

    def of(self, module: str) -> Scheme:
        return next((scheme for pattern, scheme in self.layers if re.match(pattern, module)), self)


class _Settings:
    """Reads `quantization_config`; raises `SlipstreamError` for unknown values."""

    def __init__(self, source: str, config: Mapping[str, Any]) -> None:
        self._source, self._config = source, config

    def one_of(self, name: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        value = self._config.get(name)
        value = default if value is None else value
        value = value.lower() if isinstance(value, str) else value
        if isinstance(value, bool | float) or value not in allowed:
            raise self.wrong(name, value, ", ".join(str(choice) for choice in allowed if choice is not None))
        return value

    def group(self) -> int:
        value = self._config.get("group_size", 128)
        if not is_whole(value, -1) or not value:
            raise self.wrong("group_size", value, "a whole number from 1, or -1 for whole rows")
        return max(value, 0)

    def wrong(self, name: str, value: Any, allowed: str) -> SlipstreamError:
        place = MODELOPT_FILE if MODELOPT_FILE in self._config else "config.json"
        return SlipstreamError(
            f"model {self._source!r}: quantization_config.{name} of {place} is {value!r}; allowed: {allowed}"
        )


def scheme_of(source: str, config: Mapping[str, Any]) -> Scheme | None:
    """The scheme in a model's configuration; None if it is not quantized, or by an unsupported method.

    Raises `SlipstreamError` for unknown settings of a known method.
    """
    quantization = config.get("quantization_config")
    if not isinstance(quantization, Mapping) or quantization.get("quant_method") not in METHODS:
        return None
    method, read = str(quantization["quant_method"]), _Settings(source, quantization)
    if method == "gptq":
        return _gptq_scheme(source, quantization)
    if method == "awq":
        for name in ("version", "format", "checkpoint_format"):
            read.one_of(name, ("gemm",), "gemm")
        return Scheme(method, read.one_of("bits", (4,), 4), read.group())
    if method == "compressed-tensors":
        return _compressed_scheme(read, quantization)
    if method == "modelopt":
        read.one_of("quant_algo", ("fp8", "fp8_per_channel_per_token"))
    size = quantization.get("weight_block_size")
    if size is not None and not _is_block(size):
        raise read.wrong("weight_block_size", size, "two whole numbers from 1")
    return Scheme(method, blocks=() if size is None else (tuple(size),), rounds_activations=method in FP8_METHODS)


def _gptq_scheme(source: str, quantization: Mapping[str, Any]) -> Scheme:
    """The scheme of GPTQ. `dynamic` has settings for layers by pattern; "-:" marks layers that are not quantized."""
    read = _Settings(source, quantization)
    form = read.one_of("checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    read.one_of("format", (form,), form)
    dynamic, layers = quantization.get("dynamic") or {}, list[tuple[str, Scheme]]()
    try:
        for pattern, changes in dynamic.items():
            if not pattern.startswith("-:"):
                layer = _gptq_scheme(source, {**quantization, **changes, "dynamic": None})
                layers.append((re.compile(pattern.removeprefix("+:")).pattern, layer))
    except (AttributeError, TypeError, re.error):
        raise read.wrong("dynamic", dynamic, "settings by regular expressions") from None
    writer = (quantization.get("meta") or {}).get("quantizer") or ""
    return Scheme(
        "gptq",
        read.one_of("bits", GPTQ_BITS),
        read.group(),
        less=int(form == "gptq"),
        borrows="gptqmodel" in str(writer),
        symmetric=quantization.get("sym") is True,
        layers=tuple(layers),
    )


def _compressed_scheme(read: _Settings, quantization: Mapping[str, Any]) -> Scheme:
    groups = quantization.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise read.wrong("config_groups", groups, "a mapping")
    read.one_of("format", (*FORMATS, "mixed-precision"))
    if quantization.get("transform_config"):
        raise read.wrong("transform_config", quantization["transform_config"], "none: weights that are not rotated")
    blocks, rounds = set[tuple[int, int]](), bool(quantization.get("kv_cache_scheme"))
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if not isinstance(weights, Mapping) or weights.get("type", "int") not in ("int", "float"):
            raise read.wrong(f"config_groups.{name}.weights", weights, "weights of type int or float")
        if group.get("format") not in (*FORMATS, None):
            raise read.wrong(f"config_groups.{name}.format", group["format"], ", ".join(FORMATS))
        bits = BITS if weights.get("type", "int") == "int" else (8,)
        if weights.get("num_bits") not in bits:
            raise read.wrong(
                f"config_groups.{name}.weights.num_bits", weights.get("num_bits"), ", ".join(map(str, bits))
            )
        size: Any = weights.get("block_structure")
        if _is_block(size):
            blocks.add(tuple(size))
        rounds |= any(group.get(which) is not None for which in ("input_activations", "output_activations"))
    return Scheme("compressed-tensors", blocks=tuple(sorted(blocks)), rounds_activations=rounds)


def _is_block(size: Any) -> bool:
    return isinstance(size, list | tuple) and len(size) == 2 and all(is_whole(side, 1) for side in size)


@dataclass(frozen=True)
class FloatMatrix:
    """Weights [outputs, inputs] as floating-point numbers of 8 bits with scales."""

    numbers: Tensor
    scales: Tensor  # float32 [outputs, groups]
    group: int  # inputs that share a scale

    def values(self) -> Tensor:
        """[outputs, inputs] float32: the weights, rounded at most once."""
        return self.numbers.float() * self.scales[:, torch.arange(self.numbers.shape[1]) // self.group]

    def in_blocks(self) -> tuple[BlockFormat, Any]:
        raise NotInBlocksError(f"is of type {str(self.numbers.dtype).removeprefix('torch.')}; computed with: integers")


@dataclass(frozen=True)
class PackedMatrices:
    """Reads the quantized matrices of a checkpoint."""

    files: CheckpointFiles
    scheme: Scheme

    def of(self, module: str, shape: tuple[int, int]) -> GroupedMatrix | FloatMatrix | None:
        """The matrix [outputs, inputs] of a layer; None if the layer is not quantized.

        Raises `SlipstreamError` if its tensors are missing, damaged or unknown.
        """
        readers = (item for item in self._readers().items() if f"{module}.{item[0]}" in self.files)
        ending, read = next(readers, ("", None))
        if read is None:
            return None
        try:
            return read(module, *shape)
        except RuntimeError as error:  # the tensors' sizes contradict each other
            what = f"does not fit the other tensors of its layer ({one_line(error)})"
            raise self.files.wrong(f"{module}.{ending}", what, "tensors of one quantized matrix") from error

    def modules(self) -> dict[str, tuple[int, int]]:
        """The quantized layers, with their outputs and inputs."""
        parted = (name.rpartition(".") for name in self.files.shapes)
        names = {module: None for module, _, ending in parted if ending in self._readers()}
        shapes = {module: self._shape(module) for module in names}
        return {module: shape for module, shape in shapes.items() if shape is not None}

    def of_activations(self) -> set[str]:
        """The tensors that only tell how to round activations, if the settings round them."""
        if not self.scheme.rounds_activations:
            return set()
        return {name for name in self.files.shapes if OF_ACTIVATIONS.fullmatch(name.rpartition(".")[2])}

    def _readers(self) -> dict[str, Callable[[str, int, int], GroupedMatrix | FloatMatrix]]:
        """Readers, by the tensor that identifies a quantized layer."""
        match self.scheme.method:
            case "gptq":
                return {"qweight": self._gptq}
            case "awq":
                return {"qweight": self._awq}
            case "compressed-tensors":
                return {"weight_packed": self._compressed, "weight_scale": self._scaled}
            case "torchao":
                return {"_weight_qdata": self._torchao}
        return {"weight_scale_inv": self._scaled, "weight_scale": self._scaled}

    def _shape(self, module: str) -> tuple[int, int] | None:
        """Outputs and inputs of a layer, from its tensors; None if it has only scales."""
        method, endings = self.scheme.method, (*(self._readers().keys() - SCALES), "weight")
        name = next((f"{module}.{ending}" for ending in endings if f"{module}.{ending}" in self.files), None)
        if name is None:
            return None
        shape = self.files.shapes[name]
        if len(shape) != 2:
            raise self.files.wrong(name, f"is {list(shape)}", "two dimensions")
        if method == "gptq":
            return shape[1], shape[0] * 32 // self.scheme.of(module).bits
        if method == "awq":
            return shape[1] * 8, shape[0]
        if name.endswith("weight_packed"):
            stored = self.files.tensor(f"{module}.weight_shape", (2,), (torch.int64, torch.int32)).tolist()
            return int(stored[0]), int(stored[1])
        return shape[0], shape[1] * (2 if method == "torchao" and self._kind(module) == "Int4Tensor" else 1)

    def _gptq(self, module: str, outputs: int, inputs: int) -> GroupedMatrix:
        scheme = self.scheme.of(module)
        bits, group = scheme.bits, scheme.group or inputs
        groups = -(-inputs // group)
        codes = self._words(f"{module}.qweight", (inputs * bits // 32, outputs), bits, 0)
        zeros = self._gptq_zeros(f"{module}.qzeros", (groups, outputs * bits // 32), scheme)
        scales = self.files.tensor(f"{module}.scales", (groups, outputs), FLOATS).float()
        owners = self._owners(f"{module}.g_idx", inputs, group, groups)
        return _matrix(bits, codes.T, scales.T, zeros.T, group, owners)

    def _gptq_zeros(self, name: str, shape: tuple[int, int], scheme: Scheme) -> Tensor:
        """[groups, outputs]: zero points.

        Symmetric ones are known, which reveals files whose format contradicts their settings. Zero points of 0 wrap
        around: AutoGPTQ's kernels add 1 modulo the number of codes, gptqmodel adds ones to whole words.
        """
        bits, middle = scheme.bits, 1 << (scheme.bits - 1)
        if scheme.borrows and scheme.less and not scheme.symmetric and bits != 3:
            return self._words(name, shape, bits, 1, add=sum(1 << shift for shift in range(0, 32, bits)))
        stored = self._words(name, shape, bits, 1)
        if not scheme.symmetric:
            return (stored + scheme.less) & ((1 << bits) - 1)
        if not any(bool((stored == number).all()) for number in (middle - 1, middle)):
            problem = f"stores {int(stored.min())} to {int(stored.max())}, although quantization_config.sym is true"
            raise self.files.wrong(name, problem, f"{middle - 1} throughout, or {middle} throughout")
        return torch.full_like(stored, middle)

    def _owners(self, name: str, inputs: int, group: int, groups: int) -> Tensor | None:
        """The group of each input; None if groups are runs of neighboring inputs."""
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
        scales, group = self._spread(name, self.files.tensor(name, None, FLOATS).float(), outputs, inputs)
        groups, center = scales.shape[1], 1 << (bits - 1)
        zeros = torch.full((outputs, groups), center, dtype=torch.int32)
        if (zero := f"{module}.weight_zero_point") in self.files:
            if self.files.shapes[zero] == (outputs, groups):
                zeros = self.files.tensor(zero, None, (torch.int8,)).int() + center
            else:
                zeros = self._words(zero, (-(-outputs * bits // 32), groups), bits, 0)[:outputs].int()
        owners = self._owners(f"{module}.weight_g_idx", inputs, group, groups)
        return _matrix(bits, codes, scales, zeros, group, owners)

    def _scaled(self, module: str, outputs: int, inputs: int) -> GroupedMatrix | FloatMatrix:
        """A matrix of 8-bit numbers with one scale in all, one per output, per group of inputs, or per block."""
        numbers = self.files.tensor(f"{module}{WEIGHT}", (outputs, inputs), (*FLOAT8, torch.int8))
        name = next(name for name in (f"{module}.{ending}" for ending in self._readers()) if name in self.files)
        scales, group = self._spread(name, self.files.tensor(name, None, FLOATS).float(), outputs, inputs)
        if numbers.dtype != torch.int8:
            return FloatMatrix(numbers, scales, group)
        zeros, zero = torch.full(scales.shape, CENTER[8]), f"{module}.weight_zero_point"
        if zero in self.files:
            points = self.files.tensor(zero, None, (torch.int8,)).int()
            zeros = zeros + self._spread(zero, points, outputs, inputs)[0].expand_as(zeros)
        return _matrix(8, numbers.int() + CENTER[8], scales, zeros, group)

    def _spread(self, name: str, numbers: Tensor, outputs: int, inputs: int) -> tuple[Tensor, int]:
        """Numbers per matrix, output, group or block as [outputs, groups], and the number of inputs in a group."""
        if numbers.numel() == 1:
            return numbers.view(1, 1).expand(outputs, 1), inputs
        shape = tuple(numbers.shape)
        for height, width in self.scheme.blocks:
            if shape == (-(-outputs // height), -(-inputs // width)):
                return numbers.repeat_interleave(height, 0)[:outputs], width
        if shape in ((outputs,), (outputs, 1)):
            return numbers.view(-1, 1), inputs
        if len(shape) == 2 and shape[0] == outputs and shape[1] and inputs % shape[1] == 0:
            return numbers, inputs // shape[1]
        sizes = "".join(f", one per block of {height} x {width}" for height, width in self.scheme.blocks)
        raise self.files.wrong(
            name, f"is {list(shape)}", f"one for all of {[outputs, inputs]}, one per output or group{sizes}"
        )

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
            raise self.files.wrong(name, f"({kind}) changes activations too", "only weights that are quantized")
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
        unsigned = (codes.int() + CENTER[bits]).to(torch.uint8)
        return self._grouped(scale, bits, unsigned, scales.reshape(len(scales), -1), zeros, None)

    def _grouped(
        self, name: str, bits: int, codes: Tensor, scales: Tensor, zeros: Tensor | None, minima: Tensor | None
    ) -> GroupedMatrix:
        """A matrix of torchao; the number of scales determines its groups."""
        outputs, inputs = codes.shape
        if scales.dim() != 2 or len(scales) != outputs or inputs % max(scales.shape[1], 1):
            raise self.files.wrong(name, f"has {scales.numel()} scales", f"{outputs} times a divisor of {inputs}")
        shift = torch.zeros_like(scales, dtype=torch.int32) if zeros is None else zeros.expand_as(scales)
        matrix = _matrix(bits, codes, scales, shift + CENTER[bits], inputs // scales.shape[1])
        return replace(matrix, minima=minima)

    def _words(self, name: str, shape: tuple[int, int], bits: int, along: int, add: int = 0) -> Tensor:
        """Unpack the codes of int32 words, the lowest bits first, into neighbors along dimension `along`.

        Codes of 3 bits may span two words. add: a number to add to each word, which wraps around.
        """
        words = self.files.tensor(name, shape, WORD) + add
        step = bits if 32 % bits == 0 else 1
        shifts = torch.arange(0, 32, step, dtype=torch.int32).view(-1, *([1] * (1 - along)))
        codes = ((words.unsqueeze(along + 1) >> shifts) & ((1 << step) - 1)).flatten(along, along + 1)
        if step == bits:
            return codes
        places = torch.arange(bits, dtype=torch.int32).view(-1, *([1] * (1 - along)))
        return (codes.unflatten(along, (-1, bits)) << places).sum(along + 1, dtype=torch.int32)


def _matrix(
    bits: int, codes: Tensor, scales: Tensor, zeros: Tensor, group: int, owners: Tensor | None = None
) -> GroupedMatrix:
    return GroupedMatrix(
        bits, codes.to(torch.uint8).contiguous(), scales.contiguous(), zeros.int().contiguous(), None, group, owners
    )


class CheckpointTensors:
    """The tensors of a checkpoint for `block_model.fill`."""

    def __init__(self, matrices: PackedMatrices) -> None:
        self._matrices, self._files, self._memory = matrices, matrices.files, HugePages()

    def values(self, parameter: str, shape: tuple[int, ...]) -> Tensor:
        return self._files.tensor(parameter, shape, FLOATS).float()

    def part(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        module = parameter.removesuffix(WEIGHT)
        matrix = self._matrices.of(module, shape)
        if matrix is None:
            return self._numbers(parameter, shape, library)
        try:
            block, rows = matrix.in_blocks()
        except NotInBlocksError as error:
            raise NotInBlocksError(f"tensor {parameter!r} {error}") from error
        return BlockPart(block, shape, lambda first, last: rows[first:last], library, self._memory)

    def parts(self, parameter: str, shape: tuple[int, int], library: Any) -> list[BlockPart]:
        return [self.part(parameter, shape, library)]

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        return self.part(parameter, shape, library)

    def experts(self, block: str, plan: ExpertsPlan, library: Any) -> ExpertStacks:
        return stacks_of_single_experts(partial(self.part, library=library), block, plan, self._files.shapes)

    def latent(self, parameter: str, plan: LatentPlan, library: Any) -> LatentStacks:
        return stacks_of_part(self.part(parameter, plan.shape, library), plan)

    def _numbers(self, parameter: str, shape: tuple[int, int], library: Any) -> BlockPart:
        """A matrix that is not quantized."""
        dtype = self._files.rows(parameter, shape, FLOATS, 0, 1).dtype
        try:
            block = number_format(dtype, shape[1])
        except NotInBlocksError as error:
            raise NotInBlocksError(f"tensor {parameter!r} {error}") from error

        def rows(first: int, last: int) -> Any:
            return self._files.rows(parameter, shape, FLOATS, first, last).contiguous().view(torch.uint8).numpy()

        return BlockPart(block, shape, rows, library, self._memory)


def unpacked_weights(matrices: PackedMatrices, dtype: torch.dtype) -> dict[str, Tensor]:
    """All weights of a checkpoint in floating point, by the names of the model's parameters."""
    files, weights = matrices.files, dict[str, Tensor]()
    for module, shape in matrices.modules().items():
        matrix = matrices.of(module, shape)
        assert matrix is not None  # `modules` has found it
        weights[f"{module}{WEIGHT}"] = matrix.values().to(dtype)
    read = files.used | matrices.of_activations()
    for name in files.shapes:
        if name not in read:
            weights[name] = files.tensor(name, None, FLOATS).to(dtype)
    return weights
