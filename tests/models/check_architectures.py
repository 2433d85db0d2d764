"""Check every causal language model of transformers: tiny random models, our texts against `generate`'s.

Each runs as it is and, if that works, with fast=True and in bfloat16, wide enough for the kernels. Texts are longer
than every window and other limit of a model.

Usage, from the root: python -m tests.models.check_architectures [TYPE ...] [--json FILE] [--table]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error", OMP_NUM_THREADS="1")  # before torch is imported

from tests.support.architecture_checks import KERNELS, Outcome, check
from tests.support.architectures import model_types

SECONDS, TOGETHER = 240, 2
SERVER = get_context("forkserver")  # each model has a process of its own; they share the imports
WORDS = {"works": "works", "refused": "refused", "differs": "differs", "crashes": "crashes", "unbuilt": "not built"}


def main() -> int:
    """Print a line for each architecture, and totals; 1 if any differs or crashes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", metavar="TYPE", help="model types; by default all of them")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the outcomes as JSON")
    parser.add_argument("--table", action="store_true", help="end with a Markdown table")
    options = parser.parse_args()
    if unknown := sorted(set(options.types) - set(model_types())):
        parser.error(f"unknown model types: {', '.join(unknown)}")
    outcomes = {}
    for name, outcome in check_all(options.types or model_types()):
        outcomes[name] = outcome
        print(line(name, outcome), flush=True)
    fast = [outcome.fast for outcome in outcomes.values() if outcome.fast is not None]
    wide = [outcome.wide for outcome in outcomes.values() if outcome.wide is not None]
    counts = Counter(outcome.verdict for outcome in (*outcomes.values(), *fast, *wide))
    print(f"{len(outcomes)} architectures: {totals(list(outcomes.values()))}")
    fused = sum("fused layers" in outcome.how for outcome in fast)
    print(f"{len(fast)} of them with fast=True: {totals(fast)}; {fused} by fused layers")
    reached = Counter(outcome.kernels for outcome in wide)
    by_kernels = ", ".join(f"{reached[words]} {words}" for words in KERNELS)
    print(f"{len(wide)} of them in bfloat16, wide enough for the kernels: {totals(wide)}; {by_kernels}")
    if options.json:
        rows = {name: asdict(outcome) for name, outcome in outcomes.items()}
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.table:
        print("", *table(outcomes), sep="\n")
    return int(counts["differs"] + counts["crashes"] > 0)


def totals(outcomes: list[Outcome]) -> str:
    """The number of outcomes per verdict."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    return ", ".join(f"{counts[verdict]} {words}" for verdict, words in WORDS.items())


def line(name: str, outcome: Outcome) -> str:
    """One architecture in words, in two columns."""
    fast = "" if outcome.fast is None else f" | fast=True: {column(outcome.fast)}"
    wide = "" if outcome.wide is None else f" | wide: {column(outcome.wide)}"
    return f"{name}, {column(outcome)}{fast}{wide}"


def column(outcome: Outcome) -> str:
    """An outcome in words."""
    words = f": {outcome.detail}" if outcome.detail else ""
    if outcome.margin:
        words += f" (margin {outcome.margin:.1e} of the largest logit)"
    if outcome.verdict == "works":
        ties = f", {outcome.ties} near-ties" if outcome.ties else ""
        words = f" ({outcome.tokens_per_round:.1f} tokens a round{ties}; {outcome.how}; {outcome.kernels})"
    return f"{WORDS[outcome.verdict]}{words}"


def table(outcomes: dict[str, Outcome]) -> list[str]:
    """The outcomes as rows of a Markdown table, equal ones in one row."""
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    for name, outcome in outcomes.items():
        why = outcome.detail.partition(" is not supported: ")
        fast = outcome.fast
        with_fast = "" if fast is None else WORDS[fast.verdict]
        if fast is not None and "fused layers" in fast.how:
            with_fast += ", fused layers"
        wide = outcome.wide
        in_bfloat16 = "" if wide is None else wide.kernels if wide.verdict == "works" else WORDS[wide.verdict]
        key = WORDS[outcome.verdict], outcome.how or why[2] or why[0], with_fast, in_bfloat16
        groups.setdefault(key, []).append(name)
    ordered = sorted(groups.items(), key=lambda item: (list(WORDS.values()).index(item[0][0]), -len(item[1])))
    rows = [f"| {key[0]} | {len(names)} | {', '.join(names)} | {' | '.join(key[1:])} |" for key, names in ordered]
    heading = "| | count | model types | how, or why not | with fast=True | wide, in bfloat16 |"
    return [heading, "|---|---|---|---|---|---|", *rows]


def check_all(names: list[str]) -> Iterator[tuple[str, Outcome]]:
    """Each architecture in a process of its own, a few at a time, in order."""
    SERVER.set_forkserver_preload(["transformers.generation.utils", "tests.support.architecture_checks"])
    with ThreadPoolExecutor(TOGETHER) as pool:
        yield from zip(names, pool.map(check_apart, names), strict=True)


def check_apart(name: str) -> Outcome:
    """One architecture in a process of its own, which may crash or take too long."""
    receiver, sender = SERVER.Pipe(duplex=False)
    process = SERVER.Process(target=report, args=(name, sender), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(SECONDS):
            return Outcome("crashes", f"no answer after {SECONDS} s")
        return receiver.recv()
    except EOFError:
        process.join()
        return Outcome("crashes", f"the process ended with code {process.exitcode}")
    finally:
        process.kill()
        process.join()


def report(name: str, sender: Connection) -> None:
    """What the process of an architecture does."""
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # models print as they like
    warnings.filterwarnings("ignore")
    sender.send(check(name))


if __name__ == "__main__":
    sys.exit(main())
