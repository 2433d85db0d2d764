"""Forwards of a quantised model in its own blocks: time by width, memory, bits and distance from the file's numbers.

    python benchmarks/quantised_forwards.py MODEL.gguf
    python benchmarks/quantised_forwards.py MODEL.gguf --beside FOLDER --kl 160 --llama-cpp
    python benchmarks/quantised_forwards.py FOLDER --quantize int4,int8 --activations int8 --beside FOLDER --kl 160

Widths take turns; medians count. MODEL: a GGUF file or a folder of quantised weights, or, with --quantize, of others.
beside: another model to time, such as the same one unpacked to bfloat16. draft_dtype: the folder's weights as a draft
model has them too, "int4" or "int8"; with --quantize int4 that compares the two ways to compute with 4 bits. kl: so
many tokens of the package's own prompts through the model in float32 (4 bytes a weight), before it is quantised at
load; --llama-cpp (extra `llama`) compares llama.cpp's numbers with those too. Memory is the process's anonymous memory
(Linux) on top of what it was before the model and its tokenizer were loaded.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from threading import Event, Thread
from time import perf_counter
from typing import Annotated

import torch
import typer
from terminal import Count, JsonFile, console, numbers, run
from torch import Tensor

from slipstream.bench.llama_cpp import BATCH, LlamaCppModel, gguf_file
from slipstream.checks import check_choice
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.quantised_linear import BITS
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.plain_models import load_unpacked
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import builtin_prompts

MEGA = 1e6
ROLLUP = Path("/proc/self/smaps_rollup")
EVERY_S = 0.005


class Watch(Thread):
    """Keeps the most anonymous memory, in bytes, that was seen between `start` and `stop`."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = _anonymous()
        self._over = Event()

    def run(self) -> None:
        """Until `stop`."""
        while not self._over.wait(EVERY_S):
            self.most = max(self.most, _anonymous())

    def stop(self) -> int:
        """What came on top of the memory at the start, at most."""
        self._over.set()
        self.join()
        return self.most - self.before


def _anonymous() -> int:
    found = re.search(r"^Anonymous:\s+(\d+) kB", ROLLUP.read_text(encoding="utf-8"), re.M)
    if found is None:
        raise SlipstreamError(f"{ROLLUP} does not say how much is anonymous; this needs a newer Linux")
    return int(found[1]) * 1024


def main(
    target: str,
    widths: str = "1,4,8,16",
    turns: Count = 15,
    context: int = 200,
    activations: str = "int8,int15",
    quantize: str = "none",
    beside: Annotated[str | None, typer.Option()] = None,
    kl: int = 0,
    json_file: JsonFile = None,
    llama_cpp: Annotated[bool, typer.Option(help="with --kl: that of llama.cpp on the same file too")] = False,
    draft_dtype: str = "none",
) -> None:
    """Print milliseconds and ratios per width, memory over the size of the file, and whether bits are the same."""
    quiet()
    if llama_cpp and not kl:
        raise UsageError("llama_cpp without kl; allowed: both")
    check_choice("draft_dtype", draft_dtype, ("none", *BITS))
    if draft_dtype != "none" and target.endswith(".gguf"):
        raise UsageError(f"draft_dtype={draft_dtype!r} with {target!r}, which keeps its bits; allowed: with a folder")
    file = gguf_file(target, "llama_cpp") if llama_cpp else None
    sizes, size = numbers("--widths", widths), _size(Path(target).expanduser())
    _warm_up()
    models, found = dict[str, Loaded](), dict[str, dict[str, object]]()
    options = {
        kind if rounding == "none" else f"{rounding}, {kind}": LoadOptions(activations=kind, rounding=rounding)
        for rounding in quantize.split(",")
        for kind in activations.split(",")
    }
    if draft_dtype != "none":
        options[f"draft model, {draft_dtype}"] = LoadOptions(quantise=draft_dtype)
    for name, chosen in options.items():
        watch = Watch()
        watch.start()
        models[name] = load(target, chosen)
        stays = _anonymous() - watch.before
        peak = watch.stop()
        found[name] = {"peak": peak / size, "stays": stays / size, "megabytes": stays / MEGA}
        console.print(
            f"{models[name].name}, {models[name].arithmetic or name}: file {size / MEGA:.0f} MB, loading takes "
            f"{peak / MEGA:.0f} MB ({peak / size:.2f}) at most, {stays / MEGA:.0f} MB stay ({stays / size:.2f})"
        )
    if beside is not None:
        models[beside] = load(beside, LoadOptions())
    most = min(1000, *(loaded.backend.vocab_size for loaded in models.values()))
    tokens = torch.randint(1, most, (1, context + max(32, *sizes)), generator=torch.Generator().manual_seed(1))
    for name, loaded in models.items():
        loaded.backend.attended_unit = EXACT_FIT.attended_unit
        loaded.backend.reserve(1, context + max(32, *sizes))
        _logits(loaded, tokens[:, :context], 0)
        same = all(_same_bits(loaded, tokens, context, width) for width in (*sizes, 3, 5, 32))
        found.setdefault(name, {})["same_bits"] = same
        console.print(f"{name}: the same bits at every width: {same}")
    for name, by_width in _timed(models, tokens, context, sizes, turns).items():
        first = by_width[sizes[0]]
        shown = ", ".join(f"{width}: {ms:.1f} ms ({ms / first:.2f})" for width, ms in by_width.items())
        found[name]["milliseconds"] = by_width
        console.print(f"{name}: {shown}")
    if kl:
        for name, distance in _distances(target, models, kl, file).items():
            found.setdefault(name, {}).update(kl=distance[0], same_choice=distance[1])
            console.print(f"{name}: KL {distance[0]:.2g}, the likeliest token is the same at {distance[1]:.1%}")
    if json_file is not None:
        json_file.write_text(json.dumps({"target": target, "file": size, **found}) + "\n", encoding="utf-8")


