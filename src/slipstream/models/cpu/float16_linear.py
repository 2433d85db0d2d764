"""Float16 models on CPUs: float16 weights in the kernels' panels, and everything else in float32.

Weights stay exact and activations are not rounded, so results are closer to exact arithmetic than PyTorch's float16
products, which are slow on CPUs and round to float16 after every operator. Keys and values stay float16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.cpu.block_linear import BlockEmbedding, BlockLinear, BlockPart
from slipstream.models.cpu.grouped_blocks import NUMBERS
from slipstream.models.cpu.kernel_libraries import block_kernels, with_remedy
from slipstream.models.cpu.packed_linear import without_plain_weights
from slipstream.models.cpu.processor import NoKernelsError
from slipstream.models.cpu.structs import INPUTS

OTHERS = 0.1  # allowed share of weights outside linear layers and embeddings: float32 doubles their memory


def not_in_panels(model: Any) -> str | None:
    """The reason a float16 model cannot use panels; None if it can."""
    try:
        block_kernels()
    except NoKernelsError as error:
        return with_remedy(error)
    if (reason := without_plain_weights(model)) is not None:
        return reason
    of_layers = {id(m.weight) for m in model.modules() if type(m) is nn.Linear or isinstance(m, nn.Embedding)}
    others = sum(parameter.numel() for parameter in model.parameters() if id(parameter) not in of_layers)
    if others > OTHERS * sum(parameter.numel() for parameter in model.parameters()):
        return "most of its weights are in no nn.Linear"
    return None


def in_panels(linear: nn.Linear) -> nn.Module:
    """The replacement of a layer; the layer itself if the kernels do not support it."""
    weight = linear.weight.detach().contiguous()
    if weight.dtype != torch.float16 or linear.in_features % INPUTS:
        return linear

    def rows(first: int, last: int) -> Any:
        return weight[first:last].numpy()

    part = BlockPart(NUMBERS[torch.float16], (linear.out_features, linear.in_features), rows, block_kernels())
    return BlockLinear([part], linear.bias, "float32")


def are_tied(model: Any) -> bool:
    """True if the embedding and the output layer share their weight."""
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    return isinstance(embedding, nn.Embedding) and isinstance(output, nn.Linear) and output.weight is embedding.weight


def widen(model: Any, is_tied: bool) -> None:
    """Convert everything outside panels to float32.

    is_tied: whether the embedding had the weight of the output layer; then it uses that layer's panels.
    """
    output = model.get_output_embeddings()
    if is_tied and isinstance(output, BlockLinear):
        model.set_input_embeddings(BlockEmbedding(output.parts[0], model.get_input_embeddings()))
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None and tensor.dtype == torch.float16:
                    tensors[name] = _wide(tensor)


def _wide(tensor: Tensor) -> Tensor:
    wide = tensor.detach().float()
    return nn.Parameter(wide, requires_grad=False) if isinstance(tensor, nn.Parameter) else wide
