"""Forwards of a quantized model by our kernels: time by width, memory, equal bits, and distance from float32.

    python benchmarks/quantized_forwards.py MODEL.gguf
    python benchmarks/quantized_forwards.py MODEL.gguf --beside FOLDER --kl 160 --llama-cpp
    python benchmarks/quantized_forwards.py FOLDER --quantize int4,int8 --activations int8 --beside FOLDER --kl 160

MODEL is a GGUF file, a folder of quantized weights or, with --quantize, a folder of others. Widths take turns, and the
medians are printed. --kl N reads N tokens of the package's prompts and compares the logits with those of the file's
weights in float32 (4 bytes a weight), not quantized at load. Memory is the anonymous memory of the process (Linux)
beyond that before the model and its tokenizer were loaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Annotated

import torch
import typer
from terminal import Count, JsonFile, console, numbers, run, save
from torch import Tensor

from slipstream.bench.llama_cpp import BATCH, LlamaCppModel, gguf_file
from slipstream.checks import check_choice
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.quantized_linear import BITS
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.plain_models import load_unpacked
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import builtin_prompts

MEGA = 1e6
ROLLUP = Path("/proc/self/smaps_rollup")
POLL_SECONDS = 0.005


class Watch(Thread):
    """Records the peak of anonymous memory between `start` and `stop`, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.peak = _anonymous()
        self._stopped = Event()

    def run(self) -> None:
        """Poll until `stop`."""
        while not self._stopped.wait(POLL_SECONDS):
            self.peak = max(self.peak, _anonymous())

    def stop(self) -> int:
        """End, and return how far the peak was above the memory at the start."""
        self._stopped.set()
        self.join()
        return self.peak - self.before


def _anonymous() -> int:
    line = re.search(r"^Anonymous:\s+(\d+) kB", ROLLUP.read_text(encoding="utf-8"), re.M)
    if line is None:
        raise SlipstreamError(f"{ROLLUP} has no line Anonymous; this needs a newer Linux")
    return int(line[1]) * 1024


def _loaded(
    target: str, size: int, options: dict[str, LoadOptions]
) -> tuple[dict[str, Loaded], dict[str, dict[str, object]]]:
    """The model loaded in each way, and the memory that it takes. size: of its file, in bytes."""
    models, figures = dict[str, Loaded](), dict[str, dict[str, object]]()
    for name, chosen in options.items():
        watch = Watch()
        watch.start()
        models[name] = load(target, chosen)
        kept = _anonymous() - watch.before
        peak = watch.stop()
        figures[name] = {"peak": peak / size, "stays": kept / size, "megabytes": kept / MEGA}
        console.print(
            f"{models[name].name}, {models[name].arithmetic or name}: file {size / MEGA:.0f} MB, loading takes "
            f"{peak / MEGA:.0f} MB ({peak / size:.2f}) at most, {kept / MEGA:.0f} MB stay ({kept / size:.2f})"
        )
    return models, figures


def main(
    target: str,
    widths: str = "1,4,8,16",
    turns: Count = 15,
    context: int = 200,
    activations: Annotated[str, typer.Option(help="int8, int15 or both")] = "int8,int15",
    quantize: Annotated[str, typer.Option(help="quantize a folder's weights at load: int4, int8 or both")] = "none",
    beside: Annotated[str | None, typer.Option(help="another model to time, such as the same in bfloat16")] = None,
    kl: Annotated[int, typer.Option(help="tokens to compare with float32; 0: none")] = 0,
    json_file: JsonFile = None,
    llama_cpp: Annotated[
        bool, typer.Option(help="with --kl: also compare llama.cpp on the same file; extra llama")
    ] = False,
    draft_dtype: Annotated[str, typer.Option(help="also the folder's weights as a draft model, int4 or int8")] = "none",
) -> None:
    """Print milliseconds by width, memory over the size of the file, and whether all widths give the same bits."""
    quiet()
    if llama_cpp and not kl:
        raise UsageError("llama_cpp without kl; allowed: both")
    check_choice("draft_dtype", draft_dtype, ("none", *BITS))
    if draft_dtype != "none" and target.endswith(".gguf"):
        raise UsageError(f"draft_dtype={draft_dtype!r} with {target!r}, which keeps its bits; allowed: with a folder")
    file = gguf_file(target, "llama_cpp") if llama_cpp else None
    sizes, size = numbers("--widths", widths), _size(Path(target).expanduser())
    _warm_up()
    options = {
        kind if rounding == "none" else f"{rounding}, {kind}": LoadOptions(activations=kind, rounding=rounding)
        for rounding in quantize.split(",")
        for kind in activations.split(",")
    }
    if draft_dtype != "none":
        options[f"draft model, {draft_dtype}"] = LoadOptions(quantize=draft_dtype)
    models, figures = _loaded(target, size, options)
    if beside is not None:
        models[beside] = load(beside, LoadOptions())
    max_id = min(1000, *(loaded.backend.vocab_size for loaded in models.values()))
    tokens = torch.randint(1, max_id, (1, context + max(32, *sizes)), generator=torch.Generator().manual_seed(1))
    for name, loaded in models.items():
        loaded.backend.attended_unit = EXACT_FIT.attended_unit
        loaded.backend.reserve(1, context + max(32, *sizes))
        _logits(loaded, tokens[:, :context], 0)
        same = all(_same_bits(loaded, tokens, context, width) for width in (*sizes, 3, 5, 32))
        figures.setdefault(name, {})["same_bits"] = same
        console.print(f"{name}: the same bits at every width: {same}")
    for name, by_width in _timed(models, tokens, context, sizes, turns).items():
        first = by_width[sizes[0]]
        times = ", ".join(f"{width}: {ms:.1f} ms ({ms / first:.2f})" for width, ms in by_width.items())
        figures[name]["milliseconds"] = by_width
        console.print(f"{name}: {times}")
    if kl:
        for name, distance in _distances(target, models, kl, file).items():
            figures.setdefault(name, {}).update(kl=distance[0], same_choice=distance[1])
            console.print(f"{name}: KL {distance[0]:.2g}, the likeliest token is the same at {distance[1]:.1%}")
    save(json_file, {"target": target, "file": size, **figures})