def _size(target: Path) -> int:
    """Bytes of a file, or of a folder's weights."""
    files = [target] if target.suffix == ".gguf" else list(target.glob("*.safetensors"))
    if not files or not all(file.is_file() for file in files):
        raise UsageError(f"target {str(target)!r}; allowed: a .gguf file, or a folder of safetensors files")
    return sum(file.stat().st_size for file in files)


def _warm_up() -> None:
    """Load what is not the model's: modules, and what the first product needs."""
    torch.ones(1) @ torch.ones(1)
    load("smollm2", LoadOptions(fast=False))


def _logits(loaded: Loaded, tokens: Tensor, start: int) -> Tensor:
    return loaded.backend.forward(tokens, [start], first_slot=0, logits=True)[0].float()


def _same_bits(loaded: Loaded, tokens: Tensor, context: int, width: int) -> bool:
    together = _logits(loaded, tokens[:, context : context + width], context)
    alone = [_logits(loaded, tokens[:, at : at + 1], at) for at in range(context, context + width)]
    return torch.equal(together, torch.cat(alone))


def _timed(
    models: dict[str, Loaded], tokens: Tensor, context: int, widths: list[int], turns: int
) -> dict[str, dict[int, float]]:
    """Median milliseconds; models and widths take turns."""
    taken: dict[tuple[str, int], list[float]] = {(name, width): [] for name in models for width in widths}
    for turn in range(turns + 1):
        for (name, width), seconds in taken.items():
            started = perf_counter()
            _logits(models[name], tokens[:, context : context + width], context).argmax(-1).tolist()
            if turn:  # the first warms up
                seconds.append(perf_counter() - started)
    return {name: {width: 1e3 * median(taken[name, width]) for width in widths} for name in models}


def _distances(target: str, models: dict[str, Loaded], count: int, file: Path | None) -> dict[str, tuple[float, float]]:
    """Mean KL from the numbers of the file in float32, and how often the likeliest token is the same.

    file: what llama.cpp reads too, if it is asked.
    """
    tokenizer = next(iter(models.values())).tokenizer
    if tokenizer is None:
        raise UsageError("--kl needs a file with a tokenizer")
    ids = torch.tensor([tokenizer.encode("\n".join(prompt.prompt for prompt in builtin_prompts()))[:count]])
    reference = load_unpacked(target, LoadOptions("float32", "cpu"))
    with torch.inference_mode():
        expected = torch.log_softmax(reference(input_ids=ids, use_cache=False).logits[0].double(), -1)
    found = {}
    for name, loaded in models.items():
        loaded.backend.reserve(1, ids.shape[1])
        found[name] = _distance(expected, _logits(loaded, ids, 0))
    if file is not None:
        found["llama.cpp"] = _distance(expected, _logits_of_llama_cpp(file, ids[0].tolist()))
    return found


def _distance(expected: Tensor, logits: Tensor) -> tuple[float, float]:
    got = torch.log_softmax(logits[:, : expected.shape[1]].double(), -1)
    kl = float((expected.exp() * (expected - got)).sum(-1).mean())
    return kl, float((expected.argmax(-1) == got.argmax(-1)).float().mean())


def _logits_of_llama_cpp(file: Path, tokens: list[int]) -> Tensor:
    model = LlamaCppModel(file, torch.get_num_threads())
    parts = [torch.from_numpy(model.forward(tokens[at : at + BATCH], at).copy()) for at in range(0, len(tokens), BATCH)]
    model.close()
    return torch.cat(parts)


if __name__ == "__main__":
    run(main)
