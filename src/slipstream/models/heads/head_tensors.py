"""Reads and checks the tensors of a draft head's file, in the precision that the user chose.

Every tensor must have the size that config.json says, and every tensor must be used, since the head would need it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.checks import is_whole
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.cpu.huge_pages import HugePages
from slipstream.models.cpu.kernel_libraries import kernels
from slipstream.models.cpu.packed_linear import compressed_or_packed
from slipstream.models.cpu.quantized_linear import BITS, SMALLEST, quantized
from slipstream.models.heads.head_files import WEIGHTS, HeadFiles, weights_file
from slipstream.models.heads.head_kinds import FEATURES, MASK_FEATURE, own_name
from slipstream.models.heads.network import HeadConfig, Linear
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.weights.safetensors_files import dtype_name

EMBEDDING, OUTPUT = "embed_tokens.weight", "lm_head.weight"
# name endings of scales: of 8-bit weights, and of activations, keys and values, which are not rounded here
SCALES = ("weight_scale", "input_scale", "k_scale", "v_scale")
TYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # of weights, as they are read
# tensors to ignore: copies of the target's, those that follow from others, DSpark's acceptance estimates if switched
# off, and P-EAGLE's mask feature, which is read elsewhere
UNREAD = re.compile(
    r"(embed_tokens|lm_head|verifier_\w+)\.weight|[dt]2[dt]|confidence_head\..+|.+\.inv_freq|" + MASK_FEATURE
)


def token_ids_of(files: HeadFiles, tensors: Mapping[str, Tensor], vocab_size: int) -> Tensor | None:
    """The target's id of each draft token, from their offsets `d2t`, in whatever order the trainer ranked them."""
    offsets, output, source = tensors.get("d2t"), tensors.get(OUTPUT), files.source
    if offsets is None:
        count = files.flags.get("draft_vocab_size") if output is None else output.shape[:1].numel()
        if is_whole(count, 1, vocab_size - 1):
            raise SlipstreamError(
                f"draft head {source!r} scores {count} of {vocab_size} tokens, and has no tensor 'd2t', which says "
                "which they are; allowed: heads with 'd2t'"
            )
        return None
    if offsets.dim() != 1 or not len(offsets):
        raise SlipstreamError(f"draft head {source!r}: d2t is {list(offsets.shape)}; allowed: [draft tokens]")
    if offsets.dtype not in (torch.int32, torch.int64):
        type_name = dtype_name(offsets.dtype)
        raise SlipstreamError(f"draft head {source!r}: d2t is of type {type_name}; allowed: int32, int64")
    ids = offsets.long() + torch.arange(len(offsets))
    if len(ids.unique()) < len(ids) or int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise SlipstreamError(
            f"draft head {source!r}: d2t names {len(ids.unique())} tokens for {len(ids)} scores, from {int(ids.min())} "
            f"to {int(ids.max())}; allowed: a token for each, from 0 to {vocab_size - 1}"
        )
    is_drafted = tensors.get("t2d", torch.zeros(0))
    is_as_large = is_drafted.shape == (vocab_size,) and int(is_drafted.count_nonzero()) == len(ids)
    if is_as_large and not bool(is_drafted[ids].all()):
        raise SlipstreamError(f"draft head {source!r}: d2t names other tokens than t2d; allowed: the same")
    return ids


