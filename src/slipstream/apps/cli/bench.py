"""`slipstream bench`: runs arms in turn on the same prompts, compares their texts and records every round."""

from __future__ import annotations

from slipstream.apps.cli.application import command, prompt_set
from slipstream.apps.cli.flags import BenchOptions, Json, Models, Plan, PromptChoice, flags, read_batch_sizes
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams


@command(
    "bench",
    "slipstream bench --limit 1",
    "slipstream bench --arms none,ngram,suffix,hf --repeats 5",
    "slipstream bench --batch-sizes 1,4 --out runs/today --report",
)
@flags(Models, PromptChoice, BenchOptions, DecoderConfig, SamplingParams, measures=True, max_tokens=64)
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
    batches = read_batch_sizes(options.batch_sizes, config.max_batch_size)
    if options.at_once is not None and batches != [config.max_batch_size]:
        raise UsageError(
            f"--at-once with --batch-sizes {options.batch_sizes}; allowed: the only batch size is max_batch_size "
            f"({config.max_batch_size})"
        )
    if options.arms is not None and config.drafter != "auto":
        raise UsageError(f"--drafter {config.drafter} with --arms, which names the drafters; allowed: one of the two")
    names = f"none,{config.drafter}" if options.arms is None else options.arms
    from slipstream.apps.cli.measuring import run_arms

    run_arms(names, prompt_set(choice), batches, (models, config, params), options, json_file)
