"""How well do the retrieval drafters draft known texts, and what do they cost? No model is run.

    slipstream bench --target smollm2 --arms none --out RUNS
    python benchmarks/drafter_replay.py RUNS/runs.jsonl --tokenizer smollm2
    python benchmarks/drafter_replay.py README.md docs/*.md --tokenizer smollm2 --row-length 100000

The target is taken to say exactly the recorded text, as greedy decoding would: a round keeps the draft tokens that
agree with it, of a tree the longest path that does, and adds one. Inputs: see `recorded_texts.py`. The texts of a
family are replayed in order with one drafter, whose store, if it has one, learns from each. Drafters that learn from
the target's rankings are told those of the recorded positions, where the recording has them (`ranking_record.py`);
what they would learn behind rejected tokens is not known.

With --trees each drafter drafts as for num_draft_tokens="auto", as far as is likely, and those that can branch do so
twice: chains, then trees of at most as many tokens. --least cuts both to the tokens that are so likely to be accepted,
as costs would; where drafts have no acceptance probabilities nothing is cut.

    python benchmarks/ranking_record.py smollm2 recorded.jsonl
    python benchmarks/drafter_replay.py recorded.jsonl --trees --drafter suffix --drafter token_recycling

With --row-length N there is a second table: rows that begin with N tokens (all texts, over and over), then 2,000 rounds
of which each commits one token. Times are those of this process on the processor, so that other load matters less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from pathlib import Path
from time import process_time
from typing import Annotated

import torch
import typer
from recorded_texts import Recorded, read_texts, tokenizer_of
from rich import box
from rich.table import Table
from terminal import console, run

from slipstream import Drafter, SamplingParams
from slipstream.core.interfaces import Observer
from slipstream.core.rng import Race
from slipstream.core.types import Draft, Row, Verdict
from slipstream.drafters import Setup, load, traits
from slipstream.drafters.suffix import SuffixDrafter
from slipstream.models.weights.model_files import quiet
from slipstream.sampling.sampler import Sampler

CPU = torch.device("cpu")
ROUNDS = 2000  # of the second table
DRAFTERS = ["ngram", "ngram_table", "suffix:outputs=0", "suffix"]
Variant = tuple[str, str, Setup]  # its title, the drafter's name and what it is built from


@dataclass
class Tally:
    """What the rounds of one drafter on one family add up to."""

    tokens: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Count another tally in."""
        for one in fields(other):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

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
    least: float = 0.0  # acceptance probability below which tokens are not verified, where it is known

    def __post_init__(self) -> None:
        self._race = Race(self.vocab_size, CPU)

    def play(self, text: Recorded, into: Tally) -> None:
        """Rounds until the whole output is said."""
        row, output = _row(text.prompt, len(text.output)), text.output
        while (at := row.num_output_tokens) < len(output):
            accepted = _accepted(self.propose(row, into), output[at:])
            if text.rankings is not None:
                self._tell(row, output[at : at + accepted], text.rankings[at : at + accepted + 1])
            row.commit(output[at : at + accepted + 1])
            into.accepted += accepted
        into.tokens += len(output)

    def propose(self, row: Row, into: Tally) -> Draft:
        """One draft, timed and counted."""
        sampler = Sampler([row], self._race, self.vocab_size, CPU)
        length = min(self.num_draft_tokens, row.remaining - 1)
        started = process_time()
        draft = self.drafter.propose([row], [length], sampler)
        into.seconds += process_time() - started
        if draft.acceptance_probs is not None:
            draft = draft.cut([sum(prob >= self.least for prob in known or ()) for known in draft.acceptance_probs])
        into.rounds += 1
        into.drafted += draft.lengths[0]
        return draft

    def _tell(self, row: Row, accepted: list[int], rankings: list[list[int]]) -> None:
        """Let a drafter that observes see what the target ranked highest along the accepted tokens and after them."""
        if isinstance(self.drafter, Observer):
            logits = torch.zeros(1, len(rankings), self.vocab_size)
            ranked = torch.tensor([rankings])
            logits.scatter_(2, ranked, torch.arange(ranked.shape[2], 0, -1.0).expand(ranked.shape))
            draft = Draft.from_lists([accepted], CPU)
            verdict = Verdict(torch.tensor([len(accepted)]), torch.tensor([rankings[-1][0]]))
            self.drafter.observe([row], draft, logits, verdict)


