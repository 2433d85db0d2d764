"""Measures `Costs` on this machine: real rounds of the loop with given drafts, and a clock around every forward.

Shapes take turns and the fastest of many turns counts: whatever else the machine does only adds time. All rounds
begin after the same prompts, which stay in the KV cache, so a round computes what it would in a long text and no more.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from copy import copy
from functools import partial
from itertools import islice
from time import perf_counter

import torch

from slipstream import drafters
from slipstream.bench.prediction.costs import Costs
from slipstream.bench.prediction.given_drafts import Given, even, some, uneven
from slipstream.bench.prediction.least_times import Times
from slipstream.bench.prediction.timed_backend import timed
from slipstream.core.interfaces import Drafter
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.core.loop import Engine
from slipstream.core.rounds import Round
from slipstream.core.scheduler import Scheduler
from slipstream.core.session import Session
from slipstream.core.trees import TreeForwards
from slipstream.core.types import Row
from slipstream.decoder import SpeculativeDecoder
from slipstream.draft_length.choice import LengthChoice
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.errors import UsageError
from slipstream.models.layouts.unpadded_layout import make_session
from slipstream.sampling.params import SamplingParams
from slipstream.sampling.sampler import Sampler as RequestSampler

FEWEST_TURNS, MOST_TURNS = 3, 40
CONTEXT = 128
FEW, MANY = 1, 6  # draft lengths at which a drafter is timed; its time is taken as linear in between and beyond
DRAFT_MODELS = ("model", "cross_vocabulary")  # drafters that a draft model is all of
MOTIF = 8  # prompts repeat this many random tokens, so that retrieval drafters find something


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
