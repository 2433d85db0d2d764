"""How fast is each stage of a round on a GPU, compared with what the memory's bandwidth allows?

    PYTHONPATH=src python benchmarks/gpu.py --json gpu.json      # started again, measures what gpu.json lacks
    PYTHONPATH=src python benchmarks/gpu.py --small              # tiny models on the CPU, takes seconds

Needs neither network nor weights. Target and draft model have the shapes of Qwen3-8B and Qwen3-0.6B and random weights,
except that both choose the token id after the last one by a wide margin, so that no near-tie disturbs the text. To
simulate acceptance, each token of the draft model is replaced by a wrong one with a set probability, at the same
positions in every arm, Hugging Face's assisted generation included.

Such texts hardly depend on the KV cache. Logits of random tokens are therefore compared too, with embeddings so small
that they do depend on it, and so are a token's bits in forwards of all widths and numbers of rows.

Arms: "eager" is transformers' forward; "graphed" is that forward captured in CUDA graphs; "kernels" is computed by
Triton kernels and captured, as by default.
"""

from __future__ import annotations

import json
import logging
import platform
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import transformers
import typer
from gpu_arms import (
    DRAFT,
    SHARED,
    TARGET,
    TINY,
    TINY_DRAFT,
    TINY_TARGET,
    Arm,
    Setting,
    agreeing_widths,
    build,
    by_kernels,
    compare_logits,
    fixed_order,
    hf_arm,
    slipstream_arm,
)
from gpu_products import compare_products
from terminal import Count, JsonFile, run, save

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.certificate.parity import first_difference, last_logits
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.hf.backend import HFBackend
from slipstream.models.weights.model_files import quiet
from slipstream.reproducibility.timing import wait_for_device

TIE = 0.02  # of the largest logit
BATCH = 8
PROMPTS = 32
WIDTHS = 16  # of forwards in which each token must have the bits that it has alone
STAGES = ("draft", "verify", "accept", "overhead")
KINDS = ("eager", "graphed", "kernels")
CALIBRATED = ("graphed", "kernels")
SETTING = ("device", "torch", "transformers", "num_draft_tokens", "max_tokens", "prompt_tokens")


