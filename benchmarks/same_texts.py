"""Do two checkouts of Slipstream generate the same texts, to the bit of every token id?

    python benchmarks/same_texts.py BEFORE AFTER --target smollm2 --draft smollm2 --prompts 60 --prompt-file FILE
    python benchmarks/same_texts.py BEFORE AFTER --num-draft-tokens 4x2                 # trees
    python benchmarks/same_texts.py BEFORE AFTER --params '{"constraint": {"json_object": true}}'
    python benchmarks/same_texts.py BEFORE AFTER --target T --draft D --keep DIR    # BEFORE runs only once
    python benchmarks/same_texts.py BEFORE AFTER --target toy --self-check          # must find a difference

Each checkout runs in a process of its own, on the same prompts, with their predictions if they have any, and with the
prompt's number as the seed. Arms draft a fixed number of tokens, so that their texts cannot depend on measured times;
only "auto" chooses drafter and length itself, and "none" only tries predictions. A draft model is loaded in 4 bits, so
that it differs from the target even if both have the same name. The script uses only the public interface and does not
measure speed. Exit code 1 if a text differs.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from slipstream.text.prompt_sets import NamedPrompt

DRAFTERS, NEEDS_DRAFT = "none,ngram,suffix,model,auto", "model"
WORKER = "--worker"  # runs this script as the process of one checkout, which reads its job from standard input

Texts = dict[str, list[list[int]]]  # arm -> token ids of each prompt's text


@dataclass(frozen=True)
class Job:
    """The work of both checkouts."""

    target: str
    draft: str | None
    options: dict[str, Any]  # further arguments of the decoder
    params: dict[str, Any]  # further arguments of `SamplingParams`
    num_draft_tokens: int | str  # of all arms but "auto"
    max_tokens: int
    batch: int  # prompts decoded together
    drafters: list[str]
    temperatures: list[float]
    prompts: list[str]
    predictions: list[str | None]


@dataclass(frozen=True)
class Comparison:
    """The comparison of one arm's texts."""

    identical: int
    different: int
    first: tuple[int, int] | None  # prompt and position of the first difference


def compare(before: Sequence[Sequence[int]], after: Sequence[Sequence[int]]) -> Comparison:
    """Compare an arm's texts of two checkouts. A text that ends earlier differs where it ends."""
    if len(before) != len(after):
        raise ValueError(f"{len(before)} texts before, {len(after)} after; allowed: as many")
    positions = [_first_difference(*pair) for pair in zip(before, after, strict=True)]
    places = [(prompt, position) for prompt, position in enumerate(positions) if position is not None]
    return Comparison(len(before) - len(places), len(places), places[0] if places else None)


def _first_difference(before: Sequence[int], after: Sequence[int]) -> int | None:
    return next((i for i, (a, b) in enumerate(zip_longest(before, after)) if a != b), None)


def work(job: Job, checkout: Path) -> None:
    """Generate all texts with the code of `checkout` and print them as JSON; runs in a process of its own."""
    import slipstream
    from slipstream import Constraint, SamplingParams, SpeculativeDecoder

    home = Path(slipstream.__file__).resolve()
    assert home.is_relative_to(checkout / "src"), f"{home} is not in {checkout / 'src'}"
    loaded = SpeculativeDecoder(job.target, job.draft, **job.options)
    print(f"{home.parent}: {'' if loaded.reproducible else 'not '}reproducible", file=sys.stderr, flush=True)
    decoders = {
        name: loaded.using(name, num_draft_tokens="auto" if name in ("none", "auto") else job.num_draft_tokens)
        for name in job.drafters
    }
    common = {"max_tokens": job.max_tokens} | job.params
    if "constraint" in common:
        common["constraint"] = Constraint(**common["constraint"])
    texts: Texts = {f"{name} at {temperature:g}": [] for name in job.drafters for temperature in job.temperatures}
    for first in range(0, len(job.prompts), job.batch):
        group = job.prompts[first : first + job.batch]
        for name, decoder in decoders.items():  # arm after arm, so that the prompts stay in the KV cache
            for temperature in job.temperatures:
                params = [
                    SamplingParams(**common | {"temperature": temperature, "seed": seed, "prediction": prediction})
                    for seed, prediction in enumerate(job.predictions[first : first + job.batch], first)
                ]
                texts[f"{name} at {temperature:g}"] += [result.token_ids for result in decoder.generate(group, params)]
        print(f"{first + len(group)} of {len(job.prompts)} prompts", file=sys.stderr, flush=True)
    print(json.dumps(texts))


def texts_of(checkout: Path, job: Job, keep: Path | None) -> Texts:
    """The texts of a checkout, from the folder `keep` if it has those of the checkout's commit, else generated."""
    commit = _commit(checkout)
    kept = None if keep is None or commit is None else keep / f"{commit[:12]}-{_digest(commit, job)}.json"
    if kept is not None and kept.exists():
        return dict(json.loads(kept.read_text(encoding="utf-8")))
    command, sources = [sys.executable, __file__, WORKER, str(checkout)], {"PYTHONPATH": str(checkout / "src")}
    process = subprocess.run(
        command,
        input=json.dumps(asdict(job)),
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | sources,
        encoding="utf-8",
    )
    if process.returncode:
        raise SystemExit(f"{checkout}: the worker failed with exit code {process.returncode}")
    texts = process.stdout.splitlines()[-1]
    if kept is not None:
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(texts, encoding="utf-8")
    return dict(json.loads(texts))


