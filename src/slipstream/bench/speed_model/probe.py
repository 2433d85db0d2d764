"""Measures `Costs` on this machine: real rounds of the loop with dummy drafts, and a clock around every forward.

Shapes take turns and the fastest of many turns counts: whatever else the machine does only adds time. All rounds
begin after the same prompts, which stay in the KV cache, so a round computes what it would in a long text and no more.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from slipstream import drafters
from slipstream.bench.speed_model.round_costs import Costs, TokenCosts
from slipstream.core.interfaces import (
    AttendedLengths,
    Backend,
    Checkpoints,
    Drafter,
    RaggedForwards,
    RowSegment,
    Sampler,
)
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.trees import TreeForwards, TreeSegment
from slipstream.core.types import Draft, Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.errors import UsageError
from slipstream.models.layouts import UnpaddedForwards, make_session
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler as RequestSampler

POINTS = 6  # numbers of tokens at which a kind of forward is timed, where any would be allowed
FEWEST_TURNS, MOST_TURNS = 3, 40
CONTEXT = 128
FEW, MANY = 1, 6  # draft lengths at which a drafter is timed; its time is taken as linear in between and beyond
DRAFT_MODELS = ("model", "cross_vocabulary")  # drafters that a draft model is all of
MOTIF = 8  # prompts repeat this many random tokens, so that retrieval drafters find something


@dataclass(frozen=True)
class Given:
    """Proposes a draft of levels[i] tokens for row i, and beside each of them as many siblings."""

    levels: tuple[int, ...]
    device: torch.device
    siblings: int = 0

    @property
    def size(self) -> int:
        """The most tokens of a row."""
        return max(self.levels) * (1 + self.siblings)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        """The same at every call."""
        wide = 1 + self.siblings
        tokens = torch.ones(len(rows), self.size, dtype=torch.int64, device=self.device)
        parents = None
        if self.siblings:
            parents = tuple(
                tuple((node // wide - 1) * wide if node >= wide else -1 for node in range(n * wide))
                for n in self.levels
            )
        return Draft(tokens, tuple(n * wide for n in self.levels), parents=parents)


def uneven(drafted: int, rows: int, pad: Callable[[int], int]) -> tuple[int, ...] | None:
    """Lengths of `rows` drafts of so many tokens in all, whose rectangle would take more; None if there are none.

    pad: tokens per row -> width of the rectangle.
    """
    for longest in range(1, drafted + 1):
        if rows * longest >= drafted and rows * pad(longest + 1) > rows + drafted:
            return tuple(min(longest, max(0, drafted - row * longest)) for row in range(rows))
    return None


def even(total: int, rows: int) -> tuple[int, ...]:
    """`total` levels shared among rows."""
    return tuple(total // rows + (row < total % rows) for row in range(rows))


def some(values: Sequence[int], most: int = POINTS) -> list[int]:
    """At most so many of ascending values, the first and the last among them."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


@dataclass
class Least:
    """The least milliseconds seen, by batch and width, tokens or length."""

    seen: dict[int, dict[int, float]] = field(default_factory=dict)

    def add(self, batch: int, width: int, seconds: float) -> None:
        """Note a time."""
        points = self.seen.setdefault(batch, {})
        points[width] = min(points.get(width, float("inf")), 1e3 * max(seconds, 0.0))


@dataclass
class RoundTimes(Least):
    """The same of forwards, and of the rest of their rounds."""

    rest: Least = field(default_factory=Least)

    @property
    def overhead(self) -> dict[int, dict[int, float]]:
        """Milliseconds of what is no forward."""
        return self.rest.seen

    @property
    def costs(self) -> TokenCosts | None:
        """Both, None where nothing was noted."""
        return TokenCosts(self.seen, self.overhead) if self.seen else None

    def note(self, batch: int, tokens: int, forward: float, rest: float) -> None:
        """Note the seconds of a round."""
        self.add(batch, tokens, forward)
        self.rest.add(batch, tokens, rest)

    def alone(self, padded: RoundTimes) -> None:
        """A single row's rounds are the padded ones."""
        self.seen[1], self.overhead[1] = dict(padded.seen[1]), dict(padded.overhead[1])


@dataclass
class Times:
    """All that a probe notes."""

    padded: RoundTimes = field(default_factory=RoundTimes)
    ragged: RoundTimes = field(default_factory=RoundTimes)
    trees: RoundTimes = field(default_factory=RoundTimes)
    drafting: Least = field(default_factory=Least)
    move: float = float("inf")


Kind = Literal["padded", "ragged", "tree"]


