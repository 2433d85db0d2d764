"""Builds models that compute with blocks, from the tensors of a GGUF file or a quantized checkpoint.

The model is transformers' own, in float32. The kernels' layers replace its linear layers and its embedding; norms and
biases come from the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slipstream.errors import SlipstreamError
from slipstream.models.cpu.block_experts import ExpertArithmetic, ExpertTensors, replace_experts
from slipstream.models.cpu.block_linear import BlockEmbedding, BlockLinear, BlockPart, Table
from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.kernel_libraries import block_kernels, with_remedy
from slipstream.models.cpu.latent_heads import LatentStacks, replace_latent
from slipstream.models.cpu.packed_linear import pack
from slipstream.models.cpu.processor import NoKernelsError
from slipstream.models.decoder.fused_linear import Calls, fuse, linear_calls
from slipstream.models.decoder.plan import LatentPlan
from slipstream.models.weights.model_files import NO_OPTIONS
from slipstream.models.weights.transformers_reader import from_config, quietly, reader_errors

LARGEST_BUFFER = 1 << 28  # numbers; only damaged configurations ask for more


class TensorSource(ExpertTensors, Protocol):
    """Holds a model's tensors, by the names of its parameters."""

    def parts(self, parameter: str, shape: tuple[int, int], library: Any) -> list[BlockPart]:
        """A matrix [shape] for the kernels, in parts whose outputs are concatenated."""

    def table(self, parameter: str, shape: tuple[int, int], library: Any) -> Table:
        """A matrix [shape] that is only used for looking up rows."""

    def latent(self, parameter: str, plan: LatentPlan, library: Any) -> LatentStacks:
        """The matrices of each head in a parameter [plan.shape]."""


def check_kernels() -> None:
    """Raise `NotInBlocksError` where the kernels are not available."""
    try:
        block_kernels()
    except NoKernelsError as error:
        raise NotInBlocksError(with_remedy(error)) from error


def empty_model(
    make_config: Callable[[], Any],
    unreadable: Callable[[Exception], SlipstreamError],
    files: Mapping[str, Any] = NO_OPTIONS,
) -> Any:
    """The model of a configuration, without weights; buffers that no file holds are initialized.

    unreadable: makes the error to raise if transformers cannot build the model; files: see `LoadOptions.files`.
    """
    try:
        with quietly(), torch.device("meta"):
            model = from_config(make_config(), files, dtype=torch.float32)
        for module in model.modules():
            empty = {name: buffer for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta}
            for name, buffer in empty.items():
                if buffer.numel() > LARGEST_BUFFER:
                    sizes = " x ".join(map(str, buffer.shape))
                    raise ValueError(f"by its configuration, {name} of {type(module).__name__} has {sizes} numbers")
                unset = float("nan") if buffer.is_floating_point() else 0  # NaN shows what `_init_weights` does not set
                module._buffers[name] = torch.full_like(buffer, unset, device="cpu")
            if empty:
                model._init_weights(module)
    except reader_errors() as error:
        raise unreadable(error) from error
    if unknown := [name for name, buffer in model.named_buffers() if not bool(torch.isfinite(buffer).all())]:
        raise NotInBlocksError(f"{type(model).__name__} does not initialize its buffer {unknown[0]}")
    return model


def fill(model: Any, tensors: TensorSource, activations: str, calls: Calls | None = None) -> Any:
    """Give an empty model its tensors, in blocks where they are matrices. activations: "int8" or "int15".

    calls: the result of `linear_calls`; None computes it here.

    Raises `NotInBlocksError` where the weights must be unpacked, and `SlipstreamError` where the file is damaged.
    """
    replace_experts(model, lambda _block, _name: tensors, ExpertArithmetic(activations, block_kernels()))
    replace_latent(model, lambda name, _, plan: tensors.latent(f"{name}.weight", plan, block_kernels()), activations)
    builder = _Builder(tensors, model, activations, block_kernels())
    builder.fill_others()
    builder.replace_embeddings()
    builder.replace_linears(calls)
    if unfilled := [name for name, parameter in model.named_parameters() if parameter.device.type == "meta"]:
        raise NotInBlocksError(f"{unfilled[0]} belongs to no layer that is computed with blocks")
    return model.eval()


