"""Measures which forward shapes agree to the bit on this machine, for this model and precision.

A forward of five tokens may use other kernels than a forward of one, round differently and flip a near-tie. Shapes
that agree exactly make the text independent of how many tokens were drafted, of the batch and of the order of arrival.
Which shapes those are is a property of the machine, the kernels and the model, so it is found by trying: the same
token at the same position through every candidate width, alone and in a ragged batch, attending over several lengths.
Where kernels guarantee that the shape changes no bit, a few shapes are tried and the rest is timing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from slipstream.core.interfaces import Backend, set_attended_lengths
from slipstream.core.kv_slots import Shapes
from slipstream.core.trees import TreeForwards
from slipstream.models.backend_capabilities import RaggedForwards, is_shape_independent
from slipstream.reproducibility.expert_reads import ExpertReads
from slipstream.reproducibility.shape_trials import (
    ATTENDED_UNITS,
    CONTEXTS,
    FURTHER_WIDTHS,
    LENGTH,
    PREFILL,
    REFERENCE,
    STEPS,
    WIDTHS,
    Trials,
    spot_checks,
)
from slipstream.reproducibility.timing import EXPERTS_TIMED, MOST_TURNS

T = TypeVar("T")
TIMED = (1, 2, 3, 4, 5, 6, 7, 8)
TOTALS = (8, 12, 16, 20, 24, 28, 32, 40, 48, 64)  # tokens of ragged forwards
# where all shapes agree, only those between which times rise evenly: the first start waits for each of them
TIMED_IF_GUARANTEED, TOTALS_IF_GUARANTEED = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64), (8, 12, 16, 32, 64)
# rough shares of the time: if every shape is tried, and if the backend guarantees that they agree
SHARES = {"times": 0.2, "units": 0.1, "alone": 0.1, "batches": 0.2, "prompts": 0.2, "totals": 0.1, "ragged": 0.1}
SHARES_IF_GUARANTEED = {"times": 0.4, "checks": 0.3, "ragged": 0.3}
NO_GAIN = 1.01  # a width is left out if a wider one takes at most this much of its time
log = logging.getLogger("slipstream")

Report = Callable[[float], None]  # called with the share of the work that is done, 0 to 1


class Stages:
    """Reports progress of work that has stages, each of a known share."""

    def __init__(self, report: Report) -> None:
        self._report, self._share_done = report, 0.0

    def over(self, share: float, items: Sequence[T]) -> Iterator[T]:
        """The items of a stage that takes this share of all the work, reporting after each; it may be left early."""
        start = self._share_done
        self._share_done = start + share
        for number, item in enumerate(items, 1):
            yield item
            self._report(min(1.0, start + share * number / len(items)))


@dataclass(frozen=True)
class Calibration:
    """The forward shapes that gave the same bits, and how long they took."""

    widths: tuple[int, ...]  # forward widths that give the same bits for one row, alone and in a batch
    attended_unit: int  # attention reads multiples of this many cached tokens
    milliseconds: dict[int, float]  # of the fastest one-row forward of each width
    # prompt chunks agree with these widths, so cached tokens are reused singly. They need not agree: a prompt is
    # computed on its own, cut in the same way whatever follows it; then only whole chunks are reused.
    prompts: bool = False
    together: tuple[int, ...] = ()  # widths that agree only for several rows: one token may have kernels of its own
    attended_lengths: tuple[int, ...] = ()  # further lengths that attention may read with the same bits
    totals: dict[int, float] = field(default_factory=dict)  # tokens of a ragged forward -> milliseconds with most rows
    every_total: bool = False  # all numbers of tokens between those in `totals` agree as well
    experts: ExpertReads | None = None  # of a mixture, whose times are of forwards that read `experts.timed(tokens)`

    @property
    def agrees(self) -> bool:
        """True if any shapes agree: at least the reference width, alone and in a batch."""
        return REFERENCE in self.widths

    @property
    def shapes(self) -> Shapes:
        """The shapes that keep the bits.

        A single row is padded to widths that are not slower than a wider one. It never is where every number of tokens
        agrees: by the same kernels, fewer tokens take longer only in noisy measurements.
        """
        several = tuple(sorted((*self.widths, *self.together)))
        alone = _worth_having({w: ms for w, ms in self.milliseconds.items() if w in self.widths}, self.widths)
        totals = _worth_having(self.totals, tuple(self.totals))
        if self.every_total:
            alone, totals = self.widths, tuple(range(1, totals[-1] + 1)) if totals else ()
        return Shapes(
            several,
            chunk=PREFILL,
            attended_unit=self.attended_unit,
            reuse=1 if self.prompts else PREFILL,
            alone=alone,
            attended_lengths=self.attended_lengths,
            totals=totals,
        )

    @property
    def cost(self) -> float:
        """Extra time of a plain step relative to the fastest width: 0.1 for 10 % more."""
        plain = min((ms for width, ms in self.milliseconds.items() if width in self.widths), default=float("inf"))
        return plain / min(self.milliseconds.values()) - 1


def _worth_having(times: Mapping[int, float], widths: Sequence[int]) -> tuple[int, ...]:
    """The widths without those for which a wider forward takes about as long, or less."""
    slow = {w for w, ms in times.items() if any(v > w and other <= ms * NO_GAIN for v, other in times.items())}
    return tuple(width for width in widths if width not in slow)


def calibrate(backend: Backend, max_batch_size: int, report: Report = lambda share: None) -> Calibration:
    """Try the candidate shapes on a model; overwrites the cached tokens of its slots."""
    longest = max(CONTEXTS) + LENGTH
    contexts = CONTEXTS if backend.max_length >= longest else (backend.max_length // 4,)
    widths = [width for width in WIDTHS if width <= backend.max_length - max(contexts)]
    trials = Trials(backend, contexts, widths, max_batch_size)
    experts = trials.times.experts([width for width in EXPERTS_TIMED if width in widths], range(MOST_TURNS))
    return replace(_calibrated(backend, trials, Stages(report)), experts=experts)


def _calibrated(backend: Backend, trials: Trials, stages: Stages) -> Calibration:
    contexts, widths = trials.contexts, trials.widths
    guaranteed = is_shape_independent(backend)
    shares = SHARES_IF_GUARANTEED if guaranteed else SHARES
    turns = stages.over(shares["times"], range(MOST_TURNS))
    room = backend.max_length - max(contexts)
    timed = TIMED_IF_GUARANTEED if guaranteed else TIMED
    times = trials.times.alone([width for width in timed if width <= room], turns)
    if guaranteed:
        trials.widths = sorted({*widths, *(width for width in FURTHER_WIDTHS if width <= room)})
        if (calibration := _all_agreeing(trials, times, stages)) is not None:
            return calibration
        log.warning(
            "%s says that the shape of a forward changes no bit, but it does: all shapes are tried",
            type(backend).__name__,
        )
        trials.widths = widths
        times = trials.times.alone([width for width in TIMED if width in widths], range(MOST_TURNS))
        set_attended_lengths(trials.backend, ATTENDED_UNITS[-1], ())
    units = stages.over(SHARES["units"], ATTENDED_UNITS)
    unit = next((unit for unit in units if trials.unit_agrees(unit)), None)
    if unit is None:
        return Calibration((), ATTENDED_UNITS[-1], times)
    lengths = trials.attended_lengths()
    calibration = _agreeing_shapes(trials, unit, lengths, times, stages)
    if calibration.prompts or not lengths:
        return calibration
    return _agreeing_shapes(trials, unit, (), times, stages)


def _all_agreeing(trials: Trials, times: dict[int, float], stages: Stages) -> Calibration | None:
    """The calibration of a backend that guarantees that all shapes agree; None if spot checks show otherwise."""
    unit, shares = ATTENDED_UNITS[0], SHARES_IF_GUARANTEED
    trials.use_unit(unit)
    lengths = trials.attended_lengths()
    set_attended_lengths(trials.backend, unit, lengths)
    if not all(agrees() for agrees in stages.over(shares["checks"], spot_checks(trials))):
        return None
    totals = stages.over(shares["ragged"], _in_turns(trials.totals(TOTALS_IF_GUARANTEED, trials.widths)))
    milliseconds = trials.times.ragged(totals, trials.widths, times)
    if isinstance(trials.backend, TreeForwards) and not isinstance(trials.backend, RaggedForwards):
        milliseconds = {max(times): times[max(times)]}  # chains are padded; trees may have as many tokens as were timed
    return Calibration(
        tuple(trials.widths), unit, times, prompts=True, attended_lengths=lengths, totals=milliseconds, every_total=True
    )


def _agreeing_shapes(
    trials: Trials, unit: int, lengths: tuple[int, ...], times: dict[int, float], stages: Stages
) -> Calibration:
    """Calibrates against the reference while forwards read these lengths of the KV cache, or multiples of the unit.

    times: milliseconds of one row's forwards, by width.
    """
    set_attended_lengths(trials.backend, unit, lengths)
    alone = [width for width in stages.over(SHARES["alone"], trials.widths) if trials.agrees_alone(width)]
    agreeing = [width for width in stages.over(SHARES["batches"], alone) if trials.agrees_in_batches(width)]
    if REFERENCE not in agreeing:
        return Calibration(tuple(agreeing), unit, times)
    others = [width for width in trials.widths if width not in alone and trials.agrees_in_batches(width, STEPS)]
    chunks = stages.over(SHARES["prompts"], trials.chunks)
    prompts = trials.prompts_agree(chunks)
    widths = sorted((*agreeing, *others))
    ragged = prompts and trials.prompts_agree_together()
    candidates = stages.over(SHARES["totals"], trials.totals(TOTALS, widths) if ragged else ())
    totals = [total for total in candidates if trials.total_agrees(total, widths)]
    milliseconds = trials.times.ragged(stages.over(SHARES["ragged"], _in_turns(totals)), widths, times)
    return Calibration(
        tuple(agreeing),
        unit,
        times,
        prompts=prompts,
        together=tuple(others),
        attended_lengths=lengths,
        totals=milliseconds,
    )


def _in_turns(totals: Sequence[int]) -> list[tuple[int, int]]:
    """Every total in turn, over and over: the number of the turn and the total."""
    return [(turn, total) for turn in range(MOST_TURNS) for total in totals]