def _size(target: Path) -> int:
    """Bytes of a file, or of the weights in a folder."""
    files = [target] if target.suffix == ".gguf" else list(target.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):
        raise UsageError(f"target {str(target)!r}; allowed: a .gguf file, or a folder of safetensors files")
    return sum(file.stat().st_size for file in files)


def _warm_up() -> None:
    """Import modules and allocate what the first product needs, so that they do not count as the model's memory."""
    torch.ones(1) @ torch.ones(1)
    load("smollm2", LoadOptions(fast=False))


def _logits(loaded: Loaded, tokens: Tensor, start: int) -> Tensor:
    return loaded.backend.forward(tokens, [start], first_slot=0, logits=True)[0].float()


def _same_bits(loaded: Loaded, tokens: Tensor, context: int, width: int) -> bool:
    together = _logits(loaded, tokens[:, context : context + width], context)
    alone = [_logits(loaded, tokens[:, i : i + 1], i) for i in range(context, context + width)]
    return torch.equal(together, torch.cat(alone))


def _timed(
    models: dict[str, Loaded], tokens: Tensor, context: int, widths: list[int], turns: int
) -> dict[str, dict[int, float]]:
    """Median milliseconds; models and widths take turns."""
    timings: dict[tuple[str, int], list[float]] = {(name, width): [] for name in models for width in widths}
    for turn in range(turns + 1):
        for (name, width), seconds in timings.items():
            started = perf_counter()
            _logits(models[name], tokens[:, context : context + width], context).argmax(-1).tolist()
            if turn:  # the first turn warms up
                seconds.append(perf_counter() - started)
    return {name: {width: 1e3 * median(timings[name, width]) for width in widths} for name in models}


def _distances(target: str, models: dict[str, Loaded], count: int, file: Path | None) -> dict[str, tuple[float, float]]:
    """Mean KL divergence from the file's weights in float32, and how often the likeliest token is the same.

    file: compared in llama.cpp too, unless None.
    """
    tokenizer = next(iter(models.values())).tokenizer
    if tokenizer is None:
        raise UsageError("--kl needs a file with a tokenizer")
    ids = torch.tensor([tokenizer.encode("\n".join(prompt.prompt for prompt in builtin_prompts()))[:count]])
    reference = load_unpacked(target, LoadOptions("float32", "cpu"))
    with torch.inference_mode():
        expected = torch.log_softmax(reference(input_ids=ids, use_cache=False).logits[0].double(), -1)
    distances = {}
    for name, loaded in models.items():
        loaded.backend.reserve(1, ids.shape[1])
        distances[name] = _distance(expected, _logits(loaded, ids, 0))
    if file is not None:
        distances["llama.cpp"] = _distance(expected, _logits_of_llama_cpp(file, ids[0].tolist()))
    return distances


def _distance(expected: Tensor, logits: Tensor) -> tuple[float, float]:
    log_probs = torch.log_softmax(logits[:, : expected.shape[1]].double(), -1)
    kl = float((expected.exp() * (expected - log_probs)).sum(-1).mean())
    return kl, float((expected.argmax(-1) == log_probs.argmax(-1)).float().mean())


def _logits_of_llama_cpp(file: Path, tokens: list[int]) -> Tensor:
    model = LlamaCppModel(file, torch.get_num_threads())
    parts = [torch.from_numpy(model.forward(tokens[i : i + BATCH], i).copy()) for i in range(0, len(tokens), BATCH)]
    model.close()
    return torch.cat(parts)


if __name__ == "__main__":
    run(main)
