"""`slipstream train`: trains a draft head for a target; after a kill it continues where it stopped."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from slipstream.apps.cli.application import (
    announce_loading,
    command,
    interruptible,
    load_decoder,
    write_json,
)
from slipstream.apps.cli.consoles import clock_time, err, out, progress_bar
from slipstream.apps.cli.flags import OUTPUT, PROMPTS, Json, Models, check_folder, flag, flags, target_flag
from slipstream.config import SERVED, DecoderConfig
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet

if TYPE_CHECKING:
    from slipstream.training.training_job import Show, TrainingJob, TrainingProgress

TRAINING = "Training"
UNITS = {"": 1, "k": 1_000, "m": 1_000_000}
FEWEST_TOKENS = 1000
LOG_SECONDS = 60.0  # between two lines of a log
# decoder settings that the training chooses itself
CHOSEN = (
    *("drafter", "num_draft_tokens", "acceptance", "reproducible"),
    *("draft_dtype", "draft_vocabulary", "draft_context"),
)


@dataclass(frozen=True)
class TrainOptions:
    """The target, the data and the time limits of a training."""

    target: str = target_flag()
    prompts: Path | None = flag(
        None,
        PROMPTS,
        "prompts that the target answers, one per line, or .jsonl with prompts or texts; default: it invents them from "
        "its chat template",
        "FILE",
    )
    tokens: str = flag("2M", TRAINING, "tokens of texts to make, e.g. 500k or 2M", "NUMBER")
    hours: float = flag(
        3.0, TRAINING, "time in all once the model is loaded, at most half of it for the texts", "NUMBER"
    )
    steps: int | None = flag(None, TRAINING, "training steps; default: ten passes over the texts", "N", min=1)
    seed: int = flag(0, TRAINING, "random seed", "N", min=0)
    out_folder: Path | None = flag(
        None,
        OUTPUT,
        "folder of the head (needed); a training that was interrupted there continues",
        "FOLDER",
        names="--out",
        callback=check_folder("--out"),
    )


@command(
    "train",
    "slipstream train --model Qwen/Qwen3-8B --out qwen3-head --hours 12",
    "slipstream train --model Qwen/Qwen3-8B --out qwen3-head --prompts mine.txt",
    'slipstream generate --model Qwen/Qwen3-8B --draft qwen3-head "Why is the sky blue?"',
)
@flags(TrainOptions, DecoderConfig, without=CHOSEN)
def train_command(options: TrainOptions, config: DecoderConfig, json_file: Json = None) -> None:
    """Train a draft head for a model, which then generates faster with --draft FOLDER.

    Needs no data: the model invents prompts and answers them, and a head of the EAGLE-3 type learns to predict its
    answers. Prompts like those that will be served make a better head. The same command continues after an
    interruption, and with more --hours once time is up.
    """
    job = _job(options)
    with interruptible(lambda: f"{job.saved}; the same command continues"):
        announce_loading(Models(options.target))
        served = replace(config, acceptance=SERVED.acceptance)
        decoder = load_decoder(Models(options.target), served, is_announced=True)
        with _progress() as job.show:
            result = job.run(decoder)
    out.sentence(
        f"{result['tokens_per_round']:.2f} tokens per round on held-out texts after {result['steps']} steps; estimated "
        f"{result['tokens_per_second']:.0f} tokens/s with {result['num_draft_tokens']} draft tokens, "
        f"{result['plain']:.0f} without"
    )
    if not result["finished"]:
        err.sentence(f"--hours {options.hours:g} ended the training; the same command with more continues")
    elif not result["new_steps"]:
        err.sentence("it was finished already; to train more, give more --tokens or --steps and another --out")
    out.print(f"use it: slipstream generate --model {options.target} --draft {result['folder']}", soft_wrap=True)
    write_json(json_file, {"target": options.target} | result)


def _job(options: TrainOptions) -> TrainingJob:
    """The job, after the checks that need no loaded model."""
    if options.out_folder is None:
        raise UsageError("--out is missing; allowed: --out FOLDER")
    tokens = _number(options.tokens)
    if not 0 < options.hours < float("inf"):
        raise UsageError(f"--hours {options.hours:g}; allowed: a number above 0")
    quiet()
    from slipstream.models.loaded import is_toy
    from slipstream.models.weights.tokenizer_loading import inspect_vocabulary
    from slipstream.training.texts import refuse_without_template
    from slipstream.training.training_job import TrainingJob, TrainingSettings

    settings = TrainingSettings(
        options.target, options.out_folder, options.prompts, tokens, options.hours, options.steps, options.seed
    )
    job = TrainingJob(settings)
    if is_toy(options.target):
        raise UsageError(
            f"--model {options.target!r} has no hidden states that a head could read; allowed: a model of transformers"
        )
    if options.prompts is None:
        refuse_without_template(inspect_vocabulary(options.target).tokenizer, options.target)
    job.make_folder()
    return job


def _number(text: str) -> int:
    match = re.fullmatch(r"(\d{1,12}(?:\.\d{1,6})?)([kKmM]?)", text)
    number = int(float(match[1]) * UNITS[match[2].lower()]) if match else 0
    if number < FEWEST_TOKENS:
        raise UsageError(f"--tokens {text!r}; allowed: a number from {FEWEST_TOKENS} on, e.g. 500k or 2M")
    return number


@contextmanager
def _progress() -> Iterator[Show]:
    """A function that shows the stage, the progress, the time left and the latest judgment of the head.

    On a terminal it redraws one line; elsewhere it prints a line at first, every minute, and for each judgment.
    """
    from rich.progress import BarColumn, TaskProgressColumn, TextColumn

    columns: tuple[Any, ...] = (
        TextColumn("{task.fields[doing]}"),
        BarColumn(bar_width=16),
        TaskProgressColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with progress_bar(*columns) as bar:
        task = bar.add_task("", total=None, doing="preparing")
        last_news = ""
        last_line = float("-inf")

        def show(progress: TrainingProgress) -> None:
            nonlocal last_news, last_line
            judgment = "" if progress.latest is None else _judgment(progress.latest)
            how_far = f"{progress.completed} of {progress.total} {progress.unit}"
            time_left = f"at most {clock_time(progress.seconds_left)} left"
            if err.is_terminal:
                description = ", ".join(filter(None, (how_far, time_left, judgment)))
                completed, total = progress.completed, progress.total
                bar.update(task, doing=progress.doing, completed=completed, total=total, description=description)
            elif judgment != last_news or monotonic() - last_line >= LOG_SECONDS:
                news = f"{progress.doing}: {how_far}" if judgment == last_news else judgment
                err.sentence(", ".join(filter(None, (news, time_left))))
                last_news, last_line = judgment, monotonic()

        yield show


def _judgment(latest: dict[str, Any]) -> str:
    loss = "" if latest["loss"] is None else f"loss {latest['loss']:.2f}, "
    speed = f"estimated {latest['tokens_per_second']:.0f} tokens/s, {latest['plain']:.0f} without"
    return f"step {latest['step']}: {loss}{latest['tokens_per_round']:.2f} tokens per round, {speed}"