def read_tensors(files: HeadFiles) -> dict[str, Tensor]:
    """A head's tensors by `own_name`; floating-point ones get the type that the user chose, or that of `fc`."""
    from safetensors.torch import load_file

    path, options = weights_file(files.folder, files.options), files.options
    if path is None:
        raise SlipstreamError(f"draft head {files.source!r} has no weights; allowed: {' or '.join(WEIGHTS)}")
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
            is_named = isinstance(loaded, dict) and all(isinstance(name, str) for name in loaded)
            if not is_named or not all(isinstance(part, Tensor) for part in loaded.values()):
                raise ValueError("it holds something other than tensors by name")
    except Exception as error:  # any class, depending on the file's contents
        raise SlipstreamError(
            f"draft head {files.source!r}: {path.name} could not be read: {one_line(error)}"
        ) from error
    named = {own_name(key): part for key, part in loaded.items()}
    for key in [key for key in named if re.match(r"layers\.[1-9]\d*\.hidden_norm\.", key)]:  # of ModelOpt
        named.setdefault(key.replace("hidden_norm", "input_layernorm"), named[key])
        named.pop(key)
    tensors = {key: _unrounded(files.source, named, key) for key in named if not key.endswith(SCALES)}
    dtype = torch.bfloat16
    if FEATURES in tensors:
        check_type(files.source, FEATURES, tensors[FEATURES])
        dtype = tensors[FEATURES].dtype
    if options.draft_type is not None:
        dtype = getattr(torch, options.draft_type)
    return {key: part.to(dtype) if part.dtype in TYPES else part for key, part in tensors.items()}


