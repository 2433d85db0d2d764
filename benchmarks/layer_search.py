"""Which layers of a model draft best for it, and would that pay? A small search on the user's prompts.

    python benchmarks/layer_search.py smollm2 PROMPTS.jsonl
    python benchmarks/layer_search.py TARGET PROMPTS.jsonl --save

Candidates are the first 1, 2, ... layers, and the layers that remain when the least missed one is removed again and
again. They are judged on the target's own greedy texts, cut into blocks of `--depth` tokens. In each block a candidate
starts from the target's KV cache of all tokens before it, as a draft does, and then reads the target's tokens.
Agreement is the share of positions at which its first choice is the target's; how many of them come in a row tells how
long its drafts would be.

Forwards of the target are timed at every width. A draft step with all layers costs a plain forward; a step with one
layer is timed as a share of that; the steps in between are taken as linear in the number of layers. The speed-up is the
one that `slipstream.bench.speed_model` predicts from these figures at the best draft length.

--save writes the best candidate, if it pays, to the cache folder, where the drafter "layer_skip" finds it for this
model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from time import perf_counter
from typing import Annotated

import torch
import typer
from rich import box
from rich.table import Table
from terminal import Count, console, run
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.formula import expected_tokens, predicted_speed_up
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.core.interfaces import Backend
from slipstream.drafters.layer_skip import layer_subset, num_layers, remember_layers
from slipstream.models.weights.model_files import quiet
from slipstream.text.prompt_sets import NamedPrompt, read_prompts, spread

SHOWN = 10
TURNS = 20  # timed draft steps of each kind, of which the fastest counts


@dataclass(frozen=True)
class Candidate:
    """A choice of layers and its predicted value. step: time of a draft step, in plain forwards of the target."""

    layers: tuple[int, ...]
    agreement: float
    accepted: tuple[float, ...]
    step: float = 0.0
    num_draft_tokens: int = 0
    tokens_per_round: float = 1.0
    speed_up: float = 0.0


class Truth:
    """The target's texts, with their KV cache in the first slots. Candidates use equally many after them."""

    def __init__(self, decoder: SpeculativeDecoder, prompts: Sequence[list[int]], max_tokens: int, depth: int) -> None:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        decoder.forget()
        outputs = [result.token_ids for result in decoder.generate(list(prompts), params)]
        self.texts = [ids + output for ids, output in zip(prompts, outputs, strict=True)]
        decoder.forget()  # its sessions must not reuse a KV cache that is about to be overwritten
        self.backend: Backend = decoder.target.backend
        self.depth, self._rows = depth, len(prompts)
        self._length = max(map(len, self.texts))
        self.backend.reserve(2 * self._rows, self._length + depth)
        for slot, text in enumerate(self.texts):
            tokens = torch.tensor([text[:-1]], device=self.backend.device)
            self.backend.forward(tokens, [0], first_slot=slot, logits=False)
        # backwards, so that no block reads what a block before it wrote
        self._blocks = [[len(ids) + offset for ids in prompts] for offset in range(max_tokens - depth, -1, -depth)]

    def judge(self, layers: Sequence[int]) -> Candidate:
        """Measure how often the layers' first choice is the target's, also in a row."""
        chosen = layer_subset(self.backend, layers)
        for slot in range(self._rows):
            self.backend.copy(slot, self._rows + slot, self._length)
        right = torch.cat([self._block(chosen, firsts) for firsts in self._blocks])
        in_a_row = right.long().cumprod(1).float().mean(0)
        return Candidate(tuple(layers), float(right.float().mean()), tuple(in_a_row.tolist()))

    def _block(self, chosen: Backend, firsts: Sequence[int]) -> Tensor:
        """[rows, depth]: whether the layers, given all tokens before it, choose the token firsts[i] + j of text i."""
        blocks = torch.tensor(
            [text[first - 1 : first + self.depth] for text, first in zip(self.texts, firsts, strict=True)]
        )
        blocks = blocks.to(self.backend.device)
        starts = [first - 1 for first in firsts]
        logits = chosen.forward(blocks[:, :-1], starts, first_slot=self._rows, logits=True)
        return (logits.argmax(-1) == blocks[:, 1:]).cpu()

    def share_of_one_layer(self, count: int) -> float:
        """Time of a draft step with one layer, over that of a step with all; they are timed in turns."""
        subsets, text = [layer_subset(self.backend, layers) for layers in ([0], range(count))], self.texts[0]
        token, fastest = torch.tensor([text[-1:]], device=self.backend.device), [float("inf")] * 2
        for turn in range(2 * TURNS):
            started = perf_counter()
            subsets[turn % 2].forward(token, [len(text) - 1], first_slot=self._rows, logits=True).sum().item()
            fastest[turn % 2] = min(fastest[turn % 2], perf_counter() - started)
        return min(1.0, fastest[0] / fastest[1])


