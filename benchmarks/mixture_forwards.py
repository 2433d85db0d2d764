"""Counts forwards of a mixture or hybrid that give a token other bits than it has alone, and writes random mixtures.

    python benchmarks/mixture_forwards.py tiny.gguf --random tiny --forwards 3000
    python benchmarks/mixture_forwards.py moe.gguf --random 30b-a3b --layers 4 --forwards 0     # a file to time

Each forward has a random width up to 64, up to 8 rows and up to 4 threads, by each set of instructions in turn. The
reference is the same text read token by token by the first set. As the negative control, experts are added in a random
order, as if each were added when it is done, and the same forward is computed twice; in models with recurrent layers,
their kept states and inputs become one part in 128 larger before a forward.
"""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy
import torch
import typer
from random_pair import write_tokenizer
from terminal import JsonFile, console, run, save
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.cpu.block_experts import BlockExperts, experts_of
from slipstream.models.cpu.kernel_libraries import address
from slipstream.models.cpu.processor import ISA, NEEDED, processor
from slipstream.models.cpu.structs import ExpertSetStruct, ExpertsStruct
from slipstream.models.decoder.fused_layer import is_fused
from slipstream.models.decoder.recurrent_mixers import recurrent_layers
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.model_files import quiet

WIDTHS, ROWS, THREADS, TEXT = 64, 8, 4, 160
GROWTH = 129 / 128  # of what recurrent layers keep, in their negative control
SCALE = 1e-4  # of a block: weights then have a standard deviation of about 0.02


@dataclass(frozen=True)
class Shape:
    """Sizes of a model of the architecture qwen3moe."""

    hidden: int
    heads: int
    key_heads: int
    size: int
    experts: int
    used: int
    inner: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(256, 4, 2, 64, 16, 3, 256, 512),
    "30b-a3b": Shape(2048, 32, 4, 128, 128, 8, 768, 151936),  # Qwen3-30B-A3B
}


