"""Measures `Costs` on this machine: real rounds of the loop with dummy drafts, and real drafts of the drafter.

Shapes take turns and the fastest of many turns counts. All rounds begin after the same prompts, which stay in the KV
cache, so a round computes what it would in a long text and no more.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from time import perf_counter

import torch

from slipstream import drafters
from slipstream.bench.speed_model.round_costs import Costs, TokenCosts
from slipstream.core.interfaces import Drafter, Sampler
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine, Propose
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.errors import UsageError
from slipstream.models.layouts import make_session
from slipstream.reproducibility.timing import Fastest, wait_for_device
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler as RequestSampler

POINTS = 6  # unpadded rounds and trees are timed at this many numbers of tokens, at most
MIN_TURNS, MAX_TURNS = 3, 40
CONTEXT = 128  # tokens of the prompts
FEW, MANY = 1, 6  # draft lengths at which a drafter is timed; its time is taken as linear in between and beyond
DRAFT_MODELS = ("model", "cross_vocabulary")  # drafters that consist of a draft model alone
MOTIF = 8  # prompts repeat this many random tokens, so that retrieval drafters find something


def measure_costs(
    decoder: SpeculativeDecoder,
    batch_sizes: Sequence[int] = (1,),
    widths: Sequence[int] | None = None,
    *,
    seconds: float = 20.0,
    drafter: Drafter | None = None,
) -> Costs:
    """Measure on this machine; takes `seconds`, or as long as three turns take if that is more.

    widths: tokens per row of a target forward; by default 1 to 9, as the decoder pads them. In between, costs are
    interpolated. Trees are measured as the decoder drafts them, as deep as chains of these widths. drafter: needed if
    the decoder's own was passed to it as an object. The decoder's KV cache is empty afterwards.
    """
    shapes = decoder.shapes
    padded = sorted({shapes.width_for(width, 2) for width in (range(1, 10) if widths is None else widths)})
    _check(decoder, batch_sizes, padded, seconds)
    decoder.forget()  # its sessions must not rely on a KV cache that is about to be overwritten
    decoder.forget_learned()
    return _Probe(decoder, sorted(set(batch_sizes)), padded, drafter).measure(seconds)


def _check(decoder: SpeculativeDecoder, batches: Sequence[int], widths: Sequence[int], seconds: float) -> None:
    if not batches or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in batches):
        raise UsageError(f"batch_sizes={list(batches)!r}; allowed: whole numbers >= 1, at least one")
    shapes = decoder.shapes.widths
    widest = shapes[-1] if shapes else MAX_DRAFT_TOKENS + 1
    if not widths or min(widths) < 1 or max(widths) > widest:
        raise UsageError(f"widths={list(widths)!r}; allowed: from 1 to {widest}")
    if not seconds > 0:
        raise UsageError(f"seconds={seconds!r}; allowed: a number > 0")


def tree_siblings(decoder: SpeculativeDecoder) -> int:
    """How many siblings a decoder proposes beside each token of a draft; 0 if its drafts do not branch."""
    choice = LengthChoice.parse(decoder.config.num_draft_tokens)
    if choice.siblings >= 0:
        return choice.siblings
    branches = make_session(decoder.target.backend, decoder.shapes).branches
    return int(branches and decoder.traits.branches and decoder.bridge is None)


@dataclass(frozen=True)
class FixedDraft:
    """A drafter that proposes levels[i] dummy tokens for row i, and `siblings` more beside each of them."""

    levels: tuple[int, ...]
    device: torch.device
    siblings: int = 0

    @property
    def size(self) -> int:
        """The most tokens of a row."""
        return max(self.levels) * (1 + self.siblings)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """Dummy tokens, the same at every call."""
        wide = 1 + self.siblings
        tokens = torch.ones(len(rows), self.size, dtype=torch.int64, device=self.device)
        parents = None
        if self.siblings:
            parents = tuple(
                tuple((node // wide - 1) * wide if node >= wide else -1 for node in range(n * wide))
                for n in self.levels
            )
        return Draft(tokens, tuple(n * wide for n in self.levels), parents=parents)


def ragged_lengths(drafted: int, rows: int, pad: Callable[[int], int]) -> tuple[int, ...] | None:
    """Lengths of `rows` drafts of `drafted` tokens in all that would take more tokens if padded; None if none would.

    pad: tokens per row -> width of the padded forward.
    """
    for longest in range(1, drafted + 1):
        if rows * longest >= drafted and rows * pad(longest + 1) > rows + drafted:
            return tuple(min(longest, max(0, drafted - row * longest)) for row in range(rows))
    return None


def even_lengths(total: int, rows: int) -> tuple[int, ...]:
    """`total` levels, spread evenly over rows."""
    return tuple(total // rows + (row < total % rows) for row in range(rows))


def thinned(values: Sequence[int]) -> list[int]:
    """At most `POINTS` of ascending values, the first and the last among them."""
    if len(values) <= POINTS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (POINTS - 1))] for i in range(POINTS)]


Shape = tuple[int, int]  # rows, and tokens of each (padded) or of all of them


@dataclass
class RoundTimes:
    """The fastest rounds of one kind, by shape: the forward that verifies, and everything else except drafting."""

    forward: Fastest[Shape] = field(default_factory=Fastest)
    overhead: Fastest[Shape] = field(default_factory=Fastest)

    def add(self, shape: Shape, forward: float, overhead: float) -> None:
        """Note the seconds of a round."""
        self.forward.add(shape, forward)
        self.overhead.add(shape, overhead)

    def clear(self) -> None:
        self.forward.milliseconds.clear()
        self.overhead.milliseconds.clear()

    def costs(self) -> TokenCosts | None:
        """None if nothing was timed."""
        if not self.forward.milliseconds:
            return None
        return TokenCosts(by_batch(self.forward), by_batch(self.overhead))


def by_batch(times: Fastest[Shape]) -> dict[int, dict[int, float]]:
    """Milliseconds by rows, then by tokens."""
    nested: dict[int, dict[int, float]] = {}
    for (rows, tokens), ms in times.milliseconds.items():
        nested.setdefault(rows, {})[tokens] = ms
    return nested


class _Probe:
    """The engines that are timed, over sessions of their own on the decoder's models."""

    def __init__(
        self, decoder: SpeculativeDecoder, batches: list[int], widths: list[int], drafter: Drafter | None
    ) -> None:
        self._decoder, self._batches, self._widths = decoder, batches, widths
        self._backend = decoder.target.backend
        # with reuse above 1 a cached prompt is reused whole, without logits, so that a row's first round drafts already
        self._target = make_session(self._backend, replace(decoder.shapes, reuse=max(2, decoder.shapes.reuse)))
        self._name = decoder.drafter_name if drafter is None else type(drafter).__name__
        kind = self._name.partition(":")[0]
        self._draft: Session | None = None
        self._bridged: BridgedSession | None = None
        if drafter is None and kind in DRAFT_MODELS and decoder.draft is not None:
            self._draft = make_session(decoder.draft.backend)
            self._bridged = None if decoder.bridge is None else BridgedSession(self._draft, decoder.bridge)
        self._siblings = tree_siblings(decoder) if drafter is None else 0
        longest = (self._target.longest_draft or MAX_DRAFT_TOKENS) // (1 + self._siblings)
        self._many = max(FEW + 1, min(MANY, longest))
        self._drafter = self._load_drafter(kind) if drafter is None else drafter
        self._prompts = self._make_prompts(max(batches))
        self._padded, self._ragged, self._trees = RoundTimes(), RoundTimes(), RoundTimes()
        self._drafting = Fastest[Shape]()

    def _load_drafter(self, kind: str) -> Drafter:
        name = self._name
        if kind not in drafters.names():
            raise UsageError(f"drafter {name!r} was given as an object; allowed: pass it to measure_costs(drafter=...)")
        if kind == "hybrid":
            raise UsageError(
                f"drafter {name!r} drafts in two ways of different costs; allowed: one of the two drafters"
            )
        setup = drafters.Setup(
            self._backend.device,
            self._backend.vocab_size,
            self._draft,
            coupled=self._bridged is not None,
            target=self._target,
            bridged=self._bridged,
            siblings=self._siblings,
            fixed_tree=self._siblings > 0,
        )
        # the drafter "model" drafts all the tokens asked for, whatever their probability
        return drafters.load(name if self._draft is None else "model", setup)

    def _make_prompts(self, rows: int) -> list[list[int]]:
        """Random motifs, repeated; every row has another, so that slots share no cached tokens."""
        backends = [session.backend for session in (self._target, self._draft) if session is not None]
        vocab, longest = min(b.vocab_size for b in backends), min(b.max_length for b in backends)
        wide = 1 + self._siblings
        length = min(CONTEXT, longest - max(2 * max(self._widths) * wide, 2 * MANY * wide + 3) - 1)
        if length < 1:
            raise UsageError(f"widths={self._widths!r}; allowed: less than the model's context of {longest} tokens")
        generator = torch.Generator().manual_seed(20230621)
        motifs = torch.randint(0, vocab, (rows, MOTIF), generator=generator).tolist()
        return [[row % vocab, *(motif[i % MOTIF] for i in range(length - 1))] for row, motif in enumerate(motifs)]

    def measure(self, seconds: float) -> Costs:
        """All shapes in turn, until the time is up."""
        started = perf_counter()
        shapes = {batch: self._shapes(batch) for batch in self._batches}
        self._turn(shapes)  # fills the KV cache and warms up
        for times in (self._padded, self._ragged, self._trees):
            times.clear()
        self._drafting.milliseconds.clear()
        for turn in range(MAX_TURNS):
            if turn >= MIN_TURNS and perf_counter() - started > seconds:
                break
            self._turn(shapes)
        return self._costs()

    def _turn(self, shapes: dict[int, list[tuple[RoundTimes, int, FixedDraft]]]) -> None:
        for batch, timed in shapes.items():
            for times, tokens, draft in timed:
                seconds = self._round(draft, batch, draft.size).seconds
                # on a GPU the host waits for the forward during acceptance
                forward = seconds.verify + (seconds.accept if self._backend.device.type != "cpu" else 0.0)
                times.add((batch, tokens), forward, seconds.total - seconds.prefill - seconds.draft - forward)
            for levels in (FEW, self._many):
                # the first round of new rows would still read the prompt
                drafted = self._round(self._drafter, batch, levels * (1 + self._siblings), second=True)
                self._drafting.add((batch, levels), drafted.seconds.draft)

    def _shapes(self, batch: int) -> list[tuple[RoundTimes, int, FixedDraft]]:
        """What is timed at a batch size: the kind of round, its tokens (of each row if padded), and its draft."""
        device, target, shapes = self._backend.device, self._target, self._decoder.shapes
        pad = partial(shapes.width_for, rows=batch)
        longest, widest = min(MAX_DRAFT_TOKENS, target.longest_draft or MAX_DRAFT_TOKENS), max(self._widths)
        padded_widths = sorted({pad(width) for width in self._widths})
        timed = [(self._padded, width, FixedDraft((width - 1,) * batch, device)) for width in padded_widths]
        totals = {target.num_tokens(batch, drafted) for drafted in range(1, batch * (widest - 1))}
        for total in thinned(sorted(total for total in totals if total is not None)):
            lengths = ragged_lengths(total - batch, batch, pad)
            if lengths is not None and lengths[0] <= longest and len(set(lengths)) > 1:
                timed.append((self._ragged, total, FixedDraft(lengths, device)))
        if self._siblings and target.branches:
            wide = 1 + self._siblings
            sums = {shapes.tree_total_for(batch + n * wide, batch): n for n in range(1, batch * (widest - 1) + 1)}
            for total in thinned(sorted(total for total in sums if total is not None)):
                timed.append((self._trees, total, FixedDraft(even_lengths(sums[total], batch), device, self._siblings)))
        return timed

    def _round(self, drafter: Drafter, batch: int, length: int, *, second: bool = False) -> Round:
        """The first or second round of fresh rows, whose prompts are cached since the turn before."""
        draft_session = self._bridged or self._draft
        engine = Engine(
            self._target, drafter, Fixed(length), RequestSampler, "auto", draft_session, constrain=self._awaited
        )
        params = SamplingParams(max_tokens=(length + 1) * (1 + second) + second)
        rows = [Row(i, list(prompt), params, seed=0) for i, prompt in enumerate(self._prompts[:batch])]
        return next(islice(Scheduler(engine, batch).run(rows), batch if second else 0, None))

    def _awaited(self, rows: Sequence[Row], propose: Propose) -> Draft:
        """The draft once the device has made it, so that the time of drafting is its own."""
        draft = propose(None)
        wait_for_device(self._backend.device)
        return draft

    def _costs(self) -> Costs:
        drafting, many = by_batch(self._drafting), self._many
        steps = {b: max(0.0, (ms[many] - ms[FEW]) / (many - FEW)) for b, ms in drafting.items()}
        device, shapes = self._backend.device, self._decoder.shapes
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        target, overhead, ragged = by_batch(self._padded.forward), by_batch(self._padded.overhead), self._ragged.costs()
        if ragged is not None and 1 in target:  # a row alone is never padded to another's length
            ragged = TokenCosts({**ragged.forward, 1: target[1]}, {**ragged.overhead, 1: overhead[1]})
        return Costs(
            target=target,
            overhead=overhead,
            draft_step=steps,
            draft_round={b: max(0.0, ms[FEW] - FEW * steps[b]) for b, ms in drafting.items()},
            drafter=self._name,
            machine=f"measured: {platform.machine()}, {where}, torch {torch.__version__}, {self._decoder.target.name}",
            padded=shapes.widths,
            alone=shapes.alone,
            totals=shapes.totals,
            ragged=ragged,
            trees=self._trees.costs(),
        )
