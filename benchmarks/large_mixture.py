"""Runs a random mixture of experts in less memory than it takes, and compares texts, times and memory.

    python benchmarks/large_mixture.py FOLDER [--gigabytes 8] [--memory 4] [--tokens 16] [--whole]

Writes FOLDER/large.gguf in the shape of Qwen3-30B-A3B with fewer layers (Q4_K and Q6_K), and runs it in processes of
their own with SLIPSTREAM_MEMORY: twice with a panel file, which takes as much space again, then without room for one,
so that experts are packed when they are used. --whole adds a run without a limit. Prints a line of JSON for
each: seconds to load and per token, memory at the end (anonymous, and of files, which the system can take back), and
whether the text is that of the first run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Any

from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.kernel_libraries import block_kernels, kernels

HIDDEN, INNER, EXPERTS, USED, HEADS, KEY_HEADS, HEAD = 2048, 768, 128, 8, 32, 4, 128
LETTERS = 256
BLOCKS = {"Q4_K": (144, 0, 2), "Q6_K": (210, 208, 1)}  # bytes; place and number of the float16 scales
LAYER_BYTES = EXPERTS * HIDDEN * INNER // 256 * (2 * 144 + 210)
LARGEST_FILE = 1 << 20  # bytes: of the run without room on the disk
PROMPT = "The memory of this machine"


def main() -> None:
    """Write the file, run it and print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--memory", type=float, default=4, help="gigabytes of memory to count on")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--whole", action="store_true", help="run it without a limit, too")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    file = arguments.folder / "large.gguf"
    if arguments.run:
        print(json.dumps(measured(file, arguments.tokens)))
        return
    arguments.folder.mkdir(parents=True, exist_ok=True)
    block_kernels()  # compiled once, and before files are limited
    kernels()
    if not file.exists():
        write(file, max(1, round(arguments.gigabytes * 1e9 / LAYER_BYTES)))
    runs = {"panel file, first start": {}, "panel file, second start": {}, "experts as they are used": {"limit": "1"}}
    if arguments.whole:
        runs["without a limit"] = {"SLIPSTREAM_MEMORY": "1000"}
    texts = []
    for name, settings in runs.items():
        environment = os.environ | {"SLIPSTREAM_MEMORY": str(arguments.memory)} | settings
        # a cache folder of its own, with the kernels that are compiled already
        cache = arguments.folder / ("cache-full" if "limit" in settings else "cache")
        if not cache.exists():
            cache.mkdir()
            (cache / "kernels").symlink_to(cache_folder() / "kernels", target_is_directory=True)
        environment["SLIPSTREAM_MODELS"] = str(cache)
        command = [sys.executable, __file__, str(arguments.folder), "--tokens", str(arguments.tokens), "--run"]
        finished = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, encoding="utf-8")
        result = json.loads(finished.stdout.splitlines()[-1])
        texts.append(result.pop("text"))
        print(json.dumps({"run": name, **result, "same_text": texts[-1] == texts[0]}), flush=True)


def measured(file: Path, tokens: int) -> dict[str, Any]:
    """Load the file in this process and continue the prompt."""
    from slipstream import SamplingParams, SpeculativeDecoder

    if "limit" in os.environ:
        resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, LARGEST_FILE))
    started = perf_counter()
    decoder = SpeculativeDecoder(str(file), drafter="none")
    loaded = perf_counter()
    result = decoder.generate(PROMPT, SamplingParams(max_tokens=tokens, ignore_eos=True), chat=False)
    seconds = perf_counter() - loaded
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines())
    memory = {name: int(status[name].split()[0]) * 1024 / 1e9 for name in ("RssAnon", "RssFile")}
    return {
        "load_seconds": round(loaded - started, 2),
        "seconds_per_token": round(seconds / tokens, 3),
        "anonymous_gigabytes": round(memory["RssAnon"], 2),
        "file_gigabytes": round(memory["RssFile"], 2),
        "text": result.token_ids,
    }


