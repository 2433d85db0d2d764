"""Compares the logits of tiny files of every architecture and type with those of transformers on the unpacked weights.

The type is that of all matrices whose rows have whole blocks; others are in Q8_0, and K, IQ and NVFP4 types hold random
blocks. Most of a difference comes from the KV cache, which rounds to 16 bits, so the next column is the difference from
transformers with rounded keys and values; that one must be small.

With --llama-cpp, the last columns are the perplexities of 200 random tokens: transformers', and with 8-bit activations
ours and llama.cpp's. Logits are divided by their spread, since random weights make larger ones than trained weights.
llama.cpp also reads a copy of the file with the same weights in F32, whose activations it does not round. There its
perplexity is compared with transformers' after the same changes: it ignores the windows of phi3, and of exaone4 without
64 layers, rounds the limits of gpt-oss's YaRN, ignores the attention factor in olmo3's, and normalizes the latents of
deepseek2 with the model's epsilon.

At the end stands a table of architectures by types. Each cell has both differences in percent of the logits' spread
and, with --llama-cpp, by how many percent our perplexity is larger than llama.cpp's.

Usage, from the root: python -m tests.models.weights.check_types [NAME ...] [--types Q4_K,Q8_0] [--llama-cpp]
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from copy import deepcopy
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from slipstream.errors import SlipstreamError
from slipstream.models.hf.trials import difference
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import ALIGNMENT, GGUFHeader, read_header
from tests.support.gguf_architectures import CASES, Case, architecture, theta, write_case
from tests.support.gguf_mutations import F32, Parts

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
    "deepseek2-joint": {"num_hidden_layers": 26},  # with which llama.cpp reads the joint projection
}
LARGEST = 0.002  # difference that is rounding, per layer
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
    heading = [
        "architecture",
        "type",
        "layers",
        "largest difference",
        "RMS",
        "RMS / logits' spread",
        "with rounded keys and values",
    ]
    heading += ["perplexity", "ours", "llama.cpp's", "llama.cpp's in F32"] if options.llama_cpp else []
    print(*markdown(heading), sep="\n", flush=True)
    names, types, results = options.names or NAMES, options.types.split(","), dict[tuple[str, str], Compared]()
    for name in names:
        for kind in types:
            with tempfile.TemporaryDirectory() as folder:
                result = compared(name, kind, Path(folder) / "model.gguf", options.llama_cpp)
            results[name, kind] = result
            print(
                f"| {' | '.join([name, kind, *result.cells])} |{'' if result.is_same else '  <- differs'}", flush=True
            )
    print("", *markdown(["architecture", *types]), sep="\n")
    for name in names:
        print(f"| {name} | {' | '.join(results[name, kind].summary for kind in types)} |")
    different = sum(not result.is_same for result in results.values())
    print(f"{different} differ")
    return int(different > 0)


def markdown(heading: Sequence[str]) -> list[str]:
    """The first lines of a table."""
    return [f"| {' | '.join(heading)} |", f"|{'---|' * len(heading)}"]


@dataclass
class Compared:
    """The result for a file. cells: of its row; summary: its cell in the table of all files."""

    cells: list[str]
    is_same: bool  # its logits are transformers' up to rounding
    summary: str


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
def compared(name: str, kind: str, file: Path, with_llama: bool) -> Compared:
    """Write a file and compare its logits."""
    write_case(file, architecture(name), wide(name), kind, **METADATA.get(name, {}))
    header = read_header(file)
    model = unpacked(header, torch.float32)
    expected, largest = logits_of_model(model), LARGEST * model.config.num_hidden_layers
    backend: Any = load(str(file), LoadOptions(activations="auto" if kind == "BF16" else "int15")).backend
    found = logits_of(backend)
    error = found - expected
    how = "in one call" if getattr(backend, "stack", None) is not None else "one by one"
    relative = difference(found, expected)
    rounded = difference(found, logits_of_model(model, backend.cache.dtype))
    cells = [
        how,
        f"{error.abs().max():.1e}",
        f"{error.square().mean().sqrt():.1e}",
        f"{relative:.1e}",
        f"{rounded:.1e}",
    ]
    is_same = rounded <= largest
    if kind == "BF16":
        in_bfloat16 = difference(logits_of_model(unpacked(header, torch.bfloat16)), expected)
        is_same = relative <= max(largest, IN_BFLOAT16 * in_bfloat16)
    result = Compared(cells, is_same, f"{relative * 100:.2f} ({rounded * 100:.2f})")
    if with_llama:
        add_perplexities(result, file, expected, logits_of_model(as_llama_cpp(name, model)))
    return result


def unpacked(header: GGUFHeader, dtype: torch.dtype) -> Any:
    """transformers' model."""
    return dequantized(header, described(header), dtype).eval()