class _Builder:
    """Puts a file's tensors into a model without weights."""

    def __init__(self, tensors: TensorSource, model: Any, activations: str, library: Any) -> None:
        self._tensors, self._model, self._activations, self._library = tensors, model, activations, library
        self._names = {module: name for name, module in model.named_modules()}
        self._parts: dict[str, list[BlockPart]] = {}

    def fill_others(self) -> None:
        """Fill norms, saved buffers, and whatever else is neither a linear layer nor an embedding."""
        for name, module in self._model.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                continue
            for key, parameter in list(module.named_parameters(recurse=False)):
                values = self._tensors.values(f"{name}.{key}", tuple(parameter.shape))
                setattr(module, key, nn.Parameter(values, requires_grad=False))
            for key, buffer in list(module.named_buffers(recurse=False)):
                if key not in module._non_persistent_buffers_set:
                    values = self._tensors.values(f"{name}.{key}", tuple(buffer.shape))
                    module._buffers[key] = values.to(buffer.dtype)

    def replace_embeddings(self) -> None:
        """Replace all embeddings by tables whose rows are unpacked when they are looked up."""
        tokens = self._model.get_input_embeddings()
        for module in [module for module in self._names if isinstance(module, nn.Embedding)]:
            name, (rows, columns) = self._names[module], module.weight.shape
            if len(signature(module.forward).parameters) != 1:
                raise NotInBlocksError(f"{name} is an embedding whose forward takes more than token ids")
            if module is tokens and self._model.config.tie_word_embeddings:
                table: Table = self._parts_of(name, tokens)[0]
            else:
                table = self._tensors.table(f"{name}.weight", (rows, columns), self._library)
            self._model.set_submodule(name, BlockEmbedding(table, module))

    def replace_linears(self, calls: Calls | None) -> None:
        """Replace all linear layers; those that share an input become one."""
        calls = self._calls() if calls is None else calls
        called = {linear for linear, _ in calls}
        for module in self._model.modules():
            if type(module) is nn.Linear and module not in called:
                raise NotInBlocksError(f"{self._names[module]} is never called as a layer")
        fuse(self._model, calls=calls, join=self._linear)
        pack(self._model, lambda linear: self._linear([linear]))

    def _calls(self) -> Calls:
        """The result of `linear_calls`, with zeros as the outputs of linear layers, which have no weights yet."""
        linears = [module for module in self._model.modules() if type(module) is nn.Linear]
        for linear in linears:
            linear.forward = partial(_zeros, linear.out_features)  # type: ignore[method-assign]
        try:
            return linear_calls(self._model)
        finally:
            for linear in linears:
                del linear.forward

    def _linear(self, linears: list[nn.Linear]) -> nn.Module:
        parts = [part for linear in linears for part in self._parts_of(self._names[linear], linear)]
        biased = [linear for linear in linears if linear.bias is not None]
        biases = [self._tensors.values(f"{self._names[each]}.bias", (each.out_features,)) for each in biased]
        return BlockLinear(parts, torch.cat(biases) if biases else None, self._activations)

    def _parts_of(self, name: str, module: nn.Linear | nn.Embedding) -> list[BlockPart]:
        """The matrix of a layer; the embedding and a tied output layer share one."""
        tied = module is self._model.get_output_embeddings() and self._model.config.tie_word_embeddings
        source = next(iter(self._parts)) if tied else name  # the embedding's, which was made first
        if source not in self._parts:
            rows, columns = module.weight.shape
            self._parts[source] = self._tensors.parts(f"{source}.weight", (rows, columns), self._library)
        return self._parts[source]


def _zeros(outputs: int, x: Tensor) -> Tensor:
    return x.new_zeros(*x.shape[:-1], outputs)
