"""Is one checkout of Slipstream as fast as another, arm by arm, on the same prompts?

    python benchmarks/checkout_speed.py BEFORE AFTER                              # before, after, before, after
    python benchmarks/checkout_speed.py BEFORE AFTER --plan benchmarks/pair.json --turns 1

Each turn runs `slipstream bench` once in each checkout, in a process of its own and with the same plan (without the
report). Speeds are compared for the same arm, prompt and turn; a ratio above 1 means that AFTER is faster. Hugging
Face's arms run the same code in both checkouts, so their ratios show the machine's noise. The machine should have
nothing else to do. Exit code 1 if the median ratio of one of Slipstream's arms is below --least.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
WITHOUT_REPORT = {"report": False}  # which would only take time after the runs

Key = tuple[str, str, int, int]  # arm, prompts, batch size, repeat


@dataclass(frozen=True)
class Measured:
    """One run of an arm on one group of prompts."""

    seconds: float
    texts: list[list[int]]


def bench(checkout: Path, plan: Path, folder: Path) -> dict[Key, Measured]:
    """Run the benchmark of a checkout and read what it recorded."""
    scripts = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
    module, _, function = scripts["slipstream"].partition(":")
    code = f"import slipstream; print(slipstream.__file__, flush=True); from {module} import {function} as main; main()"
    command = [sys.executable, "-c", code, "bench", "--plan", str(plan), "--out", str(folder)]
    sources = {"PYTHONPATH": str(checkout / "src")}
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | sources, encoding="utf-8")
    home = Path(process.stdout.partition("\n")[0]).resolve()
    if not home.is_relative_to(checkout / "src"):
        raise SystemExit(f"slipstream was imported from {home}, not from {checkout / 'src'}")
    if process.returncode:
        raise SystemExit(f"{checkout}: the benchmark failed with exit code {process.returncode}:\n{process.stdout}")
    lines = [json.loads(line) for line in (folder / "runs.jsonl").read_text(encoding="utf-8").splitlines()]
    return {_key(line): Measured(line["seconds"], line["texts"]) for line in lines if line["kind"] == "run"}


def _key(line: dict[str, Any]) -> Key:
    return line["arm"], " ".join(line["prompts"]), line["batch"], line["repeat"]


def ratios(before: dict[Key, Measured], after: dict[Key, Measured]) -> dict[str, list[float]]:
    """How many times as fast AFTER was, by arm. A measurement that only one checkout has is an error."""
    if before.keys() != after.keys():
        raise SystemExit(f"only one checkout ran {sorted(before.keys() ^ after.keys())[0]}")
    by_arm: dict[str, list[float]] = {}
    for key, measured in before.items():
        by_arm.setdefault(key[0], []).append(measured.seconds / after[key].seconds)
    return by_arm


def show(turns: Sequence[dict[str, list[float]]], changed: dict[str, int]) -> dict[str, float]:
    """Print a line for each arm and return the median ratios. changed: by arm, how many texts differ."""
    table = Table("arm", *(f"turn {number}" for number in range(1, len(turns) + 1)), "all", "runs", "texts that differ")
    medians = {}
    for arm in turns[0]:
        everything = [ratio for turn in turns for ratio in turn[arm]]
        medians[arm] = median(everything)
        cells = [f"{median(turn[arm]):.3f}" for turn in turns]
        table.add_row(arm, *cells, f"{medians[arm]:.3f}", str(len(everything)), str(changed[arm]))
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)
    return medians


def main(
    before: Path,
    after: Path,
    plan: Path = ROOT / "benchmarks" / "quick.json",
    turns: Annotated[int, typer.Option(min=1)] = 2,
    least: Annotated[float, typer.Option(help="smallest median ratio of an arm that passes")] = 0.98,
    json_file: Annotated[Path | None, typer.Option("--json", help="write all ratios here")] = None,
) -> None:
    """Compare the speeds of two checkouts."""
    settings = json.loads(plan.read_text(encoding="utf-8")) | WITHOUT_REPORT
    all_ratios, changed = list[dict[str, list[float]]](), dict[str, int]()
    with TemporaryDirectory() as folder:
        own_plan = Path(folder) / "plan.json"
        own_plan.write_text(json.dumps(settings), encoding="utf-8")
        for turn in range(turns):
            old, new = (
                bench(checkout.resolve(), own_plan, Path(folder) / f"{name}-{turn}")
                for name, checkout in (("before", before), ("after", after))
            )
            all_ratios.append(ratios(old, new))
            for key, measured in old.items():
                changed[key[0]] = changed.get(key[0], 0) + (measured.texts != new[key].texts)
    medians = show(all_ratios, changed)
    if json_file is not None:
        json_file.write_text(
            json.dumps({"ratios": all_ratios, "medians": medians, "texts that differ": changed}, indent=1),
            encoding="utf-8",
        )
    ours = [ratio for arm, ratio in medians.items() if not arm.startswith("hf")]
    sys.exit(min(ours) < least)


if __name__ == "__main__":
    typer.run(main)
