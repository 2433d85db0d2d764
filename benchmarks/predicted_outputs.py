"""What do right predictions save, and what do wrong ones cost? Decodes the same texts with and without them.

    python benchmarks/predicted_outputs.py qwen1.5b "right prediction" --arms suffix,suffix.predicted

Categories of prompts, the first three from code_edits.jsonl, the last from changed_requests.jsonl:

- "right prediction": the prediction is the file to be edited;
- "wrong prediction": it is the file of another prompt;
- "whole file": longer files with small changes;
- "changed request": it is the target's own answer to an earlier wording of the request, which the prompt lacks.

Arms are drafters; a name with `.predicted` also gets the prediction. They take turns in alternating order, each with an
empty KV cache. Speed-ups are over the first arm; the columns accepted and rejected count tokens of predictions. Exit
code 1 if a text differs between arms.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich import box
from rich.table import Table
from terminal import Count, console, run

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rounds import Round
from slipstream.errors import UsageError
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import NamedPrompt, read_prompts
from slipstream.text.results import Stats

PROMPTS = Path(__file__).with_name("code_edits.jsonl")
CHANGED = Path(__file__).with_name("changed_requests.jsonl")
CATEGORIES = ("right prediction", "wrong prediction", "whole file", "changed request")
PREDICTED = ".predicted"
WARM_UP = "def f(x):\n    return x\n"
ALL = "all"


@dataclass
class Runs:
    """The rounds and seconds of an arm on some prompts."""

    rounds: list[Round] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Runs) -> None:
        """Add another's rounds and seconds."""
        self.rounds += other.rounds
        self.seconds += other.seconds

    @property
    def stats(self) -> Stats:
        """The figures of all rounds."""
        return Stats.of(self.rounds)

    @property
    def decoding(self) -> float:
        """Seconds without the reading of prompts."""
        return self.seconds - self.stats.prefill_seconds

    @property
    def text(self) -> tuple[int, ...]:
        """The output tokens of all rounds."""
        return tuple(token for round_ in self.rounds for token in round_.tokens)


def main(
    target: str,
    categories: Annotated[list[str], typer.Argument(help=f"one or more of: {', '.join(CATEGORIES)}")],
    arms: Annotated[
        str, typer.Option(help="drafters, with .predicted to give them the prediction; separated by commas")
    ] = ("none,none.predicted,suffix,suffix.predicted"),
    max_tokens: Count = 160,
    temperature: Annotated[float, typer.Option(min=0.0)] = 0.0,
    repeats: Count = 1,
) -> None:
    """Print a table for each category, and one for all."""
    quiet()
    if unknown := [category for category in categories if category not in CATEGORIES]:
        raise UsageError(f"category {unknown[0]!r}; allowed: {', '.join(map(repr, CATEGORIES))}")
    names = arms.split(",")
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"--arms names {twice[0]!r} twice; allowed: each arm once")
    base = SpeculativeDecoder(target, drafter="suffix")
    decoders = {name: base.using(name.removesuffix(PREDICTED)) for name in names}
    for decoder in decoders.values():
        decoder.generate(WARM_UP, SamplingParams(max_tokens=24, prediction=WARM_UP))
    runs_of = {category: {name: Runs() for name in names} for category in categories}
    same = dict.fromkeys(categories, 0)
    prompts = [prompt for category in categories for prompt in _prompts_of(category, base, max_tokens)]
    for repeat in range(repeats):
        for number, prompt in enumerate(prompts, 1):
            answers = dict[str, Runs]()
            for name in names[:: 1 if repeat % 2 == 0 else -1]:
                prediction = prompt.prediction if name.endswith(PREDICTED) else None
                params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1, prediction=prediction)
                answers[name] = _answer(decoders[name], prompt, params)
                runs_of[prompt.category][name].add(answers[name])
            same[prompt.category] += len({runs.text for runs in answers.values()}) == 1
            times = ", ".join(f"{name} {runs.seconds:.2f} s" for name, runs in answers.items())
            console.print(f"{repeat * len(prompts) + number}/{repeats * len(prompts)} {prompt.category}: {times}")
    counts = {category: repeats * sum(prompt.category == category for prompt in prompts) for category in categories}
    _print(runs_of, same, counts)
    if same != counts:
        sys.exit(1)


def _prompts_of(category: str, decoder: SpeculativeDecoder, max_tokens: int) -> list[NamedPrompt]:
    """The prompts of a category, each with its prediction."""
    if category != "changed request":
        return read_prompts(PROMPTS, categories=[category])
    prompts = []
    for line in CHANGED.read_text(encoding="utf-8").splitlines():
        earlier, changed = json.loads(line)["turns"]
        answer = decoder.generate(earlier, SamplingParams(max_tokens=max_tokens)).text
        prompts.append(NamedPrompt(changed, category, answer))
    return prompts


def _answer(decoder: SpeculativeDecoder, prompt: NamedPrompt, params: SamplingParams) -> Runs:
    decoder.forget()
    decoder.forget_learned()
    started = perf_counter()
    result = decoder.generate(prompt.prompt, params)
    return Runs(list(result.rounds), perf_counter() - started)


def _print(runs_of: dict[str, dict[str, Runs]], same: dict[str, int], counts: dict[str, int]) -> None:
    if len(runs_of) > 1:
        total: dict[str, Runs] = {}
        for arms in runs_of.values():
            for name, runs in arms.items():
                total.setdefault(name, Runs()).add(runs)
        runs_of = {**runs_of, ALL: total}
        same, counts = {**same, ALL: sum(same.values())}, {**counts, ALL: sum(counts.values())}
    for category, arms in runs_of.items():
        console.print(f"{category}: {same[category]}/{counts[category]} texts identical")
        console.print(_table(arms))


def _table(arms: dict[str, Runs]) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("arm", min_width=16, no_wrap=True)
    for heading in ("tokens per forward", "seconds", "speed-up", "without prompts", "speed-up", "accepted", "rejected"):
        table.add_column(heading, justify="right")
    first = next(iter(arms.values()))
    for name, runs in arms.items():
        stats = runs.stats
        table.add_row(
            name,
            f"{stats.block_efficiency:.2f}",
            f"{runs.seconds:.2f}",
            f"{first.seconds / runs.seconds:.2f}x",
            f"{runs.decoding:.2f}",
            f"{first.decoding / runs.decoding:.2f}x",
            *(
                "" if n is None else str(n)
                for n in (stats.accepted_prediction_tokens, stats.rejected_prediction_tokens)
            ),
        )
    return table


if __name__ == "__main__":
    run(main)
