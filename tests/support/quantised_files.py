"""Tiny checkpoints as GPTQ, AWQ, compressed-tensors and torchao write them, and plain dequantisers, in numpy.

A matrix is rounded to codes, scales and zero points, which each `pack_*` lays out in its own way. `values` computes the
numbers they mean from the codes, not from what was packed.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.support.gguf_files import SHAPE
from tests.support.tiny_models import fresh


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
    # the first GPTQ format cannot store a zero point of 0
    zeros = numpy.full(scales.shape, (top + 1) // 2) if symmetric else (-low / scales).round().clip(1, top)
    codes = (cut / scales[..., None] + zeros[..., None]).round().clip(0, top)
    return Rounded(bits, group, codes.reshape(numbers.shape).astype(numpy.int64), scales, zeros.astype(numpy.int64))


def words(numbers: Any, bits: int) -> Tensor:
    """Packs [rows, n] into [rows, n * bits / 32] int32, the first number in the lowest bits."""
    count = 32 // bits
    padding = -numbers.shape[1] % count
    padded = numpy.pad(numbers, ((0, 0), (0, padding))).astype(numpy.uint32).reshape(len(numbers), -1, count)
    packed = numpy.zeros(padded.shape[:2], numpy.uint32)
    for place in range(count):
        packed |= padded[..., place] << numpy.uint32(bits * place)
    return torch.from_numpy(packed.view(numpy.int32).copy())


def tensor(numbers: Any, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(numpy.ascontiguousarray(numbers)).to(dtype).contiguous()


def pack_gptq(name: str, matrix: Rounded, dtype: torch.dtype, *, less: int = 1) -> dict[str, Tensor]:
    """less: subtracted from zero points; 0 in the second format."""
    groups = torch.arange(matrix.codes.shape[1], dtype=torch.int32) // matrix.group
    return {
        f"{name}.qweight": words(matrix.codes, matrix.bits).T.contiguous(),
        f"{name}.qzeros": words(matrix.zeros.T - less, matrix.bits),
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


PACKERS: dict[str, Callable[..., dict[str, Tensor]]] = {
    "gptq": pack_gptq,
    "gptq_v2": lambda *args: pack_gptq(*args, less=0),
    "awq": pack_awq,
    "compressed-tensors": pack_compressed,
    "torchao": pack_torchao,
}


def settings(form: str, bits: int, group: int, *, symmetric: bool) -> dict[str, Any]:
    """`quantization_config`. group: 0 for whole rows."""
    size = group or -1
    if form in ("gptq", "gptq_v2"):
        common = {"bits": bits, "group_size": size, "desc_act": False, "sym": symmetric}
        return {"quant_method": "gptq", "checkpoint_format": form, **common}
    if form == "awq":
        return {"quant_method": "awq", "bits": bits, "group_size": size, "version": "gemm", "zero_point": True}
    if form == "torchao":
        return {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}}}
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "group_size": group or None}
    weights["strategy"] = "group" if group else "channel"
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    common = {"quantization_status": "compressed", "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, **common}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in a folder, and the float32 model it stands for."""

    folder: Path
    reference: Any

    def tensors(self) -> dict[str, Tensor]:
        from safetensors.torch import load_file

        return load_file(self.folder / "model.safetensors")

    def change(self, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> str:
        """Writes other tensors, and returns the folder's name."""
        save_file(tensors, self.folder / "model.safetensors", metadata)
        return str(self.folder)


def write_checkpoint(
    folder: Path,
    form: str = "gptq",
    name: str = "llama",
    *,
    bits: int = 4,
    group: int = 128,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
    **changes: Any,
) -> Checkpoint:
    """Writes a tiny random model whose layers are quantised, but not its embedding and output layer."""
    model = fresh(name, **(SHAPE | changes)).float()
    stored, metadata, named = dict[str, Tensor](), dict[str, str](), list[str]()
    with torch.no_grad():
        for key, parameter in model.state_dict().items():
            if key == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            named.append(key)
            if parameter.dim() == 1 or "embed_tokens" in key or "lm_head" in key:
                parameter.copy_(parameter.to(dtype))
                stored[key] = parameter.to(dtype)
                metadata[key] = json.dumps({"_type": "Tensor"})
                continue
            matrix = rounded(parameter, bits, group, symmetric=symmetric, dtype=dtype)
            matrix = with_minima(matrix, dtype) if form == "torchao" else matrix
            stored |= PACKERS[form](key.removesuffix(".weight"), matrix, dtype)
            parameter.copy_(torch.from_numpy(matrix.values()))
            data = {"block_size": [1, matrix.group], "shape": list(parameter.shape), "activation_dtype": None}
            names = ["qdata", "scale", "zero_point"]
            metadata[key] = json.dumps({"_type": "Int4Tensor", "_data": data, "_tensor_data_names": names})
    folder.mkdir(exist_ok=True)
    described = model.config.to_dict() | {"quantization_config": settings(form, bits, group, symmetric=symmetric)}
    described |= {"architectures": [type(model).__name__], "dtype": str(dtype).removeprefix("torch.")}
    (folder / "config.json").write_text(json.dumps(described))
    metadata["tensor_names"] = json.dumps(named)
    checkpoint = Checkpoint(folder, model.eval())
    checkpoint.change({key: value.clone() for key, value in stored.items()}, metadata if form == "torchao" else None)
    return checkpoint
