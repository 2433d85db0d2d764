"""Tiny checkpoints as published quantizers write them, and plain dequantizers.

A matrix is rounded to codes, scales and zero points, which each `pack_*` lays out in its own way. `values` computes the
numbers they mean from the codes, not from what was packed. Experts are written as published: one tensor each.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.gguf_files import SHAPE
from tests.support.tiny_models import fresh

NO_EXCEPTIONS: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Rounded:
    """codes [out, in], 0 to 2^bits - 1; scales, zeros [out, groups]; minima: added, float, or None."""

    bits: int
    group: int
    codes: Any
    scales: Any
    zeros: Any
    minima: Any = None

    def values(self) -> Any:
        """[out, in] float32, input by input."""
        weights = numpy.empty(self.codes.shape, numpy.float32)
        for i in range(self.codes.shape[1]):
            g = i // self.group
            exact = (self.codes[:, i].astype(numpy.float64) - self.zeros[:, g]) * self.scales[:, g].astype(
                numpy.float64
            )
            weights[:, i] = exact if self.minima is None else exact + self.minima[:, g].astype(numpy.float64)
        return weights


def rounded(weight: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype = torch.float16) -> Rounded:
    """A matrix rounded to the nearest codes. group: 0 for whole rows."""
    numbers, top = weight.double().numpy(), (1 << bits) - 1
    group = group or numbers.shape[1]
    cut = numpy.stack([numbers[:, start : start + group] for start in range(0, numbers.shape[1], group)], 1)
    low, high = numpy.minimum(cut.min(-1), 0), numpy.maximum(cut.max(-1), 0)
    if symmetric:
        high = numpy.maximum(-low, high)
        low = -high
    scales = torch.from_numpy((high - low) / top + 1e-9).to(dtype).float().numpy()
    zeros = numpy.full(scales.shape, (top + 1) // 2) if symmetric else (-low / scales).round().clip(0, top)
    codes = (cut / scales[..., None] + zeros[..., None]).round().clip(0, top)
    return Rounded(bits, group, codes.reshape(numbers.shape).astype(numpy.int64), scales, zeros.astype(numpy.int64))


@dataclass(frozen=True)
class Scaled:
    """numbers [out, in] of 8 bits; scales [out / height, in / width], one for each block (height, width)."""

    numbers: Tensor
    scales: Tensor
    block: tuple[int, int]

    def values(self) -> Any:
        weights = self.numbers.float().numpy()
        for (row, column), scale in numpy.ndenumerate(self.scales.float().numpy()):
            height, width = self.block
            weights[row * height : (row + 1) * height, column * width : (column + 1) * width] *= scale
        return weights


def scaled(weight: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Scaled:
    """A matrix rounded to 8-bit floating-point numbers. block: 0 for all outputs, or all inputs."""
    height, width = block[0] or weight.shape[0], block[1] or weight.shape[1]
    rows, columns = (torch.arange(size) // side for size, side in zip(weight.shape, (height, width), strict=True))
    scales = torch.zeros(int(rows[-1]) + 1, int(columns[-1]) + 1)
    for row, column in numpy.ndindex(*scales.shape):
        scales[row, column] = weight[rows == row][:, columns == column].abs().max() / 448
    scales = scales.to(dtype)
    spread = scales.float()[rows][:, columns]
    return Scaled((weight.float() / spread).clamp(-448, 448).to(torch.float8_e4m3fn), scales, (height, width))


def words(numbers: Any, bits: int) -> Tensor:
    """Packs [rows, n] into [rows, n * bits / 32] int32, the first number in the lowest bits of the first word."""
    stream = (numbers[..., None] >> numpy.arange(bits) & 1).reshape(len(numbers), -1)
    stream = numpy.pad(stream, ((0, 0), (0, -stream.shape[1] % 32)))
    packed = numpy.packbits(stream.astype(numpy.uint8), axis=1, bitorder="little").view("<i4")
    return torch.from_numpy(packed.copy())


def tensor(numbers: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(numpy.ascontiguousarray(numbers)).to(dtype).contiguous()


def pack_gptq(name: str, matrix: Rounded, dtype: torch.dtype, *, less: int = 1) -> dict[str, Tensor]:
    """less: subtracted from zero points; 0 in the second format."""
    groups = torch.arange(matrix.codes.shape[1], dtype=torch.int32) // matrix.group
    return {
        f"{name}.qweight": words(matrix.codes, matrix.bits).T.contiguous(),
        f"{name}.qzeros": words((matrix.zeros.T - less) % (1 << matrix.bits), matrix.bits),
        f"{name}.scales": tensor(matrix.scales.T, dtype),
        f"{name}.g_idx": groups,
    }


def pack_awq(name: str, matrix: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
    def interleaved(numbers: Any) -> Tensor:
        eights = numbers.reshape(len(numbers), -1, 8)
        return words(eights[..., [0, 2, 4, 6, 1, 3, 5, 7]].reshape(numbers.shape), 4)

    return {
        f"{name}.qweight": interleaved(matrix.codes.T),
        f"{name}.qzeros": interleaved(matrix.zeros.T),
        f"{name}.scales": tensor(matrix.scales.T, dtype),
    }


def pack_compressed(name: str, matrix: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
    packed = {
        f"{name}.weight_packed": words(matrix.codes, matrix.bits),
        f"{name}.weight_scale": tensor(matrix.scales, dtype),
        f"{name}.weight_shape": torch.tensor(matrix.codes.shape),
    }
    if (matrix.zeros != 1 << (matrix.bits - 1)).any():
        packed[f"{name}.weight_zero_point"] = words(matrix.zeros.T, matrix.bits).T.contiguous()
    return packed


def pack_torchao(name: str, matrix: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
    signed = matrix.codes - 8
    packed = (signed[:, ::2] & 15) | (signed[:, 1::2] & 15) << 4
    return {
        f"{name}._weight_qdata": tensor(packed, torch.uint8).view(torch.int8),
        f"{name}._weight_scale": tensor(matrix.scales.T, dtype),
        f"{name}._weight_zero_point": tensor(matrix.minima.T, dtype),
    }


def with_minima(matrix: Rounded, dtype: torch.dtype) -> Rounded:
    """The same matrix with floating-point minima around code 8, as torchao stores them."""
    minima = torch.from_numpy((8 - matrix.zeros) * matrix.scales).to(dtype).float().numpy()
    return replace(matrix, zeros=numpy.full_like(matrix.zeros, 8), minima=minima)


def pack_int8(name: str, matrix: Rounded, dtype: torch.dtype) -> dict[str, Tensor]:
    """As compressed-tensors' int-quantized."""
    packed = {
        f"{name}.weight": tensor(matrix.codes - 128, torch.int8),
        f"{name}.weight_scale": tensor(matrix.scales, dtype),
    }
    if (matrix.zeros != 128).any():
        packed[f"{name}.weight_zero_point"] = tensor(matrix.zeros - 128, torch.int8)
    return packed


