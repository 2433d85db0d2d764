"""Does a round grow with context length and batch only as much as its attention does?

    python benchmarks/scaling.py smollm2
    python benchmarks/scaling.py TARGET --draft DRAFT --drafter model --contexts 128,1024,8192 --batches 1,8,32

A round should take longer with a longer context only because its attention does. So each line shows how much longer a
round takes than at the shortest context of its batch, and how much longer the attention takes: one call of
scaled_dot_product_attention with the round's shapes, times the number of layers. All rows hold the same random prompt,
which is read once. Times are medians over the rounds of all turns, without the reading of prompts; in each turn all
batches and contexts are measured in order. On a GPU the script waits for each forward, so that its time is counted
where it is spent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import groupby, islice
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.table import Table
from terminal import JsonFile, console, run, save
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.interfaces import Backend, Drafter, Source
from slipstream.core.kv_slots import EXACT_FIT
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters import Setup, load
from slipstream.models.weights.model_files import quiet
from slipstream.reproducibility.timing import wait_for_device
from slipstream.sampling.sampler import Sampler

WARM_UP = 2  # uncounted rounds at the start of each line's turn
PARTS = ("draft", "verify", "accept", "overhead")


@dataclass(frozen=True)
class Line:
    """Milliseconds per round at one batch and context. attention: of all layers, None if it cannot be timed."""

    batch: int
    context: int
    width: int
    draft: float
    verify: float
    accept: float
    overhead: float
    attention: float | None

    @property
    def total(self) -> float:
        """The time of the whole round."""
        return self.draft + self.verify + self.accept + self.overhead


@dataclass(frozen=True)
class _ConstantDrafter:
    """Proposes the same token as often as it may, so that every round has the same shape."""

    device: torch.device

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Any) -> Draft:
        return Draft.from_lists([[1] * length for length in lengths], self.device)


class _WaitingBackend:
    """A backend that waits for the device after each forward."""

    def __init__(self, inner: Backend) -> None:
        self._inner, self.attended_unit = inner, inner.attended_unit
        self.vocab_size, self.max_length, self.device = inner.vocab_size, inner.max_length, inner.device

    def reserve(self, rows: int, length: int) -> None:
        self._inner.attended_unit = self.attended_unit
        self._inner.reserve(rows, length)

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        out = self._inner.forward(tokens, starts, first_slot=first_slot, logits=logits)
        wait_for_device(self.device)
        return out

    def copy(self, source: int, destination: int, length: int) -> None:
        self._inner.copy(source, destination, length)


@dataclass
class Scaling:
    """Times rounds of a decoder's models at any context and batch. rounds: counted rounds per line and turn."""

    decoder: SpeculativeDecoder
    drafter: str = "given"
    num_draft_tokens: int = 4
    rounds: int = 8
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        decoder = self.decoder
        calibrated = decoder.reproducible and decoder.calibration is not None
        self._shapes = decoder.calibration.shapes if calibrated else EXACT_FIT
        self._target = Session(_WaitingBackend(decoder.target.backend), self._shapes)
        uses_model = self.drafter == "model" and decoder.draft is not None
        self._draft = Session(_WaitingBackend(decoder.draft.backend), EXACT_FIT) if uses_model else None
        self._tokens = (self.rounds + WARM_UP + 1) * (self.num_draft_tokens + 1)  # more than the rounds can commit
        decoder.forget()  # its sessions must not reuse a KV cache that is about to be overwritten

    def measure(self, contexts: Sequence[int], batches: Sequence[int], turns: int = 3) -> list[Line]:
        """Time every batch and context."""
        self._check(contexts, batches, turns)
        cells = [(batch, context) for batch in sorted(set(batches)) for context in sorted(set(contexts))]
        self._read(max(contexts), max(batches))
        rounds: dict[tuple[int, int], list[Round]] = {cell: [] for cell in cells}
        attention: dict[tuple[int, int], list[float]] = {cell: [] for cell in cells}
        for _ in range(turns):
            for cell in cells:
                rounds[cell] += self._steps(*cell)
                attention[cell] += self._attention(*cell)
        return [self._line(cell, rounds[cell], attention[cell]) for cell in cells]

    def _check(self, contexts: Sequence[int], batches: Sequence[int], turns: int) -> None:
        for name, values in (
            ("contexts", contexts),
            ("batches", batches),
            ("turns", [turns]),
            ("rounds", [self.rounds]),
        ):
            if not values or min(values) < 1:
                raise UsageError(f"{name}={list(values)}; allowed: one or more whole numbers from 1 on")
        longest = min(s.backend.max_length for s in (self._target, self._draft) if s is not None)
        if max(contexts) > longest - self._tokens:
            raise UsageError(
                f"contexts={max(contexts)}; allowed: at most {longest - self._tokens} "
                f"(the model's context is {longest}, and the rounds need room for {self._tokens} tokens)"
            )
        limit = self._target.longest_draft
        if limit is not None and self.num_draft_tokens > limit:
            raise UsageError(f"num_draft_tokens={self.num_draft_tokens}; allowed: at most {limit} in reproducible mode")

    def _rows(self, batch: int, context: int) -> list[Row]:
        generator = torch.Generator().manual_seed(20230621)
        vocab = min(s.backend.vocab_size for s in (self._target, self._draft) if s is not None)
        prompt = torch.randint(0, vocab, (context,), generator=generator).tolist()
        params = SamplingParams(max_tokens=self._tokens, ignore_eos=True, **self.options).explicit
        return [Row(i, list(prompt), params, seed=i) for i in range(batch)]

    def _read(self, context: int, batch: int) -> None:
        """Read the longest prompt into the KV cache. One slot more than the largest batch keeps it for all rows."""
        for session in (self._target, self._draft):
            if session is not None:
                session.reserve(batch + 1, context + self._tokens)
                with torch.inference_mode():
                    session.prefill(self._rows(batch + 1, context))

    def _steps(self, batch: int, context: int) -> Iterator[Round]:
        """One `Round` for each counted step of a batch."""
        device, vocab_size = self._target.backend.device, self._target.backend.vocab_size
        drafter: Drafter = _ConstantDrafter(device)
        if self.drafter != "given":
            drafter = load(self.drafter, Setup(device, vocab_size, self._draft))
        sources = [Source(drafter)]
        scheduler = Scheduler(
            Engine(self._target, sources, Fixed(self.num_draft_tokens), Sampler, "auto", self._draft), batch
        )
        rounds = scheduler.run(self._rows(batch, context))
        steps = (next(of_step) for _, of_step in groupby(rounds, key=lambda round_: round_.step))
        yield from islice(steps, WARM_UP, WARM_UP + self.rounds)

    def _width(self) -> int:
        return self._shapes.width_for(self.num_draft_tokens + 1, 2)

    def _attention(self, batch: int, context: int) -> list[float]:
        """Milliseconds of the attention of all layers, timed a few times; empty without a transformers model."""
        model = self.decoder.target.model
        if model is None:
            return []
        config, unit = model.config.get_text_config(), self._shapes.attended_unit
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        keys = -(-(context + self._width()) // unit) * unit
        like = {"dtype": model.dtype, "device": self._target.backend.device}
        # the query heads that share a key head are rows of one product
        query = torch.randn(batch, key_heads, heads // key_heads * self._width(), size, **like)
        cached = [torch.randn(batch, key_heads, keys, size, **like) for _ in range(2)]
        mask = torch.zeros(batch, 1, query.shape[2], keys, **like)
        milliseconds = []
        for _ in range(self.rounds + 1):
            started = perf_counter()
            scaled_dot_product_attention(query, *cached, attn_mask=mask)
            wait_for_device(query.device)
            milliseconds.append(1e3 * (perf_counter() - started) * config.num_hidden_layers)
        return milliseconds[1:]

    def _line(self, cell: tuple[int, int], rounds: Sequence[Round], attention: Sequence[float]) -> Line:
        parts: dict[str, list[float]] = {name: [] for name in PARTS}
        for s in (round_.seconds for round_ in rounds):
            overhead = s.total - s.prefill - s.draft - s.verify - s.accept
            for name, seconds in zip(PARTS, (s.draft, s.verify, s.accept, overhead), strict=True):
                parts[name].append(1e3 * seconds)
        medians = (median(parts[name]) for name in PARTS)
        return Line(*cell, self._width(), *medians, median(attention) if attention else None)


def table_of(lines: Sequence[Line]) -> Table:
    """The lines, with their growth over the shortest context of the same batch."""
    table = Table(box=box.SIMPLE, pad_edge=False)
    for name in ("batch", "context", *(f"{part}\nms" for part in PARTS), "round\nms", "grown by\nms"):
        table.add_column(name, justify="right")
    for name in ("attention\nms", "grown by\nms"):
        table.add_column(name, justify="right")
    for line in lines:
        shortest = next(candidate for candidate in lines if candidate.batch == line.batch)
        cells = [f"{getattr(line, part):.2f}" for part in PARTS]
        cells += [f"{line.total:.2f}", f"{line.total - shortest.total:+.2f}"]
        if line.attention is not None and shortest.attention is not None:
            cells += [f"{line.attention:.2f}", f"{line.attention - shortest.attention:+.2f}"]
        table.add_row(str(line.batch), str(line.context), *cells)
    return table


def main(
    target: str,
    draft: str | None = None,
    drafter: Annotated[str, typer.Option(help="any by name; given: free tokens that are never right")] = "given",
    contexts: str = "128,512,2048,8192",
    batches: str = "1,8,32",
    num_draft_tokens: int = 4,
    rounds: int = 8,
    turns: int = 3,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    repetition_penalty: float = 1.0,
    dtype: str = "auto",
    reproducible: str = "auto",
    json_file: JsonFile = None,
) -> None:
    """Print a line per batch and context."""
    quiet()
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "repetition_penalty": repetition_penalty}
    try:
        reproducible_shapes = {"true": True, "false": False}.get(reproducible, reproducible)
        decoder = SpeculativeDecoder(target, draft, dtype=dtype, reproducible=reproducible_shapes)
        scaling = Scaling(decoder, drafter, num_draft_tokens, rounds, options)
        lines = scaling.measure([int(n) for n in contexts.split(",")], [int(n) for n in batches.split(",")], turns)
    except ValueError as error:  # UsageError is one
        raise typer.BadParameter(str(error)) from None
    console.print(table_of(lines))
    device = decoder.target.backend.device
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
    console.print(
        f"{target}, drafter {drafter}, {num_draft_tokens} draft tokens; torch {torch.__version__}, {hardware}"
    )
    figures = [{**asdict(line), "total": line.total} for line in lines]
    summary = {"target": target, "draft": draft, "drafter": drafter, "options": options, "where": hardware}
    save(json_file, {**summary, "torch": torch.__version__, "lines": figures})


if __name__ == "__main__":
    run(main)