def _accepted(draft: Draft, text: Sequence[int]) -> int:
    """How many tokens of the text the draft has, from its beginning on."""
    tokens: list[int] = draft.tokens[0, : draft.lengths[0]].tolist()
    parents = range(-1, len(tokens) - 1) if draft.parents is None else draft.parents[0]
    node, count = -1, 0
    for came in text:
        children = [n for n, parent in enumerate(parents) if parent == node and tokens[n] == came]
        if not children:
            break
        node, count = children[0], count + 1
    return count


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
    trees: Annotated[bool, typer.Option("--trees", help="compare trees with chains")] = False,
    least: Annotated[float, typer.Option(min=0, max=1, help="of --trees: verify no token less likely than this")] = 0,
) -> None:
    """Print a line per family and drafter."""
    quiet()
    texts = read_texts(inputs, tokenizer_of(tokenizer), prompt_file, prompt_share, max_tokens)
    setup = Setup(CPU, 1 + max(token for text in texts for token in text.token_ids()))
    made = [*_in_both_ways(drafter, setup)] if trees else [(name, name, setup) for name in drafter]
    _report(texts, made, num_draft_tokens, least)
    if row_length:
        _long_row(texts, made, num_draft_tokens, row_length)


def _in_both_ways(drafters: list[str], setup: Setup) -> Iterator[Variant]:
    for name in drafters:
        told = replace(setup, acceptance_probs=True)
        yield f"{name}, chain", name, told
        if traits(name).branches:
            yield f"{name}, tree", name, replace(told, siblings=1)


def _report(texts: list[Recorded], variants: list[Variant], num_draft_tokens: int, least: float) -> None:
    families = [*dict.fromkeys(text.family for text in texts)]
    table = _table("family", "drafter", "tokens per forward", "drafted per round", "acceptance", "us per round")
    sums = {title: Tally() for title, *_ in variants}
    for family in families:
        for title, name, setup in variants:
            replay, tally = Replay(load(name, setup), setup.vocab_size, num_draft_tokens, least), Tally()
            for text in texts:
                if text.family == family:
                    replay.play(text, tally)
            table.add_row(family, title, *tally.cells())
            sums[title].add(tally)
        table.add_section()
    for title, tally in sums.items():
        table.add_row("all", title, *tally.cells())
    console.print(table)


def _long_row(texts: list[Recorded], variants: list[Variant], num_draft_tokens: int, row_length: int) -> None:
    tokens = [*islice(cycle(token for text in texts for token in (*text.prompt, *text.output)), row_length + ROUNDS)]
    unique = sum(len(text.prompt) + len(text.output) for text in texts)
    table = _table("drafter", f"first {row_length:,} tokens, us each", "then us per token and draft", "bytes per token")
    for title, name, setup in variants:
        made = load(name, setup)
        replay, first, then = Replay(made, setup.vocab_size, num_draft_tokens), Tally(), Tally()
        row = _row(tokens[:row_length], ROUNDS + num_draft_tokens + 1)
        replay.propose(row, first)
        for token in tokens[row_length:]:
            row.commit([token])
            replay.propose(row, then)
        size = f"{made.memory_bytes() / len(row.tokens):.0f}" if isinstance(made, SuffixDrafter) else "-"
        table.add_row(title, f"{first.seconds / row_length * 1e6:.1f}", f"{then.seconds / then.rounds * 1e6:.1f}", size)
    console.print(table)
    console.print(f"{min(unique, len(tokens)):,} of the tokens are different texts; the rest repeats them.")


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE)
    for column in columns:
        table.add_column(column, justify="left" if column in ("family", "drafter") else "right")
    return table


if __name__ == "__main__":
    run(main)
