"""How well do the retrieval drafters draft known texts, and what do they cost? No model is run.

    slipstream bench --target smollm2 --arms none --out RUNS
    python benchmarks/drafter_replay.py RUNS/runs.jsonl --tokenizer smollm2
    python benchmarks/drafter_replay.py README.md docs/*.md --tokenizer smollm2 --row-length 100000

The target is taken to say exactly the recorded text, as greedy decoding would: a round keeps the draft tokens that
agree with it and adds one. Inputs: `runs.jsonl` of a benchmark (the texts of its first arm; prompts are those that
come with the package, or --prompt-file), other .jsonl files with {"prompt": [ids], "output": [ids], "family": name} in
each line, or text files, of which the first part is the prompt. The texts of a family are replayed in order with one
drafter, whose store, if it has one, learns from each.

With --row-length N there is a second table: rows that begin with N tokens (all texts, over and over), then 2,000 rounds
of which each commits one token. Times are those of this process on the processor, so that other load matters less.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from time import process_time
from typing import Annotated

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table

from slipstream import Drafter, SamplingParams, SlipstreamError, UsageError
from slipstream.bench.plan import name_prompts
from slipstream.bench.records import FILE, read_records
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters import Setup, load
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.models.hf.hf_tokenizer import load_tokenizer
from slipstream.models.hf.model_files import quiet, resolve
from slipstream.models.toy import ToyTokenizer
from slipstream.sampling.sampler import Sampler
from slipstream.text.detokenizer import Tokenizer
from slipstream.text.prompts import builtin_prompts, read_prompts

CPU = torch.device("cpu")
ROUNDS = 2000  # of the second table
DRAFTERS = ["ngram", "ngram_table", "suffix:outputs=0", "suffix"]
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass(frozen=True)
class Recorded:
    """A prompt and what was said to it, as token ids."""

    family: str
    prompt: list[int]
    output: list[int]


@dataclass
class Tally:
    """What the rounds of one drafter on one family add up to."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def cells(self) -> list[str]:
        """Tokens per forward, drafted tokens per round, acceptance rate, microseconds per round."""
        rate = f"{self.accepted / self.drafted:.2f}" if self.drafted else "-"
        each = f"{self.drafted / self.rounds:.1f}", rate, f"{self.seconds / self.rounds * 1e6:.0f}"
        return [f"{self.tokens / self.rounds:.2f}", *each]


@dataclass
class Replay:
    """A drafter under test on a vocabulary of a given size."""

    drafter: Drafter
    vocab_size: int
    num_draft_tokens: int

    def __post_init__(self) -> None:
        self._race = Race(self.vocab_size, CPU)

    def play(self, text: Recorded, into: Tally) -> None:
        """Rounds until the whole output is said."""
        row, output = _row(text.prompt, len(text.output)), text.output
        while (at := row.num_output_tokens) < len(output):
            draft = self.propose(row, into)
            accepted = next((i for i, token in enumerate(draft) if token != output[at + i]), len(draft))
            row.commit(output[at : at + accepted + 1])
            into.accepted += accepted
        into.tokens += len(output)

    def propose(self, row: Row, into: Tally) -> list[int]:
        """One draft, timed and counted."""
        sampler = Sampler([row], self._race, self.vocab_size, CPU)
        length = min(self.num_draft_tokens, row.remaining - 1)
        started = process_time()
        draft = self.drafter.propose([row], [length], sampler)
        into.seconds += process_time() - started
        into.rounds += 1
        into.drafted += draft.lengths[0]
        tokens: list[int] = draft.tokens[0, : draft.lengths[0]].tolist()
        return tokens


def _row(prompt: Sequence[int], count: int) -> Row:
    return Row(0, list(prompt), SamplingParams(max_tokens=count), seed=0)


def main(
    inputs: list[Path],
    tokenizer: Annotated[str, typer.Option(help="model whose tokenizer is used; toy for bytes")] = "toy",
    drafter: Annotated[list[str], typer.Option(help="may be given several times")] = DRAFTERS,
    num_draft_tokens: Annotated[int, typer.Option(min=1, max=64)] = 7,
    prompt_file: Annotated[
        Path | None, typer.Option(help="the prompts of runs.jsonl, if not the package's own")
    ] = None,
    prompt_share: Annotated[float, typer.Option(min=0.01, max=0.99, help="of a text file")] = 0.5,
    max_tokens: Annotated[int, typer.Option(min=1, help="of each output")] = 1000,
    row_length: Annotated[int, typer.Option(min=0, help="tokens before the rounds of the second table; 0: none")] = 0,
) -> None:
    """Print a line per family and drafter."""
    quiet()
    try:
        _report(
            read_texts(inputs, tokenizer_of(tokenizer), prompt_file, prompt_share, max_tokens),
            drafter,
            num_draft_tokens,
            row_length,
        )
    except SlipstreamError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2 if isinstance(error, UsageError) else 1) from error