def main(
    small: Annotated[bool, typer.Option(help="try it out: tiny models on the CPU")] = False,
    prompt_tokens: Count = 128,
    max_tokens: Count = 96,
    num_draft_tokens: Count = 4,
    acceptance: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="probability that a draft token is the target's")
    ] = 0.8,
    repeats: Count = 3,
    batches: Annotated[
        list[int] | None,
        typer.Option(min=1, max=PROMPTS, help="rows decoded together; repeatable", show_default="1, 8"),
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Print each arm's speed, times by stage and parity, and the rooflines; the last line is JSON."""
    quiet()
    logging.getLogger("slipstream").addHandler(logging.StreamHandler())  # why graphs are not used, if so
    if not small and not torch.cuda.is_available():
        raise typer.BadParameter("there is no GPU; allowed: --small")
    device = torch.device("cpu" if small else "cuda")
    if small:
        prompt_tokens, max_tokens, repeats = 8, 12, 1
    setting = prepare(small, device, prompt_tokens, max_tokens, num_draft_tokens, acceptance)
    result = describe(setting, bandwidth(device, 1 << 22 if small else 1 << 31))
    if json_file is not None:
        result |= measured_before(json_file, result)
    backends: dict[str, Any] = {
        kind: (make(setting.target), make(setting.draft))
        for kind, make in (("eager", HFBackend), ("graphed", GraphedBackend), ("kernels", by_kernels))
    }

    def part(name: str, measured: Callable[[], Any]) -> None:
        """Measure a part unless an earlier run has; print it and save the result so far."""
        if name not in result["parts"]:
            result["parts"][name] = measured()
            save(json_file, result)
        print(f"{name}: {result['parts'][name]}")

    for rows in map(str, batches or (1, 2 if small else BATCH)):
        if rows not in result["batches"]:
            result["batches"][rows] = measure(setting, backends, int(rows), repeats, result)
            save(json_file, result)
        print_against_limits(result, rows)
    part("auto against plain", lambda: by_decoder(setting, (1, 2 if small else BATCH)))
    part("tokens with the bits that they have alone", lambda: fixed_orders(setting, backends, small))
    part("products, GB/s", lambda: compare_products((setting.target, setting.draft), small))
    part("logits of random tokens against eager", lambda: compare_logits(setting, backends))
    part(
        "graphs",
        lambda: {
            f"{kind} {which}": str(backend.graph_memory())
            for kind in CALIBRATED
            for which, backend in zip(("target", "draft"), backends[kind], strict=True)
        },
    )
    part("widths that give the same bits", lambda: {kind: agreeing_widths(backends[kind][0]) for kind in CALIBRATED})
    print(json.dumps(result))
    if any(arm["error"] for batch in result["batches"].values() for arm in batch):
        raise typer.Exit(1)


def measured_before(file: Path, result: dict[str, Any]) -> dict[str, Any]:
    """The result that an earlier run left in a file, rooflines included; empty if its machine or setting differs."""
    text = file.read_text(encoding="utf-8")
    saved: dict[str, Any] = json.loads(text) if text.strip() else {}
    return saved if all(saved.get(name) == result[name] for name in SETTING) else {}


def fixed_orders(setting: Setting, backends: dict[str, Any], small: bool) -> dict[str, dict[str, int]]:
    """`fixed_order` of the target by kernels, and as a negative control by transformers."""
    return {
        kind: fixed_order(backends[kind][0], setting.prompts[: 2 if small else PROMPTS], 3 if small else WIDTHS)
        for kind in ("kernels", "graphed")
    }


def by_decoder(setting: Setting, batches: Sequence[int]) -> dict[str, dict[str, Any]]:
    """Tokens per second of a decoder with its own choice of drafts and without drafts, and whether texts are equal.

    Each runs once to learn what drafts bring, then once more.
    """
    params, results = SamplingParams(max_tokens=setting.max_tokens), dict[str, dict[str, Any]]()
    with SpeculativeDecoder(setting.target, setting.draft, max_batch_size=max(batches)) as decoder:
        for rows in batches:
            texts = {}
            for drafter in ("none", "auto"):
                drafting = decoder.using(drafter, num_draft_tokens="auto")
                for _ in range(2):
                    wait_for_device(setting.device)
                    started = perf_counter()
                    texts[drafter] = [result.token_ids for result in drafting.generate(setting.prompts[:rows], params)]
                    wait_for_device(setting.device)
                    seconds = perf_counter() - started
                speeds = results.setdefault(f"{rows} texts", {})
                speeds[drafter] = round(rows * setting.max_tokens / seconds, 1)
            results[f"{rows} texts"]["identical"] = texts["none"] == texts["auto"]
    return results


def print_against_limits(result: dict[str, Any], rows: str) -> None:
    """Print plain and draft steps over the time to read their weights, and the speed-up of drafting."""
    limits, arms = result["roofline_ms"], {arm["arm"]: arm for arm in result["batches"][rows] if arm["error"] is None}
    for kind in KINDS:
        plain, drafting = arms.get(f"plain {kind}"), arms.get(f"speculative {kind}")
        if plain is None or drafting is None:
            continue
        step, draft = plain["stages_ms"]["verify"], drafting["stages_ms"]["draft"] / result["num_draft_tokens"]
        gain = drafting["tokens_per_second"] / plain["tokens_per_second"]
        print(
            f"batch {rows} {kind:10} plain step {step:.2f} ms = {step / limits['target']:.2f} of its limit; draft step "
            f"{draft:.2f} ms = {draft / limits['draft']:.2f} of its limit; speculative {gain:.2f} of plain"
        )


def prepare(small: bool, device: torch.device, length: int, tokens: int, count: int, acceptance: float) -> Setting:
    """Build the models, prompts of random tokens, and the positions at which drafts will be wrong."""
    shapes = (TINY_TARGET | TINY, TINY_DRAFT | TINY) if small else (TARGET | SHARED, DRAFT | SHARED)
    target, draft = (build(shape, device) for shape in shapes)
    generator = torch.Generator().manual_seed(1)
    prompts = torch.randint(0, target.config.vocab_size, (PROMPTS, length), generator=generator).tolist()
    wrong = (torch.rand(PROMPTS, length + tokens + 64, generator=generator) >= acceptance).to(device)
    return Setting(target, draft, prompts, wrong, tokens, count)


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes per second that a copy of `size` bytes reads and writes: the median of 20 copies."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    seconds = []
    for _ in range(20):
        wait_for_device(device)
        started = perf_counter()
        copy.copy_(source)
        wait_for_device(device)
        seconds.append(perf_counter() - started)
    return 2 * size / median(seconds)


def describe(setting: Setting, bytes_per_second: float) -> dict[str, Any]:
    """Machine, versions and rooflines: the time to read every weight of a forward once."""
    name = torch.cuda.get_device_name() if setting.device.type == "cuda" else platform.machine()
    rooflines = {}
    for which, model in (("target", setting.target), ("draft", setting.draft)):
        size = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
        rooflines[which] = 1e3 * size / bytes_per_second
    print(f"{name}, torch {torch.__version__}, transformers {transformers.__version__}")
    reads = ", ".join(f"{ms:.2f} ms ({which})" for which, ms in rooflines.items())
    print(f"copy {bytes_per_second / 1e9:.0f} GB/s; a forward reads its weights in {reads}")
    return {
        "device": name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "gigabytes_per_second": bytes_per_second / 1e9,
        "roofline_ms": rooflines,
        "num_draft_tokens": setting.num_draft_tokens,
        "max_tokens": setting.max_tokens,
        "prompt_tokens": len(setting.prompts[0]),
        "batches": {},
        "parts": {},
    }


def measure(
    setting: Setting, backends: dict[str, Any], rows: int, repeats: int, result: dict[str, Any]
) -> list[dict[str, Any]]:
    """Run all arms in turns, `repeats` times after one run to warm up, then once more by stage."""
    arms = [hf_arm("hf generate", setting)]
    if rows == 1:
        arms.append(hf_arm("hf assisted", setting, setting.draft))
    for kind, (target, draft) in backends.items():
        arms.append(slipstream_arm(f"plain {kind}", setting, (target, None)))
        arms.append(slipstream_arm(f"speculative {kind}", setting, (target, draft)))
    for turn in range(repeats + 1):
        for arm in arms:
            attempt(arm, partial(timed, arm, rows, setting, keep=turn > 0))
    for arm in arms:
        if arm.backends is not None:
            waiting = slipstream_arm(arm.name, setting, arm.backends, waiting=True)
            attempt(arm, partial(by_stage, arm, waiting, rows))
    print(
        f"\nbatch {rows}: draft roofline {setting.num_draft_tokens} x {result['roofline_ms']['draft']:.2f} ms, "
        f"verify {result['roofline_ms']['target']:.2f} ms"
    )
    return [report(arm, arms[0], setting, rows) for arm in arms]


def attempt(arm: Arm, work: Callable[[], None]) -> None:
    """Do some of an arm's work and keep its error. After an error, do nothing."""
    if arm.error is not None:
        return
    try:
        work()
    except Exception as error:  # any error is reported as this arm's and stops no other
        arm.error = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def timed(arm: Arm, rows: int, setting: Setting, keep: bool) -> None:
    """Run an arm once. keep: record its time and texts."""
    wait_for_device(setting.device)
    started = perf_counter()
    texts = arm.run(rows)
    wait_for_device(setting.device)
    if keep:
        arm.texts = texts
        arm.seconds.append(perf_counter() - started)


def by_stage(arm: Arm, waiting: Arm, rows: int) -> None:
    """Set the arm's median milliseconds per stage of a round. waiting: the same arm, waiting after each stage."""
    waiting.run(rows)
    seconds_of: dict[str, list[float]] = {stage: [] for stage in STAGES}
    for seconds in (round_.seconds for round_ in waiting.rounds):
        if seconds.prefill >= 0.5 * seconds.total:
            continue  # mostly reads the prompt
        timed_stages = (seconds.draft, seconds.verify, seconds.accept)
        overhead = seconds.total - seconds.prefill - sum(timed_stages)
        for stage, value in zip(STAGES, (*timed_stages, overhead), strict=True):
            seconds_of[stage].append(value)
    arm.stages = {stage: 1e3 * median(values) for stage, values in seconds_of.items() if values}


def report(arm: Arm, reference: Arm, setting: Setting, rows: int) -> dict[str, Any]:
    """Print an arm's line and return its figures."""
    if arm.error is not None:
        print(f"{arm.name:20} FAILED: {arm.error}")
        return {"arm": arm.name, "error": arm.error}
    tokens, seconds = sum(map(len, arm.texts)), median(arm.seconds)
    fields: dict[str, Any] = {"arm": arm.name, "error": None, "tokens_per_second": tokens / seconds}
    fields["seconds"], fields["stages_ms"] = arm.seconds, arm.stages
    fields["parity"] = parity(arm.texts, reference.texts, setting)
    drafted = sum(round_.num_draft_tokens for round_ in arm.rounds)
    accepted = sum(round_.num_accepted_tokens for round_ in arm.rounds)
    fields["acceptance_rate"] = accepted / drafted if drafted else None
    fields["tokens_per_round"] = len(arm.texts[0]) / len(arm.rounds) if arm.rounds else None
    stages = "  ".join(f"{stage} {ms:.2f}" for stage, ms in arm.stages.items())
    per_round = f"{fields['tokens_per_round']:.2f} tokens a round" if arm.rounds else ""
    print(f"{arm.name:20} {fields['tokens_per_second']:8.1f} tokens/s  {per_round:20} {stages}  {fields['parity']}")
    return fields


def parity(texts: list[list[int]], expected: list[list[int]], setting: Setting) -> str:
    """Counts of texts that equal the reference's, part from it at a tie, or differ otherwise."""
    counts = {"identical": 0, "tie": 0, "different": 0}
    if not expected:
        return "no reference"
    for prompt, text, reference in zip(setting.prompts, texts, expected, strict=False):
        position = first_difference(reference, text)
        if position is None:
            counts["identical"] += 1
        elif position >= min(len(text), len(reference)):
            counts["different"] += 1
        else:
            logits = last_logits(setting.target, [*prompt, *reference[:position]])[0]
            gap = float(logits.max() - logits[[text[position], reference[position]]].min())
            counts["tie" if gap <= TIE * float(logits.abs().max()) else "different"] += 1
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


if __name__ == "__main__":
    run(main)