def as_llama_cpp(name: str, model: Any) -> Any:
    """The model, or one with the same weights that computes what llama.cpp does."""
    config = deepcopy(model.config)
    if name in ("phi3", "exaone4"):
        config.update({"sliding_window": None, "layer_types": ["full_attention"] * config.num_hidden_layers})
    elif name == "gpt-oss":
        config.rope_parameters["truncate"] = True
    elif name == "olmo2-olmo3":
        config.rope_parameters["full_attention"]["attention_factor"] = None
    elif not name.startswith("deepseek2"):
        return model
    other = type(model)(config).eval()
    other.load_state_dict(model.state_dict())
    for module_name, module in other.named_modules():
        if module_name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config.rms_norm_eps
    return other


def logits_of_model(model: Any, dtype: torch.dtype | None = None) -> Tensor:
    """transformers' logits. dtype: to which keys and values are rounded."""
    cache = DynamicCache(config=model.config)
    if dtype is not None:
        update = cache.update
        cache.update = lambda *states, **options: update(  # type: ignore[method-assign]
            *(x.to(dtype).to(x.dtype) if isinstance(x, Tensor) else x for x in states), **options
        )
    logits: Tensor = model(input_ids=IDS, past_key_values=cache).logits[0].float()
    return logits


def logits_of(backend: Any) -> Tensor:
    backend.reserve(1, 512)
    logits: Tensor = backend.forward(IDS, [0], first_slot=0, logits=True)[0].float()
    return logits


def add_perplexities(result: Compared, file: Path, expected: Tensor, as_theirs: Tensor) -> None:
    """Add transformers', ours and llama.cpp's, or why llama.cpp has none. as_theirs: logits of `as_llama_cpp`."""
    spread = expected.std()
    found = logits_of(load(str(file), LoadOptions()).backend)
    exact, ours, known = (perplexity(logits / spread) for logits in (expected, found, as_theirs))
    result.cells += [f"{exact:.2f}", f"{ours:.2f} ({ours / exact - 1:+.2%})"]
    try:
        with ProcessPoolExecutor(1, SERVER) as pool:
            theirs, in_float32 = (
                perplexity(logits / spread) for logits in pool.map(logits_of_llama_cpp, (file, unpacked_file(file)))
            )
    except (SlipstreamError, BrokenProcessPool) as error:
        why = "aborts" if isinstance(error, BrokenProcessPool) else "not read"
        result.cells += [why, why]
        result.summary += f", {why}"
        return
    result.cells += [f"{theirs:.2f} ({theirs / exact - 1:+.2%})", f"{in_float32:.2f} ({in_float32 / known - 1:+.2%})"]
    result.summary += f", {(ours / theirs - 1) * 100:+.1f}"


def unpacked_file(file: Path) -> Path:
    """A copy whose tensors the gguf package has unpacked to F32."""
    from gguf import GGUFReader, dequantize

    parts, written = Parts.of(file), file.with_suffix(".f32.gguf")
    parts.data.clear()
    tensors = {tensor.name.encode(): tensor for tensor in GGUFReader(file).tensors}
    for tensor in parts.tensors:
        numbers = dequantize(tensors[tensor.name].data, tensors[tensor.name].tensor_type).astype("float32")
        tensor.kind, tensor.offset = F32, len(parts.data)
        parts.data += numbers.tobytes() + bytes(-numbers.nbytes % ALIGNMENT)
    written.write_bytes(parts.written())
    return written


def logits_of_llama_cpp(file: Path) -> Tensor:
    from slipstream.bench.llama_cpp import LlamaCppModel

    return torch.from_numpy(LlamaCppModel(file, 1).forward(IDS[0].tolist(), 0).copy())


def perplexity(logits: Tensor) -> float:
    return float(cross_entropy(logits[:-1], IDS[0, 1:]).exp())


if __name__ == "__main__":
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", GGML_NO_BACKTRACE="1")
    sys.exit(main())
