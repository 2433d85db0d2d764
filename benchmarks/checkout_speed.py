"""Is one checkout of Slipstream as fast as another, arm by arm, on the same prompts?

    python benchmarks/checkout_speed.py BEFORE AFTER                       # SmolLM2
    python benchmarks/checkout_speed.py BEFORE AFTER --target T --draft D --arms none,model@4,auto --turns 2
    python benchmarks/checkout_speed.py BEFORE BEFORE                      # the machine's noise

Each checkout runs in a process of its own with the model loaded; the two take turns at every single text, in
alternating order, so that a machine whose speed drifts slows both. Each turn starts new processes in the other order,
since the first may get the better memory. A ratio above 1 means that AFTER is faster. The machine should have nothing
else to do. Exit code 1 if the median ratio of an arm is below --least.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median, quantiles
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.table import Table
from same_texts import choose_prompts
from terminal import Child, Count, JsonFile, console, run, save

WORKER = "--worker"  # runs this script as the process of one checkout


@dataclass(frozen=True)
class Pair:
    """One text's seconds in both checkouts, and whether its tokens are the same."""

    before: float
    after: float
    same: bool


class Checkout(Child):
    """A process with a checkout's code and loaded models."""

    def __init__(self, folder: Path, job: dict[str, Any]) -> None:
        super().__init__(
            str(folder), [sys.executable, __file__, WORKER, str(folder)], {"PYTHONPATH": str(folder / "src")}
        )
        self.ask(job)  # loaded and calibrated, so that the next checkout does so with the machine to itself

    def timed(self, arm: str, prompt: str) -> tuple[float, list[int]]:
        """Generate the answer to a prompt; returns seconds and token ids."""
        seconds, tokens = self.ask([arm, prompt])
        return seconds, tokens


def work(checkout: Path) -> None:
    """Answer requests from standard input with the code of `checkout`; runs in a process of its own."""
    import slipstream
    from slipstream import SamplingParams, SpeculativeDecoder

    home = Path(slipstream.__file__).resolve()
    assert home.is_relative_to(checkout / "src"), f"{home} is not in {checkout / 'src'}"
    job = json.loads(sys.stdin.readline())
    loaded = SpeculativeDecoder(job["target"], job["draft"])
    decoders = {arm: loaded.using(**_settings(arm)) for arm in job["arms"]}
    params = SamplingParams(max_tokens=job["max_tokens"])
    print("true", flush=True)
    for line in sys.stdin:
        arm, prompt = json.loads(line)
        begin = perf_counter()
        tokens = decoders[arm].generate(decoders[arm].encode(prompt, chat=True), params).token_ids
        print(json.dumps([perf_counter() - begin, tokens]), flush=True)


def _settings(arm: str) -> dict[str, Any]:
    """An arm's drafter and draft length; the name is "DRAFTER" or "DRAFTER@LENGTH"."""
    drafter, _, length = arm.partition("@")
    return {"drafter": drafter, "num_draft_tokens": int(length) if length else "auto"}


def measure(before: Checkout, after: Checkout, arm: str, prompt: str, after_first: bool) -> Pair:
    """One prompt in both checkouts, one after the other."""
    if after_first:
        new, old = after.timed(arm, prompt), before.timed(arm, prompt)
    else:
        old, new = before.timed(arm, prompt), after.timed(arm, prompt)
    return Pair(old[0], new[0], old[1] == new[1])


def show(pairs: dict[str, list[Pair]]) -> dict[str, float]:
    """Print a line for each arm and return the median ratios."""
    table = Table("arm", "median", "middle half", "geometric mean", "total time", "texts", "texts that differ")
    medians = {}
    for arm, runs in pairs.items():
        ratios = [pair.before / pair.after for pair in runs]
        low, medians[arm], high = quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        total = sum(pair.before for pair in runs) / sum(pair.after for pair in runs)
        cells = f"{median(ratios):.3f}", f"{low:.3f} to {high:.3f}", f"{geometric_mean(ratios):.3f}", f"{total:.3f}"
        table.add_row(arm, *cells, str(len(runs)), str(sum(not pair.same for pair in runs)))
    console.print(table)
    return medians


def main(
    before: Path,
    after: Path,
    target: str = "smollm2",
    draft: str | None = None,
    arms: Annotated[str, typer.Option(help="DRAFTER or DRAFTER@LENGTH, with commas between")] = "none,ngram@7,auto",
    prompts: Count = 16,
    prompt_file: Annotated[Path | None, typer.Option(help="JSON lines instead of the package's prompts")] = None,
    max_tokens: Count = 64,
    turns: Count = 2,
    least: Annotated[float, typer.Option(help="smallest median ratio of an arm that passes")] = 0.98,
    json_file: JsonFile = None,
) -> None:
    """Compare the speeds of two checkouts."""
    names = arms.split(",")
    files = [prompt_file] if prompt_file else [*(before.resolve() / "src").rglob("prompts.jsonl")]
    chosen = [prompt.prompt for prompt in choose_prompts(files, prompts)]
    job = {"target": target, "draft": draft, "arms": names, "max_tokens": max_tokens}
    pairs: dict[str, list[Pair]] = {arm: [] for arm in names}
    for turn in range(turns):
        folders = [before.resolve(), after.resolve()][:: -1 if turn % 2 else 1]
        with Checkout(folders[0], job) as first, Checkout(folders[1], job) as second:
            old, new = (second, first) if turn % 2 else (first, second)
            for arm in names:
                measure(old, new, arm, chosen[0], False)  # not counted: first calls
            for number, prompt in enumerate(chosen):
                for arm in names:
                    pairs[arm].append(measure(old, new, arm, prompt, number % 2 == 1))
    medians = show(pairs)
    runs = {arm: [[pair.before, pair.after, pair.same] for pair in measured] for arm, measured in pairs.items()}
    save(json_file, {"runs": runs, "medians": medians})
    sys.exit(min(medians.values()) < least)


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(Path(sys.argv[2]))
    else:
        run(main)