def write(file: Path, layers: int) -> None:
    """A random model, written tensor by tensor."""
    import gguf
    import numpy

    writer = gguf.GGUFWriter(file, "qwen3moe")
    for key, value in {
        **{"block_count": layers, "context_length": 4096, "embedding_length": HIDDEN, "feed_forward_length": INNER},
        **{"attention.head_count": HEADS, "attention.head_count_kv": KEY_HEADS, "attention.key_length": HEAD},
        **{"attention.value_length": HEAD, "expert_count": EXPERTS, "expert_used_count": USED},
        "expert_feed_forward_length": INNER,
    }.items():
        writer.add_uint32(f"qwen3moe.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    letters = [chr(byte) if 33 <= byte < 127 else chr(0x100 + byte) for byte in range(LETTERS)]
    writer.add_token_list([*letters, "<end>", "<pad>", "ab", "cd"])
    writer.add_token_types([1] * LETTERS + [3, 3, 1, 1])
    writer.add_token_merges(["a b", "c d"])
    writer.add_eos_token_id(LETTERS)
    generator = numpy.random.default_rng(7)

    def numbers(name: str, shape: tuple[int, ...], kind: str) -> Any:
        if kind == "F32":
            scale = 0.5 if "ffn_gate_inp" in name else 0.0
            return (scale * generator.standard_normal(shape) + ("norm" in name)).astype(numpy.float32)
        size, place, count = BLOCKS[kind]
        blocks = generator.integers(0, 256, (numpy.prod(shape) // 256, size), dtype=numpy.uint8)
        scales = (generator.standard_normal((len(blocks), count)) * 4e-4).astype(numpy.float16)
        blocks[:, place : place + 2 * count] = scales.view(numpy.uint8)
        return blocks.reshape(*shape[:-1], -1)

    entries = list(tensors(layers))
    for name, shape, kind in entries:
        size = int(numpy.prod(shape))
        num_bytes = 4 * size if kind == "F32" else size // 256 * BLOCKS[kind][0]
        raw = None if kind == "F32" else gguf.GGMLQuantizationType[kind]
        sizes = shape if raw is None else (*shape[:-1], shape[-1] // 256 * BLOCKS[kind][0])
        writer.add_tensor_info(name, sizes, numpy.dtype("f4" if raw is None else "u1"), num_bytes, raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for entry in entries:
        writer.write_tensor_data(numbers(*entry))
    writer.close()


def tensors(layers: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    """The name, the shape and the type of each tensor."""
    vocabulary = LETTERS + 4
    yield "token_embd.weight", (vocabulary, HIDDEN), "Q4_K"
    yield "output_norm.weight", (HIDDEN,), "F32"
    yield "output.weight", (vocabulary, HIDDEN), "Q6_K"
    for layer in range(layers):
        prefix = f"blk.{layer}."
        for norm, size in (("attn_norm", HIDDEN), ("ffn_norm", HIDDEN), ("attn_q_norm", HEAD), ("attn_k_norm", HEAD)):
            yield f"{prefix}{norm}.weight", (size,), "F32"
        for name, heads in (("attn_q", HEADS), ("attn_k", KEY_HEADS), ("attn_v", KEY_HEADS)):
            yield f"{prefix}{name}.weight", (heads * HEAD, HIDDEN), "Q4_K"
        yield f"{prefix}attn_output.weight", (HIDDEN, HEADS * HEAD), "Q4_K"
        yield f"{prefix}ffn_gate_inp.weight", (EXPERTS, HIDDEN), "F32"
        for name in ("ffn_gate_exps", "ffn_up_exps"):
            yield f"{prefix}{name}.weight", (EXPERTS, INNER, HIDDEN), "Q4_K"
        yield f"{prefix}ffn_down_exps.weight", (EXPERTS, HIDDEN, INNER), "Q6_K"


if __name__ == "__main__":
    main()
