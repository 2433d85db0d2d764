"""Small GGUF files: random blocks of every type, and tiny models written as llama.cpp's converter would."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockPart
from slipstream.models.cpu.structs import BY_NAME, BlockFormat
from tests.support.tiny_models import fresh

ALPHABET = sorted(ByteLevel.alphabet(), key=ord)  # the characters that stand for bytes
# (offset, number) of the float16 numbers in a block; those of other types are at its beginning
HALVES = dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)) | {
    "Q2_K": (80, 2),
    "Q3_K": (108, 1),
    "Q6_K": (208, 1),
    "TQ1_0": (52, 1),
    "TQ2_0": (64, 1),
}
# where scales are bytes: how many, at the beginning of a block, and their usual range
SCALE_BYTES = {"MXFP4": (1, 117, 125), "NVFP4": (4, 1, 10)}
TEMPLATE = "{% for m in messages %}<start>{{ m.role }}\n{{ m.content }}<end>{% endfor %}<start>assistant\n"
TOKENS = 260  # 256 bytes and four more
SHAPE: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "initializer_range": 0.1,
    "head_dim": 64,
}


def random_blocks(block: BlockFormat, rows: int, inputs: int, seed: int, scale: float = 0.01) -> Any:
    """[rows, bytes] uint8: all bits are random, except that scales have about this size."""
    generator = numpy.random.default_rng(seed)
    blocks = generator.integers(0, 256, (rows, inputs // block.size, block.bytes), dtype=numpy.uint8)
    if block.name in SCALE_BYTES:
        count, low, high = SCALE_BYTES[block.name]
        blocks[..., :count] = generator.integers(low, high, (*blocks.shape[:2], count), dtype=numpy.uint8)
        return blocks.reshape(rows, -1)
    offset, count = HALVES.get(block.name, (0, 1))
    halves = (generator.standard_normal((*blocks.shape[:2], count)) * scale).astype(numpy.float16)
    blocks[..., offset : offset + 2 * count] = halves.view(numpy.uint8)
    return blocks.reshape(rows, -1)


def part_of(block: BlockFormat, raw: Any, inputs: int, library: Any) -> BlockPart:
    """A part of these rows of blocks, for the kernels."""
    return BlockPart(block, (len(raw), inputs), lambda first, last: raw[first:last], library)


def dequantized(block: BlockFormat, raw: Any) -> Tensor:
    """The numbers of these blocks according to the gguf package, float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    with numpy.errstate(all="ignore"):
        return torch.from_numpy(dequantize(raw, GGMLQuantizationType(block.number)).astype(numpy.float32))


def write_model(
    path: Path,
    name: str = "llama",
    kinds: Mapping[str, str] | str = "Q8_0",
    more: Callable[[Any], None] = lambda writer: None,
    part_tensors: int = 0,
    tokenizer: Callable[[Any], None] | None = None,
    **changes: Any,
) -> Any:
    """Writes a tiny random model, and returns it with the file's numbers, unless rows are reordered.

    more: adds further values and tensors to the file. part_tensors: the number of tensors per file, if it is split.
    tokenizer: adds the vocabulary; by default a few arbitrary tokens.
    kinds: the type of matrices whose name contains a key; "" is the type of the others. Types that the gguf package
    cannot make of numbers (Q4_K and the like) get random blocks, and zeros if the kernels do not take them either.
    """
    import gguf

    model = fresh(name, **(SHAPE | changes))
    config, kind_of_name = model.config, {"": kinds} if isinstance(kinds, str) else kinds
    writer = gguf.GGUFWriter(path, name, split_max_tensors=part_tensors)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim if hasattr(config, "head_dim") else 64)
    writer.add_key_length(64)
    writer.add_value_length(64)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if name == "gemma3":
        writer.add_rope_freq_base(1_000_000.0)
        writer.add_rope_freq_base_swa(10000.0)
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    else:
        writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    (tokenizer or _add_tokenizer)(writer)
    more(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[name.upper()], config.num_hidden_layers)
    for key, tensor in model.state_dict().items():
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        gguf_name = names.get_name(key, (".weight", ".bias"))
        numbers = tensor.float().numpy()
        if name == "llama" and (".attn_q." in gguf_name or ".attn_k." in gguf_name):
            numbers = _interleaved(numbers, config.num_attention_heads if "attn_q" in gguf_name else 2)
        if name == "gemma3" and "norm" in gguf_name:
            numbers = numbers + 1
        written = _add(
            writer, gguf_name, numbers, next(kind for part, kind in reversed(kind_of_name.items()) if part in gguf_name)
        )
        if name != "llama" and numbers.ndim == 2:
            tensor.copy_(written)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def write_chat_model(path: Path, **shape: Any) -> str:
    """Writes a tiny random model with a chat template; returns its path."""
    tokenizer = byte_level("smollm", {"<start>": 3, "<end>": 3}, bos="<start>", eos="<end>")
    vocabulary = {"vocab_size": 260, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    write_model(path, tokenizer=tokenizer, more=lambda w: w.add_chat_template(TEMPLATE), **vocabulary, **shape)
    return str(path)


def _add(writer: Any, name: str, numbers: Any, kind: str) -> Tensor:
    """Writes a tensor, and returns its numbers."""
    import gguf
    from gguf.quants import dequantize, quantize

    if numbers.ndim == 1:
        writer.add_tensor(name, numbers.astype(numpy.float32))
        return torch.from_numpy(numbers)
    number = gguf.GGMLQuantizationType[kind]
    try:
        raw = quantize(numbers, number)
    except NotImplementedError:
        if kind in BY_NAME:
            seed = len(name)
            size = dequantized(BY_NAME[kind], random_blocks(BY_NAME[kind], *numbers.shape, seed)).std()
            raw = random_blocks(BY_NAME[kind], *numbers.shape, seed, scale=0.01 * 0.03 / float(size))
        else:
            num_values, num_bytes = gguf.GGML_QUANT_SIZES[number]
            raw = numpy.zeros((numbers.shape[0], numbers.shape[1] // num_values * num_bytes), numpy.uint8)
    writer.add_tensor(name, raw, raw_dtype=number)
    return torch.from_numpy(dequantize(raw, number).astype(numpy.float32))


def _interleaved(weight: Any, heads: int) -> Any:
    """Rows of queries and keys in the order of llama.cpp, which interleaves both halves of a head."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def byte_level(
    pre: str | None, added: Mapping[str, int] | None = None, merges: tuple[str, ...] = ("Ċ Ċ", "Ġ Ġ"), **ids: str
) -> Callable[[Any], None]:
    """Writes a vocabulary of byte-level BPE: the 256 bytes, the merged tokens, and `added`.

    added: the types of further tokens. ids: tokens that the metadata name, such as eos="<end>".
    """

    def write(writer: Any) -> None:
        kinds = dict.fromkeys([*ALPHABET, *(merge.replace(" ", "") for merge in merges)], 1) | dict(added or {})
        tokens = list(kinds)
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(tokens)
        writer.add_token_types(list(kinds.values()))
        writer.add_token_merges(list(merges))
        for name, token in ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))

    return write


def _add_tokenizer(writer: Any) -> None:
    letters = [chr(byte) if 33 <= byte < 127 else chr(0x100 + byte) for byte in range(256)]  # any 256 characters
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*letters, "<eos>", "<pad>", "ab", "cd"])
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(256)
    writer.add_pad_token_id(257)