def write(file: Path, shape: Shape, layers: int) -> None:
    """Write a file with random weights in the types of a Q4_K_M."""
    import gguf

    rng, kinds = numpy.random.default_rng(1), gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(file, "qwen3moe", use_temp_file=True)  # some are larger than the memory
    writer.add_context_length(32768)
    writer.add_embedding_length(shape.hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(shape.inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.key_heads)
    writer.add_key_length(shape.size)
    writer.add_value_length(shape.size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_expert_count(shape.experts)
    writer.add_expert_used_count(shape.used)
    writer.add_expert_feed_forward_length(shape.inner)
    write_tokenizer(writer, shape.vocabulary)
    for name, sizes, kind in tensors(shape, layers):
        if kind == "F32":
            numbers = rng.normal(0, 0.02, sizes) if len(sizes) > 1 else numpy.ones(sizes)
            writer.add_tensor(name, numbers.astype(numpy.float32))
        else:
            writer.add_tensor(name, random_blocks(rng, kind, sizes), raw_dtype=kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensors(shape: Shape, layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """Names, sizes and types."""
    hidden, queries, keys = shape.hidden, shape.heads * shape.size, shape.key_heads * shape.size
    yield "token_embd.weight", (shape.vocabulary, hidden), "Q4_K"
    yield "output.weight", (shape.vocabulary, hidden), "Q6_K"
    yield "output_norm.weight", (hidden,), "F32"
    for i in range(layers):
        more = "Q6_K" if i % 2 else "Q4_K"
        for name, sizes, kind in (
            ("attn_norm", (hidden,), "F32"),
            ("attn_q", (queries, hidden), "Q4_K"),
            ("attn_k", (keys, hidden), "Q4_K"),
            ("attn_v", (keys, hidden), more),
            ("attn_q_norm", (shape.size,), "F32"),
            ("attn_k_norm", (shape.size,), "F32"),
            ("attn_output", (hidden, queries), "Q4_K"),
            ("ffn_norm", (hidden,), "F32"),
            ("ffn_gate_inp", (shape.experts, hidden), "F32"),
            ("ffn_gate_exps", (shape.experts, shape.inner, hidden), "Q4_K"),
            ("ffn_up_exps", (shape.experts, shape.inner, hidden), "Q4_K"),
            ("ffn_down_exps", (shape.experts, hidden, shape.inner), more),
        ):
            yield f"blk.{i}.{name}.weight", sizes, kind


def random_blocks(rng: Any, kind: str, sizes: tuple[int, ...]) -> Any:
    """Blocks of random codes; those of Q4_K begin with the scale and the minimum, those of Q6_K end with the scale."""
    *outer, inputs = sizes
    size = {"Q4_K": 144, "Q6_K": 210}[kind]
    blocks = rng.integers(0, 256, (*outer, inputs // 256, size), dtype=numpy.uint8)
    if kind == "Q4_K":
        blocks[..., :4] = numpy.array([SCALE, 7.5 * SCALE], numpy.float16).view(numpy.uint8)
    else:
        blocks[..., -2:] = numpy.array([SCALE / 8], numpy.float16).view(numpy.uint8)
    return blocks.reshape(*outer, -1)


class RandomOrder:
    """Replaces a block's `sum_of`: adds the chosen experts in a random order, all with the same weight."""

    def __init__(self, block: BlockExperts) -> None:
        self._of, self._library = block.sum_of, block._library
        self._block = block
        self._single = ExpertsStruct.from_buffer_copy(block.struct)
        self._single.used = self._single.normalizes = self._single.num_forced = 1
        self._single.shared = ExpertSetStruct()

    def __call__(self, x: Tensor, routed: Tensor | None = None) -> Tensor:
        """x: [..., hidden] -> [..., hidden]."""
        self._of(x, routed)
        rows, chosen = x.reshape(-1, x.shape[-1]).float().contiguous(), self._block.chosen
        total, out, experts = torch.zeros_like(rows), torch.empty_like(rows), chosen.unique().tolist()
        scratch = torch.empty(
            self._library.experts_scratch(ctypes.addressof(self._single), len(rows)), dtype=torch.uint8
        )
        for expert in random.sample(experts, len(experts)):
            forced = torch.tensor([expert], dtype=torch.int32)
            self._single.forced = address(forced)
            arrays = address(rows), None, len(rows), None, address(out), address(scratch)
            self._library.multiply_experts(ctypes.addressof(self._single), *arrays)
            total += torch.where((chosen == expert).any(-1, keepdim=True), out, 0) / chosen.shape[1]
        return total.view(x.shape).to(x.dtype)


class Forwards:
    """Random forwards of a text that every slot holds."""

    def __init__(self, backend: Any, text: Tensor) -> None:
        self._backend, self._text = backend, text
        backend.reserve(ROWS, len(text))
        for slot in range(ROWS):
            backend.forward(text[None], [0], first_slot=slot, logits=False)

    def one_by_one(self) -> Tensor:
        """Logits [T, V] of the text, token by token."""
        tokens = self._text[:, None, None]
        return torch.cat([self._backend.forward(t, [i], first_slot=0, logits=True)[0] for i, t in enumerate(tokens)])

    def random(self, grown: bool = False) -> tuple[Tensor, Tensor]:
        """Logits [B, W, V] of a random forward, and the positions [B, W] of its tokens. grown: what layers keep."""
        width, rows = random.randint(1, WIDTHS), random.randint(1, ROWS)
        torch.set_num_threads(random.randint(1, THREADS))
        starts = [random.randint(1, len(self._text) - width) for _ in range(rows)]
        positions = torch.tensor(starts)[:, None] + torch.arange(width)
        return self.at(positions, grown), positions

    def at(self, positions: Tensor, grown: bool = False) -> Tensor:
        """Logits [B, W, V] of the tokens at these positions."""
        starts = positions[:, 0].tolist()
        if self._backend.cache.states is not None:  # recurrent layers go on from where a slot's text ends
            for slot, start in enumerate(starts):
                self._backend.forward(self._text[None, :start], [0], first_slot=slot, logits=False)
            for index in recurrent_layers(self._backend.model) if grown else ():
                memory = self._backend.cache.states.memory(index)
                memory.states *= GROWTH
                memory.inputs *= GROWTH
        logits: Tensor = self._backend.forward(self._text[positions], starts, first_slot=0, logits=True)
        return logits


def main(
    file: Path,
    shape_of: Annotated[str | None, typer.Option("--random", help=f"write FILE first: {', '.join(SHAPES)}")] = None,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    forwards: Annotated[int, typer.Option(min=0, help="of each set of instructions")] = 1000,
    instructions: Annotated[str, typer.Option(help="separated by commas; by default all that this processor has")] = "",
    control: Annotated[int, typer.Option(min=0, help="forwards of the negative control")] = 50,
    json_file: JsonFile = None,
) -> None:
    """Print how many forwards differ for each set of instructions, and of the negative control."""
    quiet()
    if shape_of is not None:
        if shape_of not in SHAPES:
            raise UsageError(f"--random {shape_of!r}; allowed: {', '.join(SHAPES)}")
        write(file, SHAPES[shape_of], layers)
    if not forwards:
        return
    here = [name for name, flags in NEEDED.items() if set(flags) <= processor().flags]
    differing, reference, threads = dict[str, int](), torch.empty(0), torch.get_num_threads()
    random.seed(1)
    for name in instructions.split(",") if instructions else here:
        os.environ[ISA] = name
        loaded: Any = load(str(file), LoadOptions())
        if loaded.backend.stack is None:
            raise UsageError(f"{str(file)!r} does not run in one call; allowed: a model that does")
        generator = torch.Generator().manual_seed(1)
        text = torch.randint(0, loaded.backend.vocab_size - 1, (TEXT,), generator=generator)
        tried = Forwards(loaded.backend, text)
        if not len(reference):
            reference = tried.one_by_one()
        computed = (tried.random() for _ in range(forwards))
        differing[name] = sum(not torch.equal(logits, reference[positions]) for logits, positions in computed)
        console.print(f"{name}: {differing[name]} of {forwards} forwards differ")
    controls = {}
    if loaded.backend.cache.states is not None:
        computed = (tried.random(grown=True) for _ in range(control))
        grown = sum(not torch.equal(logits, reference[positions]) for logits, positions in computed)
        console.print(f"control, larger states and inputs: {grown} of {control} forwards differ")
        controls["control_of_states"] = [grown, control]
    if blocks := experts_of(loaded.model):
        again = in_random_order(loaded, blocks, tried, control)
        console.print(f"control, experts in a random order: {again} of {control} forwards differ from themselves")
        controls["control"] = [again, control]
    torch.set_num_threads(threads)
    save(json_file, {"file": str(file), "forwards": forwards, "differ": differing, **controls})


def in_random_order(loaded: Any, blocks: list[BlockExperts], tried: Forwards, count: int) -> int:
    """The number of forwards, of `count`, that differ when experts are added in another order."""
    loaded.backend.stack = None
    for block in blocks:
        block.sum_of = RandomOrder(block)  # type: ignore[method-assign]
    for layer in filter(is_fused, loaded.model.modules()):
        layer.forward = layer.forward.with_ops(layer.forward.plain)
    forwards = (tried.random() for _ in range(count))
    return sum(not torch.equal(logits, tried.at(positions)) for logits, positions in forwards)


if __name__ == "__main__":
    run(main)
