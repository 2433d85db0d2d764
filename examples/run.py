"""Run the examples: `python examples/run.py`.

Executes every notebook from its first cell to its last, and the script with its defaults, in the Python that runs this
file. It changes no file unless --save is given.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpec, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError, DeadKernelError

HERE = Path(__file__).parent
QUIET = {
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "PYTHONWARNINGS": "ignore:IProgress not found",  # tqdm's advice to install widgets
}
COLORS = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Outcome:
    """The run of an example. output: its text output; error: the last line of its error, None if it succeeded."""

    name: str
    seconds: float
    output: str
    error: str | None = None


class ThisPython(KernelSpecManager):
    """Offers one kernel, whatever is installed: this Python, with `settings` in its environment."""

    settings: Mapping[str, str] = {}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return the same specification for every name."""
        argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
        return KernelSpec(argv=argv, display_name="Python 3", language="python", env=dict(self.settings))


def run_notebook(path: Path, settings: Mapping[str, str], *, save: bool = False) -> Outcome:
    """Execute a notebook; with `save`, and only if no cell failed, write its outputs into the file."""
    notebook = nbformat.read(path, as_version=4)
    metadata = notebook.metadata.copy()
    specs = ThisPython()
    specs.settings = {**QUIET, **settings}
    kernel = AsyncKernelManager(kernel_spec_manager=specs, kernel_name="python3")
    client = NotebookClient(notebook, km=kernel, timeout=None, record_timing=False, resources=_resources(path))
    started, error = perf_counter(), None
    try:
        client.execute(cleanup_kc=True)
    except (CellExecutionError, DeadKernelError) as failure:
        error = last_line(str(failure))
    seconds = perf_counter() - started
    notebook.metadata = metadata
    if save and error is None:
        nbformat.write(notebook, path)
    return Outcome(path.stem, seconds, text_outputs(notebook), error)


def run_script(path: Path, settings: Mapping[str, str]) -> Outcome:
    """Execute a script, with the settings in its environment."""
    started = perf_counter()
    environment = {**os.environ, **QUIET, **settings}
    process = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, encoding="utf-8"
    )
    error = last_line(process.stderr) or f"exit status {process.returncode}" if process.returncode else None
    return Outcome(path.stem, perf_counter() - started, process.stdout, error)


def run_example(path: Path, settings: Mapping[str, str], *, save: bool = False) -> Outcome:
    """Execute a notebook or a script."""
    if path.suffix == ".ipynb":
        return run_notebook(path, settings, save=save)
    return run_script(path, settings)


def text_outputs(notebook: Any) -> str:
    """All text in a notebook's outputs, HTML included."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return "\n".join(map(_text, outputs))


def examples(folder: Path, names: Sequence[str] = ()) -> list[Path]:
    """The examples of a folder, or those called `names`; ValueError for an unknown name."""
    by_name = {path.stem: path for path in sorted(folder.iterdir()) if _is_example(path)}
    for name in names:
        if name not in by_name:
            raise ValueError(f"example {name!r}; allowed: {', '.join(by_name)}")
    return [by_name[name] for name in names or by_name]


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The environment variables that the examples read. --target without --draft means no draft model."""
    settings = {}
    if options.target is not None:
        settings = {"SLIPSTREAM_TARGET": options.target, "SLIPSTREAM_DRAFT": options.draft or ""}
    if options.max_tokens is not None:
        settings["SLIPSTREAM_MAX_TOKENS"] = str(options.max_tokens)
    return settings


def main(arguments: Sequence[str] | None = None, folder: Path = HERE) -> int:
    """Run examples and print a line for each; returns 1 if one failed."""
    parser = argparse.ArgumentParser(description="Run the examples.")
    parser.add_argument("names", nargs="*", help="file names without ending (default: all)")
    parser.add_argument("--target", help="hub id, folder or smollm2 (default: smollm2)")
    parser.add_argument("--draft", help="draft model of --target (default: drafts are looked up in the text)")
    parser.add_argument("--max-tokens", type=_positive, help="generate at most this many tokens")
    parser.add_argument("--save", action="store_true", help="write the outputs into the notebooks")
    options = parser.parse_args(arguments)
    if options.draft is not None and options.target is None:
        parser.error("--draft needs --target")
    try:
        chosen = examples(folder, options.names)
    except ValueError as error:
        parser.error(str(error))
    failed = False
    for path in chosen:
        outcome = run_example(path, settings_of(options), save=options.save)
        verdict = "ok" if outcome.error is None else f"failed: {outcome.error}"
        print(f"{outcome.name:26} {outcome.seconds:7.1f} s  {verdict}", flush=True)
        failed |= outcome.error is not None
    return int(failed)


def last_line(text: str) -> str:
    """The last line that is not empty, without terminal colors: of an error, the line with its message."""
    lines = [line for line in COLORS.sub("", text).splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _text(output: Any) -> str:
    if output.output_type == "stream":
        return str(output.text)
    if output.output_type == "error":
        return f"{output.ename}: {output.evalue}"
    return "\n".join(str(data) for kind, data in output.data.items() if kind.startswith("text/"))


def _resources(path: Path) -> dict[str, Any]:
    return {"metadata": {"path": str(path.parent)}}


def _is_example(path: Path) -> bool:
    return path.suffix == ".ipynb" or (path.suffix == ".py" and path.name != Path(__file__).name)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: a whole number, 1 or more")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