def _commit(checkout: Path) -> str | None:
    """The checkout's commit, or None if its sources have uncommitted changes or are not under git."""
    git = ["git", "-C", str(checkout)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, encoding="utf-8")
    changed = subprocess.run(
        [*git, "status", "--porcelain", "--", "src"], capture_output=True, text=True, encoding="utf-8"
    )
    is_clean = head.returncode == changed.returncode == 0 and not changed.stdout.strip()
    return head.stdout.strip() if is_clean else None


def _digest(commit: str, job: Job) -> str:
    key = {"commit": commit, "torch": version("torch"), **asdict(job)}
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()[:12]


def choose_prompts(files: Sequence[Path], count: int) -> list[NamedPrompt]:
    """`count` of the files' prompts, taken from their categories in rotation."""
    from slipstream.text.prompt_sets import read_prompts  # not at the top: a worker may have an older checkout's code

    families: dict[str, list[NamedPrompt]] = {}
    for file in files:
        for prompt in read_prompts(file):
            families.setdefault(prompt.category, []).append(prompt)
    rotation = [prompt for turn in zip_longest(*families.values()) for prompt in turn if prompt is not None]
    if count > len(rotation):
        raise typer.BadParameter(f"--prompts {count}; the files hold {len(rotation)}; add a --prompt-file")
    return rotation[:count]


def show(comparisons: dict[str, Comparison]) -> None:
    """Print one line for each arm."""
    table = Table("arm", "identical", "different", "first difference")
    for arm, comparison in comparisons.items():
        place = "-" if comparison.first is None else "prompt {}, token {}".format(*comparison.first)
        table.add_row(arm, str(comparison.identical), str(comparison.different), place)
    Console(highlight=False).print(table)


def main(
    before: Path,
    after: Annotated[Path | None, typer.Argument(help="omit it with --keep to save only BEFORE's texts")] = None,
    target: str = "smollm2",
    draft: str | None = None,
    options: Annotated[str, typer.Option(help="further arguments of the decoder, as JSON")] = "{}",
    prompts: Annotated[int, typer.Option(min=1)] = 40,
    max_tokens: Annotated[int, typer.Option(min=1)] = 48,
    params: Annotated[str, typer.Option(help="further SamplingParams, as JSON; constraint: its fields")] = "{}",
    drafters: Annotated[str | None, typer.Option(help=f"by default {DRAFTERS}; model needs --draft")] = None,
    num_draft_tokens: Annotated[str, typer.Option(help="of arms but none and auto; DEPTHxWIDTH: trees")] = "4",
    temperatures: str = "0,0.8",
    batch: Annotated[int, typer.Option(min=1, help="prompts decoded together")] = 1,
    prompt_file: Annotated[Path | None, typer.Option(help="JSON lines to add to the package's prompts")] = None,
    keep: Annotated[
        Path | None, typer.Option(help="folder that keeps BEFORE's texts if its sources are committed")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="write the comparison and all texts here")] = None,
    self_check: Annotated[
        bool, typer.Option(help="change one token of AFTER; exit code 1 shows that it was found")
    ] = False,
) -> None:
    """Compare the texts of two checkouts, arm by arm."""
    if after is None and keep is None:
        raise typer.BadParameter("AFTER is missing; allowed: without it only with --keep DIR")
    names = (drafters or DRAFTERS).split(",")
    if draft is None:
        if drafters and NEEDS_DRAFT in names:
            raise typer.BadParameter(f"--drafters {drafters}, but there is no draft model; give --draft")
        names = [name for name in names if name != NEEDS_DRAFT]
    further = ({"draft_dtype": "int4"} if draft else {}) | json.loads(options)
    chosen = choose_prompts(
        [*(before.resolve() / "src").rglob("prompts.jsonl"), *([prompt_file] if prompt_file else [])], prompts
    )
    job = Job(
        target=target,
        draft=draft,
        options=further,
        params=json.loads(params),
        num_draft_tokens=int(num_draft_tokens) if num_draft_tokens.isdecimal() else num_draft_tokens,
        max_tokens=max_tokens,
        batch=batch,
        drafters=names,
        temperatures=list(map(float, temperatures.split(","))),
        prompts=[prompt.prompt for prompt in chosen],
        predictions=[prompt.prediction for prompt in chosen],
    )
    texts = {"before": texts_of(before.resolve(), job, keep)}
    if after is None:
        return
    texts["after"] = texts_of(after.resolve(), job, None)
    if self_check:
        next(iter(texts["after"].values()))[0][-1] += 1
    comparisons = {arm: compare(texts["before"][arm], texts["after"][arm]) for arm in texts["before"]}
    show(comparisons)
    if json_file is not None:
        report = {"job": asdict(job), "comparisons": {arm: asdict(c) for arm, c in comparisons.items()}, "texts": texts}
        json_file.write_text(json.dumps(report), encoding="utf-8")
    sys.exit(any(comparison.different for comparison in comparisons.values()))


if __name__ == "__main__":
    if sys.argv[1:2] == [WORKER]:
        work(Job(**json.load(sys.stdin)), Path(sys.argv[2]))
    else:
        typer.run(main)
