"""`slipstream bench`: runs arms in turn on the same prompts, compares their texts and records every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from slipstream.apps.cli.application import command, config_from, prompt_set, write_json
from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.flags import (
    MEASURING,
    BatchSizes,
    Json,
    Models,
    OutFolder,
    Plan,
    PromptChoice,
    Raw,
    Repeats,
    Report,
    flags,
    option,
    read_batch_sizes,
)
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError
from slipstream.sampling.params import SamplingParams

if TYPE_CHECKING:
    from slipstream.text.prompt_sets import NamedPrompt

ARMS = (
    "DRAFTER[@LENGTH][/RULE][.plain][.predicted][~TEMP], hf, hf-assisted, hf-assisted-tuned[@LENGTH], "
    "hf-lookup[@LENGTH], llama, llama-lookup[@LENGTH]"
)


@dataclass(frozen=True)
class BenchOptions:
    """The arms, the repeats and the output of a benchmark."""

    arms: Annotated[
        str | None, option(MEASURING, "--arms", text=f"arms to compare, separated by commas: {ARMS}", metavar="ARMS")
    ] = None
    reference: Annotated[
        str | None,
        option(
            MEASURING,
            "--reference",
            text="arm that speed-ups refer to; default: the arm `none`, else the first",
            metavar="ARM",
        ),
    ] = None
    batch_sizes: BatchSizes = "1"
    at_once: Annotated[
        int | None,
        option(
            MEASURING,
            "--at-once",
            text="prompts per call, more than are decoded together: each that finishes makes room for the next",
            metavar="N",
        ),
    ] = None
    repeats: Repeats = 3
    raw: Raw = False
    out_folder: OutFolder = None
    report: Report = False


@command(
    "bench",
    "slipstream bench --limit 1",
    "slipstream bench --arms none,ngram,suffix,hf --repeats 5",
    "slipstream bench --batch-sizes 1,4 --out runs/today --report",
)
@flags(Models, PromptChoice, BenchOptions, DecoderConfig, SamplingParams, max_tokens=64)
def bench_command(
    models: Models,
    choice: PromptChoice,
    options: BenchOptions,
    config: DecoderConfig,
    params: SamplingParams,
    plan_file: Plan = None,
    json_file: Json = None,
) -> None:
    """Measure several drafters against each other, with intervals.

    An arm is a drafter with its settings, or another engine. Prints speeds, whether outputs are identical, and where
    the time went. Arms take turns on each prompt, then comes the next repeat. --num-draft-tokens and --acceptance
    apply to arms that do not set their own. A killed run continues where it stopped; for a finished folder, only the
    tables are printed again and no model is loaded. Exit code 1 if a lossless arm's output differs by more than a tie,
    or if an arm failed.
    """
    config = config_from(config, models.config_file)
    batches = read_batch_sizes(options.batch_sizes, config.max_batch_size)
    if options.at_once is not None and batches != [config.max_batch_size]:
        raise UsageError(
            f"--at-once with --batch-sizes {options.batch_sizes}; allowed: the only batch size is max_batch_size "
            f"({config.max_batch_size})"
        )
    if options.arms is not None and config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} with --arms, which names the drafters; allowed: one of the two")
    names = f"none,{config.drafter}" if options.arms is None else options.arms
    run_arms(names, prompt_set(choice), batches, (models, config, params), options, json_file)


def run_arms(
    names: str,
    prompts: Sequence[NamedPrompt],
    batches: Sequence[int],
    settings: tuple[Models, DecoderConfig, SamplingParams],
    options: BenchOptions,
    json_file: Path | None,
) -> None:
    """Measure these arms, print and save the results; SlipstreamError if one failed or has a wrong output."""
    models, config, params = settings
    config, params = replace(config, drafter="auto"), replace(params, seed=params.seed or 0)
    from slipstream.apps.cli.measuring import Benchmark, fail_on_wrong_texts, report_folder
    from slipstream.bench.arms import parse_arms, reference_of
    from slipstream.bench.length_series import best_lengths, references, summarize_by_temperature
    from slipstream.bench.llama_cpp import require_llama
    from slipstream.bench.plan import name_prompts
    from slipstream.bench.report import require_matplotlib
    from slipstream.bench.result_tables import bench_tables

    if options.report:
        require_matplotlib()
    arms = parse_arms(names)
    named = name_prompts(prompts)
    require_llama(arms, models.target)
    predicted = next((arm.name for arm in arms if arm.predicted), None)
    if predicted is not None and all(prompt.prediction is None for prompt in named):
        raise UsageError(
            f"arm {predicted!r}, but no prompt has a prediction; allowed: a .jsonl file in which some have one"
        )
    reference = reference_of(arms, options.reference)
    chat = not options.raw
    benchmark = Benchmark(
        models, config, params, named, arms, reference, batches, options.repeats, options.at_once, chat
    )
    folder = options.out_folder or Path("runs") / f"bench-{datetime.now():%Y%m%d-%H%M%S}"
    header, runs = benchmark.run(folder)
    summaries = summarize_by_temperature(runs, reference)
    compared_with = references([arm.name for arm in arms], reference)
    for base in dict.fromkeys(compared_with.values()):
        for table in bench_tables([arm for arm in summaries if compared_with[arm.arm] == base], base):
            out.print(table)
    for sentence in (best := best_lengths(summaries)):
        out.sentence(sentence)
    report_folder(folder, header, page=options.report)
    results = {"summary": [arm.to_dict() for arm in summaries], "best_lengths": best}
    write_json(json_file, asdict(header) | results)
    fail_on_wrong_texts(summaries)
    for arm in summaries:
        if arm.failed:
            raise SlipstreamError(f"arm {arm.arm}, batch {arm.batch}: {arm.failed} of its runs failed: {arm.error}")
