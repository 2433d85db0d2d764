"""How long does a new process take to print help, to import, to calibrate a model, and to the first token?

    python benchmarks/startup.py --checkout DIR --models smollm2,qwen1.5b --repeats 3
    python benchmarks/startup.py --models smollm2 --options '{"dtype": "float32"}'

Every measurement runs in a process of its own: seconds by the clock, and seconds of computing (user and system, all
threads). Models are links in a temporary folder with its own calibrations and kernels, so the user's stay unchanged.
Each model is started once without being counted, to read its files and compile kernels; the next start calibrates. The
machine should have nothing else to do.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
MODELS = Path(os.environ.get("SLIPSTREAM_MODELS") or Path.home() / ".cache" / "slipstream" / "models")
IMPORT = "import slipstream; from slipstream import SamplingParams, SpeculativeDecoder; print(slipstream.__file__)"
# arguments: model, options as JSON; prints the package's file, and seconds to make the decoder and then to a token
FIRST_TOKEN = """
import json, os, sys
from time import perf_counter
import slipstream
from slipstream import SamplingParams, SpeculativeDecoder
began = perf_counter()
decoder = SpeculativeDecoder(sys.argv[1], **json.loads(sys.argv[2]))
made = perf_counter()
next(iter(decoder.stream("Name three rivers.", SamplingParams(max_tokens=8))))
print(slipstream.__file__, made - began, perf_counter() - made, flush=True)
os._exit(0)
"""


@dataclass(frozen=True)
class Start:
    """Seconds of one process. making: the decoder; streaming: from then on to the first token."""

    wall: float
    computing: float
    making: float | None = None
    streaming: float | None = None


@dataclass(frozen=True)
class Bench:
    """A checkout, and the folder with its models."""

    checkout: Path
    models: Path

    def start(self, code: str, *arguments: str, prints_home: bool = True) -> Start:
        """Run this code on the checkout's sources in a new process. prints_home: it prints the package's file first."""
        settings = {"PYTHONPATH": str(self.checkout / "src"), "SLIPSTREAM_MODELS": str(self.models)}
        settings["PYTHONDONTWRITEBYTECODE"] = ""  # as an installed package, it has bytecode
        command = [sys.executable, "-c", code, *arguments]
        before, began = os.times(), perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings, encoding="utf-8")
        wall, after = perf_counter() - began, os.times()
        if process.returncode:
            raise SystemExit(f"{self.checkout}: {process.stderr.strip() or process.stdout.strip()}")
        home, *seconds = process.stdout.splitlines()[-1].split() if prints_home else [str(self.checkout / "src")]
        if not Path(home).resolve().is_relative_to(self.checkout / "src"):
            raise SystemExit(f"slipstream was imported from {home}, not from {self.checkout / 'src'}")
        computing = after.children_user + after.children_system - before.children_user - before.children_system
        return Start(wall, computing, *map(float, seconds))

    def help(self) -> Start:
        """Time the console command with --help."""
        scripts = tomllib.loads((self.checkout / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]
        module, _, function = scripts["slipstream"].partition(":")
        return self.start(f"from {module} import {function} as main; main()", "--help", prints_home=False)

    def first_token(self, model: str, options: dict[str, Any]) -> Start:
        """Time a decoder with these options up to its first token."""
        return self.start(FIRST_TOKEN, model, json.dumps(options))

    def calibrating(self, model: str, options: dict[str, Any]) -> Start:
        """The same, without a saved calibration."""
        shutil.rmtree(self.models / "calibration", ignore_errors=True)
        return self.first_token(model, options)

    def rows(
        self, models: Sequence[str], options: dict[str, Any], repeats: int, calibrations: int
    ) -> dict[str, list[Start]]:
        """Take all measurements. Returns them by the name of their row."""
        self.help()
        rows = {"--help": [self.help() for _ in range(repeats)]}
        rows["import"] = [self.start(IMPORT) for _ in range(repeats)]
        for model in models:
            (self.models / model).symlink_to(MODELS / model)
            self.first_token(model, options | {"reproducible": False})  # reads files, compiles kernels
            rows[f"{model}, first start"] = [self.calibrating(model, options) for _ in range(calibrations)]
            rows[f"{model}, later start"] = [self.first_token(model, options) for _ in range(repeats)]
        return rows


def show(rows: dict[str, list[Start]]) -> None:
    """Print a line of medians for each row, and how much longer a first start takes than a later one."""
    table = Table("median seconds", "wall", "computing", "making the decoder", "then first token", "runs")
    for name, starts in rows.items():
        columns = [[asdict(start)[key] for start in starts] for key in ("wall", "computing", "making", "streaming")]
        cells = ["-" if None in values else f"{median(values):.2f}" for values in columns]
        table.add_row(name, *cells, str(len(starts)))
    for name in [name.removesuffix(", first start") for name in rows if name.endswith(", first start")]:
        first, later = rows[f"{name}, first start"], rows[f"{name}, later start"]
        wall = median(start.wall for start in first) - median(start.wall for start in later)
        computing = median(start.computing for start in first) - median(start.computing for start in later)
        table.add_row(f"{name}, calibration", f"{wall:.2f}", f"{computing:.2f}", "-", "-", "-")
    Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(table)


def main(
    checkout: Path = ROOT,
    models: str = "smollm2",
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    calibrations: Annotated[int, typer.Option(min=1, help="number of first starts, which calibrate")] = 1,
    options: Annotated[str, typer.Option(help="further arguments of the decoder, as JSON")] = "{}",
    json_file: Annotated[Path | None, typer.Option("--json", help="write every measurement here")] = None,
) -> None:
    """Measure one checkout and print medians."""
    names = models.split(",")
    for name in names:
        if not (MODELS / name / "config.json").is_file():
            raise typer.BadParameter(f"--models {name}: {MODELS / name} holds no model")
    with TemporaryDirectory() as folder:
        rows = Bench(checkout.resolve(), Path(folder)).rows(names, json.loads(options), repeats, calibrations)
    show(rows)
    if json_file is not None:
        json_file.write_text(
            json.dumps({name: [asdict(s) for s in starts] for name, starts in rows.items()}, indent=1), encoding="utf-8"
        )


if __name__ == "__main__":
    typer.run(main)