def pack_float8(name: str, matrix: Scaled, dtype: torch.dtype, ending: str = "scale") -> dict[str, Tensor]:
    return {f"{name}.weight": matrix.numbers, f"{name}.weight_{ending}": matrix.scales.to(dtype)}


def pack_modelopt(name: str, matrix: Scaled, dtype: torch.dtype) -> dict[str, Tensor]:
    activations = {f"{name}.input_scale": torch.tensor(0.01)}
    if name.endswith(("k_proj", "v_proj")):
        activations[f"{name}.{name[-6]}_scale"] = torch.tensor(0.02)
    return {f"{name}.weight": matrix.numbers, f"{name}.weight_scale": matrix.scales.float().view(()), **activations}


PACKERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "gptq": pack_gptq,
    "gptq_v2": lambda *args: pack_gptq(*args, less=0),
    "awq": pack_awq,
    "compressed-tensors": pack_compressed,
    "torchao": pack_torchao,
    "int-quantized": pack_int8,
    "float-quantized": pack_float8,
    "fp8": lambda name, matrix, _: pack_float8(name, matrix, torch.float32, "scale_inv"),
    "fbgemm_fp8": lambda name, matrix, _: (
        pack_float8(name, matrix, torch.float32) | {f"{name}.input_scale_ub": torch.tensor([1200.0])}
    ),
    "modelopt": pack_modelopt,
}
BLOCKS = {"float-quantized": (1, 0), "fp8": (96, 64), "fbgemm_fp8": (1, 0), "modelopt": (0, 0)}  # outputs and inputs


def settings(form: str, bits: int, group: int, *, symmetric: bool, block: tuple[int, int]) -> dict[str, Any]:
    """`quantization_config`. group: 0 for whole rows."""
    size = group or -1
    if form in ("gptq", "gptq_v2"):
        common = {"bits": bits, "group_size": size, "desc_act": False, "sym": symmetric}
        return {"quant_method": "gptq", "checkpoint_format": form, **common}
    if form == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "version": "gemm", "zero_point": True}
    if form == "torchao":
        return {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}
    if form == "modelopt":
        floats = {"dynamic": False, "num_bits": 8, "type": "float"}
        groups = {"group_0": {"input_activations": floats, "weights": floats, "targets": ["Linear"]}}
        common = {"producer": {"name": "modelopt", "version": "0.47.0"}, "kv_cache_scheme": floats}
        return {"quant_method": form, "quant_algo": "FP8", "config_groups": groups, "ignore": ["lm_head"], **common}
    if form == "fp8":
        common = {"activation_scheme": "dynamic", "fmt": "e4m3", "modules_to_not_convert": ["lm_head"]}
        return {"quant_method": form, "weight_block_size": list(block), **common}
    if form == "fbgemm_fp8":
        return {"quant_method": form, "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or None}
    weights["strategy"] = "group" if group else "channel"
    activations = None
    if form != "compressed-tensors":
        activations = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}
    if form == "float-quantized":
        strategy = {(1, 0): "channel", (0, 0): "tensor"}.get(block, "block")
        weights |= {"num_bits": 8, "type": "float", "strategy": strategy}
        weights["block_structure"] = list(block) if strategy == "block" else None
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": activations}}
    layout = "pack-quantized" if form == "compressed-tensors" else form
    ignored = ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$"]
    common = {"quantization_status": "compressed", "ignore": ignored}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups, **common}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder, and the float32 model it stands for."""

    folder: Path
    reference: Any

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model.safetensors")

    def change(self, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
        """Writes other tensors, and returns the folder's name."""
        save_file(tensors, self.folder / "model.safetensors", metadata)
        return str(self.folder)