class TimedBackend:
    """Awaits each forward whose logits are asked for and notes its seconds, and of which kind it was."""

    def __init__(self, inner: Backend) -> None:
        self._inner = inner
        self.vocab_size, self.max_length, self.device = inner.vocab_size, inner.max_length, inner.device
        self.last, self.kind, self.tokens = 0.0, "padded", 0

    @property
    def attended_unit(self) -> int:
        """See `Backend`."""
        return self._inner.attended_unit

    @attended_unit.setter
    def attended_unit(self, value: int) -> None:
        self._inner.attended_unit = value

    def reserve(self, rows: int, length: int) -> None:
        """See `Backend.reserve`."""
        self._inner.reserve(rows, length)

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        """See `Backend.forward`."""
        begun = perf_counter()
        out = self._inner.forward(tokens, starts, first_slot=first_slot, logits=logits)
        if logits:
            self._note(out, begun, "padded", tokens.numel())
        return out

    def copy(self, source: int, destination: int, length: int) -> None:
        """See `Backend.copy`."""
        self._inner.copy(source, destination, length)

    def _note(self, out: Tensor, begun: float, kind: Kind, tokens: int) -> None:
        if self.device.type != "cpu":
            out.flatten()[-1].item()  # waits for the device
        self.last, self.kind, self.tokens = perf_counter() - begun, kind, tokens


class TimedStates(TimedBackend):
    """The same of a model with `Checkpoints`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, Checkpoints)
        super().__init__(inner)
        self._states = inner

    def checkpoint(self, slot: int, limit: int) -> int:
        """See `Checkpoints.checkpoint`."""
        return self._states.checkpoint(slot, limit)

    def settle(self, slot: int, position: int) -> None:
        """See `Checkpoints.settle`."""
        self._states.settle(slot, position)


class TimedRagged(TimedStates):
    """The same of a model with `RaggedForwards`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, RaggedForwards)
        super().__init__(inner)
        self._rows = inner
        self.ragged = inner.ragged

    def forward_ragged(
        self,
        tokens: Tensor,
        segments: Sequence[RowSegment],
        *,
        widths: Sequence[int] | None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """See `RaggedForwards.forward_ragged`."""
        begun = perf_counter()
        out = self._rows.forward_ragged(tokens, segments, widths=widths, columns=columns)
        self._note(out, begun, "ragged", len(tokens))
        return out


class TimedRows(TimedRagged):
    """The same of a model with `UnpaddedForwards`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, UnpaddedForwards)
        super().__init__(inner)
        self.takes_several_tokens, self.rounds_like_one_token = inner.takes_several_tokens, inner.rounds_like_one_token


class TimedTrees(TimedBackend):
    """The same of a model with `TreeForwards`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, TreeForwards)
        super().__init__(inner)
        self._trees = inner

    @property
    def branching(self) -> bool:
        """See `TreeForwards.branching`."""
        return self._trees.branching

    @property
    def flat(self) -> bool:
        """See `TreeForwards.flat`."""
        return self._trees.flat

    def forward_tree(self, tokens: Tensor, segments: Sequence[TreeSegment], *, widths: Sequence[int] | None) -> Tensor:
        """See `TreeForwards.forward_tree`."""
        begun = perf_counter()
        out = self._trees.forward_tree(tokens, segments, widths=widths)
        self._note(out, begun, "tree", len(tokens))
        return out

    def move(self, slot: int, places: Sequence[int], start: int) -> None:
        """See `TreeForwards.move`."""
        self._trees.move(slot, places, start)


class TimedModel(TimedRagged, TimedTrees):
    """The same of a model that has all of these but `UnpaddedForwards`, and `AttendedLengths`."""

    def __init__(self, inner: Backend) -> None:
        assert isinstance(inner, AttendedLengths)
        super().__init__(inner)
        self._lengths = inner

    @property
    def attended_lengths(self) -> tuple[int, ...]:
        """See `AttendedLengths`."""
        return self._lengths.attended_lengths

    @attended_lengths.setter
    def attended_lengths(self, value: tuple[int, ...]) -> None:
        self._lengths.attended_lengths = value

    def attended_length_agrees(self, widths: Sequence[int], length: int, whole: int) -> bool:
        """See `AttendedLengths.attended_length_agrees`."""
        return self._lengths.attended_length_agrees(widths, length, whole)


def timed(backend: Backend) -> TimedBackend:
    """A model with a clock."""
    if isinstance(backend, UnpaddedForwards):
        return TimedRows(backend)
    if isinstance(backend, TreeForwards):
        whole = isinstance(backend, RaggedForwards) and isinstance(backend, Checkpoints)
        return TimedModel(backend) if whole else TimedTrees(backend)
    return TimedStates(backend) if isinstance(backend, Checkpoints) else TimedBackend(backend)