def _unrounded(source: str, tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor; 8-bit weights [outputs, inputs] are dequantized to bfloat16.

    Their scales are one number for the tensor or for each output.
    """
    scale, tensor = tensors.get(name + "_scale"), tensors[name]
    if scale is None:
        return tensor
    is_alike = tensor.dim() == 2 and tensor.dtype.itemsize == 1 and scale.dtype in TYPES
    if not is_alike or scale.numel() not in (1, len(tensor)):
        raise SlipstreamError(
            f"draft head {source!r}: tensor {name!r} of {dtype_name(tensor.dtype)} {list(tensor.shape)} has scales of "
            f"{dtype_name(scale.dtype)} {list(scale.shape)}; allowed: 8-bit weights with one scale, or one per output"
        )
    return (tensor.float() * scale.float().reshape(-1, 1)).to(torch.bfloat16)


def output_layer(read: TensorReader, config: HeadConfig, target: Loaded) -> Linear:
    """The layer that turns a head's outputs into scores: its own if it brings one, else the target's."""
    if OUTPUT in read.tensors:
        return read.product({OUTPUT: config.draft_vocab_size}, config.hidden_size)
    model = target.backend.model  # type: ignore[attr-defined]
    output, dtype = model.get_output_embeddings(), model.dtype
    token_ids = None if config.token_ids is None else config.token_ids.to(read.device)

    def scores(outputs: Tensor) -> Tensor:
        logits: Tensor = output(outputs.to(dtype))
        return logits if token_ids is None else logits[..., token_ids]

    return scores


@dataclass(frozen=True)
class TensorReader:
    """Reads a head's tensors. names: those that have been read."""

    files: HeadFiles
    tensors: Mapping[str, Tensor]
    device: torch.device
    names: set[str] = field(default_factory=set)

    def __call__(self, name: str, *shape: int) -> Tensor:
        """The tensor of this name. Raises `SlipstreamError` if it is missing or of another shape."""
        tensor = self.tensors.get(name)
        if tensor is None or tuple(tensor.shape) != shape:
            problem = "is missing" if tensor is None else f"is {list(tensor.shape)}"
            raise SlipstreamError(
                f"draft head {self.files.source!r}: tensor {name!r} {problem}; allowed: {list(shape)}"
            )
        check_type(self.files.source, name, tensor)
        self.names.add(name)
        return tensor.to(self.device)

    def product(self, parts: Mapping[str, int], inputs: int) -> Linear:
        """The joint product with the weights of these names, [outputs, inputs] each. parts: outputs by name."""
        weights = [self(name, outputs, inputs) for name, outputs in parts.items()]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        linear = nn.Linear(inputs, len(weight), bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        if weight.device.type != "cpu" or weight.dtype not in (torch.bfloat16, torch.float32):
            return linear
        num_weights = sum(tensor.numel() for tensor in self.tensors.values())
        return converter(num_weights, weight.dtype, self.files.options)(linear)

    def check_all_read(self) -> None:
        """Raise `SlipstreamError` if a tensor was not read: the head would need it."""
        unread = sorted(name for name in self.tensors if name not in self.names and not UNREAD.fullmatch(name))
        if unread:
            raise SlipstreamError(
                f"draft head {self.files.source!r}: its config.json does not account for tensor {unread[0]!r}; "
                f"allowed: the tensors of its kind, such as {min(self.names)!r}"
            )


def check_type(source: str, name: str, tensor: Tensor) -> None:
    """Raise `SlipstreamError` for a tensor whose type weights cannot have."""
    if tensor.dtype not in TYPES:
        type_name, allowed = dtype_name(tensor.dtype), ", ".join(map(dtype_name, TYPES))
        raise SlipstreamError(f"draft head {source!r}: tensor {name!r} is of type {type_name}; allowed: {allowed}")


def converter(num_weights: int, dtype: torch.dtype, options: LoadOptions) -> Callable[[nn.Linear], nn.Module]:
    """The function that converts a head's linear layers on a CPU: to the chosen number of bits, else to the fastest
    format.

    That is 4 bits in a large head, else packed weights: between two drafts the target's weights evict the head's from
    the caches, so a draft must read all of them from memory.
    """
    is_faster = dtype == torch.bfloat16 and num_weights >= SMALLEST
    if options.quantize not in BITS and (options.draft_type or options.fast is False or not is_faster):
        return compressed_or_packed
    return partial(quantized, bits=options.quantize if options.quantize in BITS else "int4", memory=HugePages())


def refuse_draft_dtype(
    source: str, options: LoadOptions, device: torch.device, dtype: torch.dtype | None = None, reason: str | None = None
) -> None:
    """Raise `UsageError` for a precision that a head cannot have.

    dtype: the target's, for heads that must have the same. reason: why layers cannot be quantized, if known.
    """
    if options.quantize in BITS:
        reason = f"it is on {device}" if device.type != "cpu" else reason
        reason = "Slipstream's own kernels are not available" if reason is None and kernels() is None else reason
        if reason is not None:
            raise UsageError(
                f"draft_dtype={options.quantize!r}, but draft head {source!r} cannot be quantized: {reason}; allowed: "
                "'auto', or a type such as 'bfloat16'"
            )
    if dtype is not None and options.draft_type not in (None, dtype_name(dtype)):
        raise UsageError(
            f"draft_dtype={options.draft_type!r}, but draft head {source!r} has its target's type; allowed: "
            f"{dtype_name(dtype)!r}, 'auto', 'int4', 'int8'"
        )


def own_embedding(read: TensorReader, config: HeadConfig) -> nn.Module | None:
    """The head's own embedding, if it brings one."""
    if EMBEDDING not in read.tensors:
        return None
    return nn.Embedding.from_pretrained(read(EMBEDDING, config.vocab_size, config.hidden_size))


def projections(config: HeadConfig, name: str, parts: str) -> dict[str, int]:
    """The number of outputs of a layer's projections, by name. parts: queries, keys or values, as in "qkv"."""
    heads = {"q": config.num_heads, "k": config.num_key_heads, "v": config.num_key_heads}
    return {f"{name}self_attn.{part}_proj.weight": heads[part] * config.head_dim for part in parts}


def after_attention(read: TensorReader, config: HeadConfig, name: str) -> dict[str, Any]:
    """The products and norm after a layer's attention, by the fields of `LayerWeights`. name: "layers.N."."""
    size, middle = config.hidden_size, config.intermediate_size
    return {
        "out": read.product({f"{name}self_attn.o_proj.weight": size}, config.num_heads * config.head_dim),
        "gate_up": read.product({f"{name}mlp.{part}_proj.weight": middle for part in ("gate", "up")}, size),
        "down": read.product({f"{name}mlp.down_proj.weight": size}, middle),
        "middle_norm": read(f"{name}post_attention_layernorm.weight", size),
    }
