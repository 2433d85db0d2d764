"""Compares the logits of tiny files of every architecture and type with those of transformers on the unpacked weights.

The type is that of all matrices whose rows have whole blocks; others are in Q8_0, and K, IQ and NVFP4 types hold random
blocks. With --llama-cpp, the last columns are the perplexities of 200 random tokens: transformers', and with 8-bit
activations ours and llama.cpp's. Logits are divided by their spread, since random weights make larger ones than trained
weights. llama.cpp ignores the windows of phi3, and of exaone4 without 64 layers, rounds the limits of gpt-oss's YaRN,
and reads deepseek2-joint only with 26 or 27 layers.

Usage, from the root: python -m tests.models.weights.check_types [NAME ...] [--types Q4_K,Q8_0] [--llama-cpp]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from slipstream.errors import SlipstreamError
from slipstream.models.hf.trials import difference
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import GGUFHeader, read_header
from tests.support.gguf_architectures import CASES, Case, architecture, theta, write_case

TYPES = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("MXFP4", "NVFP4", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "TQ1_0", "TQ2_0"),
)
SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 256)
# metadata of these sizes, where the cases have numbers of their own
HALF = {"rope.dimension_count": 32}
WIDE = {"expert_feed_forward_length": 256}
METADATA = {
    **dict.fromkeys(("phi3", "glm4", "qwen35"), HALF),
    **dict.fromkeys(("glm4moe", "qwen35moe"), HALF | WIDE),
    **dict.fromkeys(("qwen2moe", "lfm2moe"), WIDE),
}
DELTA_NET = theta(70000.0, partial_rotary_factor=0.5, mrope_section=[11, 11, 10], mrope_interleaved=True)
SETTINGS = {
    **dict.fromkeys(("qwen35", "qwen35moe"), DELTA_NET),
    "gemma4": {"global_head_dim": 128},
    "granitehybrid-dense": {"shared_intermediate_size": 256},
}
LARGEST = 0.01  # difference that is rounding
IN_BFLOAT16 = 1.25  # the same of files in BF16, whose activations are rounded, too, relative to transformers' rounding
NAMES = [name for name in CASES if name != "phi3-longrope"]  # which has factors for heads of 16 numbers
IDS = torch.randint(3, 250, (1, 200), generator=torch.Generator().manual_seed(6))
SERVER = get_context("forkserver")  # of processes for llama.cpp, which may abort; they share the imports


def main() -> int:
    """Print a row for each file; 1 if one differs by more than rounding."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases of tests/support/gguf_architectures.py")
    parser.add_argument("--types", default=",".join(TYPES), help="types, separated by commas")
    parser.add_argument("--llama-cpp", action="store_true", help="add perplexities; needs llama-cpp-python")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    SERVER.set_forkserver_preload(["slipstream.models.load"])
    heading = ["architecture", "type", "layers", "largest difference", "RMS", "RMS / logits' spread"]
    heading += ["perplexity", "ours", "llama.cpp's"] if options.llama_cpp else []
    print(f"| {' | '.join(heading)} |\n|{'---|' * len(heading)}", flush=True)
    different = 0
    for name in options.names or NAMES:
        for kind in options.types.split(","):
            with tempfile.TemporaryDirectory() as folder:
                cells, is_same = compared(name, kind, Path(folder) / "model.gguf", options.llama_cpp)
            different += not is_same
            print(f"| {' | '.join([name, kind, *cells])} |{'' if is_same else '  <- differs'}", flush=True)
    print(f"{different} differ")
    return int(different > 0)


def wide(name: str) -> Case:
    """The case in sizes that all types and the kernels take; all experts are used, so that no rounding chooses them."""
    case = CASES[name]
    counts = [case.settings.get(field) for field in ("num_experts", "num_local_experts", "n_routed_experts")]
    used = dict.fromkeys(("num_experts_per_tok", "top_k_experts"), next(filter(None, counts), 0))
    used = {field: count for field, count in used.items() if count and field in case.settings}
    used |= dict.fromkeys(("n_group", "topk_group"), 1) if "n_group" in case.settings else {}
    heads = {"head_dim": 64} if case.settings.get("head_dim") == 32 and "kv_lora_rank" not in case.settings else {}
    gemma = SETTINGS["gemma4"] if name.startswith("gemma4") else {}
    return replace(case, settings=case.settings | SIZES | used | heads | gemma | SETTINGS.get(name, {}))


@torch.inference_mode()
def compared(name: str, kind: str, file: Path, with_llama: bool) -> tuple[list[str], bool]:
    """The cells of a file's row, and whether its logits are transformers' up to rounding."""
    write_case(file, architecture(name), wide(name), kind, **METADATA.get(name, {}))
    header = read_header(file)
    expected, activations, largest = unpacked(header, torch.float32), "int15", LARGEST
    if kind == "BF16":
        activations = "auto"
        largest = max(LARGEST, IN_BFLOAT16 * difference(unpacked(header, torch.bfloat16), expected))
    backend: Any = load(str(file), LoadOptions(activations=activations)).backend
    found = logits_of(backend)
    error = found - expected
    how = "in one call" if getattr(backend, "stack", None) is not None else "one by one"
    relative = difference(found, expected)
    cells = [how, f"{error.abs().max():.1e}", f"{error.square().mean().sqrt():.1e}", f"{relative:.1e}"]
    if with_llama:
        cells += perplexities(file, expected)
    return cells, relative <= largest


def unpacked(header: GGUFHeader, dtype: torch.dtype) -> Tensor:
    """transformers' logits."""
    logits: Tensor = dequantized(header, described(header), dtype).eval()(input_ids=IDS).logits[0].float()
    return logits


def logits_of(backend: Any) -> Tensor:
    backend.reserve(1, 512)
    logits: Tensor = backend.forward(IDS, [0], first_slot=0, logits=True)[0].float()
    return logits


def perplexities(file: Path, expected: Tensor) -> list[str]:
    """transformers', ours and llama.cpp's, or why llama.cpp has none."""
    spread = expected.std()
    exact, ours = (
        perplexity(logits / spread) for logits in (expected, logits_of(load(str(file), LoadOptions()).backend))
    )
    cells = [f"{exact:.2f}", f"{ours:.2f} ({ours / exact - 1:+.2%})"]
    try:
        with ProcessPoolExecutor(1, SERVER) as pool:
            theirs = perplexity(pool.submit(logits_of_llama_cpp, file).result() / spread)
    except (SlipstreamError, BrokenProcessPool) as error:
        return [*cells, "aborts" if isinstance(error, BrokenProcessPool) else "not read"]
    return [*cells, f"{theirs:.2f} ({theirs / exact - 1:+.2%})"]


def logits_of_llama_cpp(file: Path) -> Tensor:
    from slipstream.bench.llama_cpp import LlamaCppModel

    return torch.from_numpy(LlamaCppModel(file, 1).forward(IDS[0].tolist(), 0).copy())


def perplexity(logits: Tensor) -> float:
    return float(cross_entropy(logits[:-1], IDS[0, 1:]).exp())


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", GGML_NO_BACKTRACE="1")
    sys.exit(main())