_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "intermediate_size": 64}
_SPARSE: dict[str, Any] = SHAPE | _EXPERTS | {"hidden_size": 128, "head_dim": 32, "eos_token_id": None}
MIXTURES: dict[str, Callable[[], Any]] = {
    "mixtral": lambda: transformers.MixtralConfig(**_SPARSE, num_local_experts=4),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**_SPARSE, num_experts=4),
    "glm4_moe": lambda: transformers.Glm4MoeConfig(
        **_SPARSE, n_routed_experts=4, n_group=1, topk_group=1, first_k_dense_replace=1
    ),
    "olmoe": lambda: transformers.OlmoeConfig(**_SPARSE, num_experts=4),
}


def write_checkpoint(
    folder: Path,
    form: str = "gptq",
    name: str = "llama",
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    block: tuple[int, int] | None = None,
    exceptions: Mapping[str, Mapping[str, Any]] = NO_EXCEPTIONS,
    quantization: Mapping[str, Any] = NO_EXCEPTIONS,
    **changes: Any,
) -> Checkpoint:
    """Writes a tiny random model whose layers are quantized, but not its embedding, output layer and routers.

    block: outputs and inputs that share a scale of 8-bit numbers. exceptions: other arguments for the layers whose name
    holds a string; none: they stay plain. quantization: changes of `quantization_config`. changes: of the model.
    """
    if name in MIXTURES:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = transformers.AutoModelForCausalLM.from_config(MIXTURES[name]())
    else:
        model = fresh(name, **(SHAPE | changes)).float()
    model.save_pretrained(folder)
    plain, stored = load_file(folder / "model.safetensors"), dict[str, Tensor]()
    metadata = {"tensor_names": json.dumps(list(plain))}
    common = {"form": form, "bits": bits, "group": group, "symmetric": symmetric}
    for key, parameter in plain.items():
        chosen = next((values for part, values in exceptions.items() if part in key), common)
        if parameter.dim() == 1 or not chosen or any(part in key for part in ("embed_tokens", "lm_head", ".gate.")):
            stored[key] = parameter.to(dtype)
            plain[key] = stored[key].float()
            metadata[key] = json.dumps({"_type": "Tensor"})
            continue
        layer = common | dict(chosen)
        layout = layer["form"]
        matrix: Any
        if layout in BLOCKS:
            matrix = scaled(parameter, block or BLOCKS[layout], dtype if layout == "float-quantized" else torch.float32)
        else:
            matrix = rounded(parameter, layer["bits"], layer["group"], symmetric=layer["symmetric"], dtype=dtype)
            matrix = with_minima(matrix, dtype) if layout == "torchao" else matrix
            data = {"block_size": [1, matrix.group], "shape": list(parameter.shape), "activation_dtype": None}
            names = ["qdata", "scale", "zero_point"]
            metadata[key] = json.dumps({"_type": "Int4Tensor", "_data": data, "_tensor_data_names": names})
        stored |= PACKERS[layout](key.removesuffix(".weight"), matrix, dtype)
        plain[key] = torch.from_numpy(matrix.values())
    save_file(plain, folder / "model.safetensors", {"format": "pt"})
    reference = type(model).from_pretrained(folder, dtype=torch.float32).eval()
    described = settings(form, bits, group, symmetric=symmetric, block=block or BLOCKS.get(form, (0, 0)))
    config = json.loads((folder / "config.json").read_text())
    config |= {"quantization_config": described | dict(quantization), "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = Checkpoint(folder, reference)
    checkpoint.change({key: value.clone() for key, value in stored.items()}, metadata if form == "torchao" else None)
    return checkpoint


def kl(expected: Tensor, actual: Tensor) -> float:
    """Mean divergence of the distributions of these logits, [..., V]."""
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (expected, actual))
    return float((p.exp() * (p - q)).sum(-1).mean())