def _report(texts: list[Recorded], drafters: list[str], num_draft_tokens: int, row_length: int) -> None:
    largest = max(token for text in texts for token in (*text.prompt, *text.output))
    setup = Setup(CPU, largest + 1)
    families = [*dict.fromkeys(text.family for text in texts)]
    table = _table("family", "drafter", "tokens per forward", "drafted per round", "acceptance", "us per round")
    for family in families:
        for name in drafters:
            replay, tally = Replay(load(name, setup), setup.vocab_size, num_draft_tokens), Tally()
            for text in texts:
                if text.family == family:
                    replay.play(text, tally)
            table.add_row(family, name, *tally.cells())
        table.add_section()
    console.print(table)
    if row_length:
        _long_row(texts, drafters, setup, num_draft_tokens, row_length)


def _long_row(texts: list[Recorded], drafters: list[str], setup: Setup, num_draft_tokens: int, row_length: int) -> None:
    tokens = [*islice(cycle(token for text in texts for token in (*text.prompt, *text.output)), row_length + ROUNDS)]
    unique = sum(len(text.prompt) + len(text.output) for text in texts)
    table = _table("drafter", f"first {row_length:,} tokens, us each", "then us per token and draft", "bytes per token")
    for name in drafters:
        made = load(name, setup)
        replay, first, then = Replay(made, setup.vocab_size, num_draft_tokens), Tally(), Tally()
        row = _row(tokens[:row_length], ROUNDS + num_draft_tokens + 1)
        replay.propose(row, first)
        for token in tokens[row_length:]:
            row.commit([token])
            replay.propose(row, then)
        size = f"{made.memory_bytes() / len(row.tokens):.0f}" if isinstance(made, SuffixDrafter) else "-"
        table.add_row(name, f"{first.seconds / row_length * 1e6:.1f}", f"{then.seconds / then.rounds * 1e6:.1f}", size)
    console.print(table)
    console.print(f"{min(unique, len(tokens)):,} of the tokens are different texts; the rest repeats them.")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column in ("family", "drafter") else "right")
    return table


def tokenizer_of(source: str) -> Tokenizer:
    """The tokenizer of a model by its name."""
    found = ToyTokenizer() if source == "toy" else load_tokenizer(source, resolve(source))
    if found is None:
        raise UsageError(f"model {source!r} has no tokenizer; allowed: a model with one, or toy")
    return found


def read_texts(
    inputs: Sequence[Path], tokenizer: Tokenizer, prompt_file: Path | None, share: float, max_tokens: int
) -> list[Recorded]:
    """The texts of the inputs, see above."""
    found: list[Recorded] = []
    for path in inputs:
        if path.name == FILE:
            found += _of_runs(path, tokenizer, prompt_file)
        elif path.suffix == ".jsonl":
            found += _of_ids(path)
        else:
            ids = tokenizer.encode(read_prompts(path)[0].prompt)
            cut = int(len(ids) * share)
            found.append(Recorded(path.suffix.lstrip(".") or "text", ids[:cut], ids[cut:]))
    texts = [Recorded(t.family, t.prompt, t.output[:max_tokens]) for t in found if t.prompt and t.output]
    if not texts:
        raise UsageError(f"{', '.join(map(str, inputs))}: no texts; allowed: inputs with a prompt and an output")
    return texts


def _of_runs(path: Path, tokenizer: Tokenizer, prompt_file: Path | None) -> Iterator[Recorded]:
    """The texts that the first arm said to each prompt."""
    header, runs = read_records(path.parent)
    named = name_prompts(builtin_prompts() if prompt_file is None else read_prompts(prompt_file))
    prompts = {prompt.digest: prompt for prompt in named}
    first, digests, seen = header.settings["arms"][0], header.settings["prompts"], set[str]()
    for run in runs:
        for name, text in zip(run.prompts, run.texts, strict=run.error is None):
            if run.arm != first or name in seen:
                continue
            seen.add(name)
            if digests[name] not in prompts:
                raise UsageError(f"{str(path)!r}: prompt {name!r} is not known; allowed: its file as --prompt-file")
            prompt = prompts[digests[name]].text
            chat = tokenizer.has_chat_template and header.settings["chat"]
            ids = tokenizer.chat([{"role": "user", "content": prompt}]) if chat else tokenizer.encode(prompt)
            yield Recorded(name.partition("/")[0], ids, text)


def _of_ids(path: Path) -> Iterator[Recorded]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(filter(str.strip, lines), 1):
        try:
            item = json.loads(line)
            yield Recorded(str(item.get("family", path.stem)), list(item["prompt"]), list(item["output"]))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise UsageError(
                f"{str(path)!r}, line {number}: {error!r}; allowed: an object with prompt and output as lists of ids"
            ) from error


if __name__ == "__main__":
    typer.run(main)