def measure_costs(
    decoder: SpeculativeDecoder,
    batch_sizes: Sequence[int] = (1,),
    widths: Sequence[int] | None = None,
    *,
    seconds: float = 20.0,
    drafter: Drafter | None = None,
) -> Costs:
    """Measure on this machine; takes `seconds`, or as long as three turns do if that is more.

    widths: tokens per row of a target forward; by default 1 to 9 as the decoder pads them. In between, costs are
    interpolated. Trees are measured as the decoder drafts them, as deep as chains of these widths. drafter: needed
    where the decoder's own was given as an object. The decoder's KV cache is empty afterwards.
    """
    shapes = decoder.shapes
    chosen = sorted({shapes.pad(width, 2) for width in (range(1, 10) if widths is None else widths)})
    _check(decoder, batch_sizes, chosen, seconds)
    decoder.forget()  # its sessions must not rely on a KV cache that is about to be overwritten
    decoder.forget_learned()
    return _Probe(decoder, sorted(set(batch_sizes)), chosen, drafter).measure(seconds)


def tree_siblings(decoder: SpeculativeDecoder) -> int:
    """How many tokens a decoder proposes beside each of its draft's; 0 where its drafts do not branch."""
    choice = LengthChoice.parse(decoder.config.num_draft_tokens)
    if choice.siblings >= 0:
        return choice.siblings
    takes = make_session(decoder.target.backend, decoder.shapes).branches
    return int(takes and decoder.traits.branches and decoder.bridge is None)