@dataclass(frozen=True)
class Prices:
    """Costs of rounds. costs: measured without a drafter; one: time of a step with one layer, in steps with all."""

    costs: Costs
    one: float
    count: int

    def value(self, candidate: Candidate) -> Candidate:
        """The candidate with its predicted speed-up at its best draft length, which is at least 1."""
        share = (len(candidate.layers) - 1) / max(1, self.count - 1)
        step = (self.one + share * (1 - self.one)) * self.costs.forward(1, self.costs.width_for(1, 1))
        costs = replace(self.costs, draft_step={1: step}, draft_round={1: 0.0})
        acceptance = Acceptance(candidate.accepted, (1.0,) * len(candidate.accepted))
        lengths = range(1, acceptance.longest + 1)
        best = max(lengths, key=lambda n: predicted_speed_up(costs, acceptance, n))
        return replace(
            candidate,
            step=step / costs.plain(1, costs.width_for(1, 1)),
            num_draft_tokens=best,
            tokens_per_round=expected_tokens(acceptance, best),
            speed_up=predicted_speed_up(costs, acceptance, best),
        )


def candidates(truth: Truth, count: int, fewest: int) -> Iterator[Candidate]:
    """Judge the first 1, 2, ... layers; then all but the least missed one, again and again, down to `fewest`."""
    for first in range(1, count):
        yield truth.judge(range(first))
    layers = tuple(range(count))
    while len(layers) > fewest:
        tried = [truth.judge([i for i in layers if i != out]) for out in layers]
        best = max(tried, key=lambda candidate: (sum(candidate.accepted), candidate.agreement))
        yield best
        layers = best.layers


def spans(layers: Sequence[int]) -> str:
    """Layers as the drafter "layer_skip" spells them: "8" for the first eight, else "0-7,12" or "4-4"."""
    if list(layers) == list(range(len(layers))):
        return str(len(layers))
    runs = [[i for _, i in run] for _, run in groupby(enumerate(layers), lambda pair: pair[1] - pair[0])]
    if len(layers) == 1:
        return f"{layers[0]}-{layers[0]}"
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def main(
    target: str,
    prompts: Path,
    dtype: str = "auto",
    num_prompts: Count = 8,
    max_tokens: Annotated[int, typer.Option(min=8, help="tokens of each text")] = 64,
    depth: Annotated[int, typer.Option(min=1, max=8, help="longest draft that is judged")] = 4,
    fewest: Annotated[int, typer.Option(min=0, help="layers that remain at least; 0: half of them")] = 0,
    seconds: Annotated[float, typer.Option(help="time spent timing the target")] = 10.0,
    save: Annotated[bool, typer.Option("--save", help="save the best, if it pays, for the drafter layer_skip")] = False,
) -> None:
    """Print the best choices of layers and whether the best one pays; the last line is JSON."""
    quiet()
    decoder = SpeculativeDecoder(target, drafter="none", dtype=dtype, max_batch_size=num_prompts, reproducible=False)
    backend = decoder.target.backend
    count = num_layers(backend)
    if count < 2:
        raise UsageError(f"model {target!r} has {count} layer; allowed: at least 2, so that one can be left out")
    ids = [
        decoder.encode(p.prompt, chat=True)[-(backend.max_length - max_tokens - depth) :]
        for p in _read(prompts, num_prompts)
    ]
    costs = measure_costs(decoder, (1,), range(1, depth + 2), seconds=seconds)
    truth = Truth(decoder, ids, max_tokens, depth)
    prices = Prices(costs, truth.share_of_one_layer(count), count)
    judged: dict[tuple[int, ...], Candidate] = {}
    with console.status("judging layers ..."):
        for candidate in candidates(truth, count, fewest or (count + 1) // 2):
            judged[candidate.layers] = prices.value(candidate)
    best = sorted(judged.values(), key=lambda candidate: -candidate.speed_up)
    _print(best[:SHOWN], len(judged))
    summary = {"target": target, "torch": torch.__version__, "layers": count, "best": asdict(best[0])}
    if save and best[0].speed_up <= 1:
        console.print("Not saved: it would slow down decoding.")
    elif save:
        note = f"{target}: predicted {best[0].speed_up:.2f}x with {best[0].num_draft_tokens} draft tokens"
        console.print(f"saved as {remember_layers(backend, best[0].layers, note)}", markup=False, soft_wrap=True)
    print(json.dumps(summary))


def _read(prompts: Path, count: int) -> Sequence[NamedPrompt]:
    return spread(read_prompts(prompts), count)


def _print(best: Sequence[Candidate], num_judged: int) -> None:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("layers", overflow="fold")
    for name in ("layers", "agreement", "step", "draft\ntokens", "tokens\nper round", "predicted\nspeed-up"):
        table.add_column(name, justify="right")
    for candidate in best:
        figures = (
            f"{candidate.agreement:.2f}",
            f"{candidate.step:.2f}",
            str(candidate.num_draft_tokens),
            f"{candidate.tokens_per_round:.2f}",
        )
        table.add_row(
            f"layer_skip:{spans(candidate.layers)}", str(len(candidate.layers)), *figures, f"{candidate.speed_up:.2f}x"
        )
    console.print(table)
    console.print(f"{num_judged} choices judged; step: time of a draft token, in plain forwards of the target")
    if best[0].speed_up > 1:
        console.print(f"Should pay: {best[0].speed_up:.2f}x, before the drafter's own overhead.")
    else:
        console.print(
            f"Does not pay: at best {best[0].speed_up:.2f}x of plain decoding. Models not trained to exit early "
            "seldom do better; a small model of the family, or a retrieval drafter, costs less."
        )


if __name__ == "__main__":
    run(main)