class _Probe:
    """The engines that are timed, over sessions of their own on the decoder's models."""

    def __init__(
        self, decoder: SpeculativeDecoder, batches: list[int], widths: list[int], drafter: Drafter | None
    ) -> None:
        self._decoder, self._batches, self._widths = decoder, batches, widths
        self._backend = timed(decoder.target.backend)
        self._target = make_session(self._backend, decoder.shapes)
        self._name = decoder.drafter_name if drafter is None else type(drafter).__name__
        self._draft: Session | None = None
        self._bridged: BridgedSession | None = None
        if drafter is None and self._name.partition(":")[0] in DRAFT_MODELS and decoder.draft is not None:
            self._draft = make_session(timed(decoder.draft.backend))
            self._bridged = None if decoder.bridge is None else BridgedSession(self._draft, decoder.bridge)
        self._siblings = tree_siblings(decoder) if drafter is None else 0
        most = (self._target.longest_draft or MAX_DRAFT_TOKENS) // (1 + self._siblings)
        self._many = max(FEW + 1, min(MANY, most))
        self._drafter = self._load_drafter() if drafter is None else drafter
        self._prompts = self._make_prompts(max(batches))

    def _load_drafter(self) -> Drafter:
        name, backend = self._name, self._backend
        if name.partition(":")[0] not in drafters.names():
            raise UsageError(f"drafter {name!r} was given as an object; allowed: pass it to measure_costs(drafter=...)")
        if name.partition(":")[0] == "hybrid":
            raise UsageError(
                f"drafter {name!r} drafts in two ways of different costs; allowed: one of the two drafters"
            )
        if self._draft is not None:
            name = "model"  # all the tokens asked for, whatever their probability
        target = copy(self._target)  # the same KV cache, but a backend whose layers can be told
        target.table = copy(target.table)
        target.table.backend = self._decoder.target.backend
        setup = drafters.Setup(
            backend.device,
            backend.vocab_size,
            self._draft,
            coupled=self._bridged is not None,
            target=target,
            bridged=self._bridged,
            siblings=self._siblings,
            shaped=self._siblings > 0,
        )
        return drafters.load(name, setup)

    def _make_prompts(self, rows: int) -> list[list[int]]:
        """Random motifs, repeated: a different one for each row, so that no cached tokens are shared between slots."""
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
        started, times = perf_counter(), Times()
        for turn in range(-1, MOST_TURNS):  # the turn before the first fills the KV cache and warms up
            if turn >= FEWEST_TURNS and perf_counter() - started > seconds:
                break
            times = Times() if turn == 0 else times
            for batch in self._batches:
                for draft in self._shapes_of(batch):
                    self._time_round(batch, draft, times)
                for levels in (FEW, self._many):
                    times.drafting.add(batch, levels, self._time_drafting(batch, levels * (1 + self._siblings)))
            if times.trees.seen:
                times.move = min(times.move, self._time_move())
        return self._costs(times)

    def _shapes_of(self, batch: int) -> list[Given]:
        """The drafts whose rounds are timed at a batch: padded, of uneven length, and trees."""
        device, pad = self._backend.device, partial(self._decoder.shapes.pad, rows=batch)
        longest = min(MAX_DRAFT_TOKENS, self._target.longest_draft or MAX_DRAFT_TOKENS)
        widest = max(self._widths)
        padded = sorted({pad(width) for width in self._widths})
        found = [Given((width - 1,) * batch, device) for width in padded]
        drafted = {self._target.num_tokens(batch, n) for n in range(1, batch * (widest - 1))}
        totals = some(sorted(total for total in drafted if total is not None))
        rows = [uneven(total - batch, batch, pad) for total in totals]
        found += [Given(levels, device) for levels in rows if levels is not None and levels[0] <= longest]
        if self._siblings:
            wide = 1 + self._siblings
            padded_trees = self._decoder.shapes.pad_tree
            sums = {padded_trees(batch + n * wide, batch): n for n in range(1, batch * (widest - 1) + 1)}
            chosen = [sums[total] for total in some(sorted(total for total in sums if total is not None))]
            found += [Given(even(levels, batch), device, self._siblings) for levels in chosen]
        return found

    def _costs(self, times: Times) -> Costs:
        drafting, many = times.drafting.seen, self._many
        steps = {b: max(0.0, (ms[many] - ms[FEW]) / (many - FEW)) for b, ms in drafting.items()}
        device, shapes = self._backend.device, self._decoder.shapes
        where = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads"
        if times.ragged.seen and 1 in self._batches:  # a row alone is never padded to another's length
            times.ragged.alone(times.padded)
        return Costs(
            target=times.padded.seen,
            overhead=times.padded.overhead,
            draft_step=steps,
            draft_round={b: max(0.0, ms[FEW] - FEW * steps[b]) for b, ms in drafting.items()},
            drafter=self._name,
            machine=f"measured: {platform.machine()}, {where}, torch {torch.__version__}, {self._decoder.target.name}",
            padded=shapes.widths,
            alone=shapes.alone,
            totals=shapes.totals,
            ragged=times.ragged.costs,
            trees=times.trees.costs,
            move=times.move if times.trees.seen else 0.0,
        )

    def _time_round(self, batch: int, draft: Given, times: Times) -> None:
        """One round: its forward, and the rest of it but for drafting."""
        done = self._round(draft, batch, draft.size)
        forward, kind = self._backend.last, self._backend.kind
        rest = done.seconds.total - done.seconds.prefill - done.seconds.draft - forward
        if draft.siblings and kind == "tree":
            times.trees.note(batch, self._backend.tokens, forward, rest)
        elif not draft.siblings and len(set(draft.levels)) > 1 and kind == "ragged":
            times.ragged.note(batch, self._backend.tokens, forward, rest)
        elif len(set(draft.levels)) == 1 and not draft.siblings:
            times.padded.note(batch, draft.size + 1, forward, rest)

    def _time_move(self) -> float:
        """Milliseconds in which a token behind a row's prompt is brought to another place."""
        backend, end = self._backend, len(self._prompts[0])
        assert isinstance(backend, TreeForwards)
        begun = perf_counter()
        backend.move(0, [end + 2], end + 1)
        if backend.device.type == "cuda":
            torch.cuda.synchronize(backend.device)
        return 1e3 * (perf_counter() - begun)

    def _time_drafting(self, batch: int, length: int) -> float:
        """Seconds in which the drafter proposes `length` tokens for every row.

        In the first round of new rows it would still read the prompt, so the second one is timed.
        """
        return self._round(self._drafter, batch, length, second=True).seconds.draft

    def _round(self, drafter: Drafter, batch: int, length: int, *, second: bool = False) -> Round:
        """The first or second round of fresh rows, whose prompts are cached since the turn before."""
        scheduler = Scheduler(
            Engine(self._target, drafter, Fixed(length), RequestSampler, "auto", self._bridged or self._draft), batch
        )
        params = SamplingParams(max_tokens=(length + 1) * (1 + second) + second)
        rows = [Row(i, list(prompt), params, seed=0) for i, prompt in enumerate(self._prompts[:batch])]
        return next(islice(scheduler.run(rows), batch if second else 0, None))


def _check(decoder: SpeculativeDecoder, batches: Sequence[int], widths: Sequence[int], seconds: float) -> None:
    if not batches or any(isinstance(b, bool) or not isinstance(b, int) or b < 1 for b in batches):
        raise UsageError(f"batch_sizes={list(batches)!r}; allowed: whole numbers >= 1, at least one")
    shapes = decoder.shapes.widths
    widest = shapes[-1] if shapes else MAX_DRAFT_TOKENS + 1
    if not widths or min(widths) < 1 or max(widths) > widest:
        raise UsageError(f"widths={list(widths)!r}; allowed: from 1 to {widest}")
    if not seconds > 0:
        raise UsageError(f"seconds={seconds!r}; allowed: a number > 0")
