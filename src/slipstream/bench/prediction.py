"""Predicted against observed speed-up: the costs of a round are measured after the runs; `predict` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from slipstream.bench.arms import PLAIN
from slipstream.bench.lineup import Lineup
from slipstream.bench.summary import ArmSummary
from slipstream.prediction.predict import Costs, measure_costs, predict_from_stats
from slipstream.types import UsageError

log = logging.getLogger("slipstream")


def with_predictions(summaries: Sequence[ArmSummary], lineup: Lineup, seconds: float) -> list[ArmSummary]:
    """The summaries with predictions for arms that drafted, prompt processing left out.

    seconds: to measure the costs of each drafter (and kind of weights), or as long as three turns take.
    """
    costs: dict[tuple[str, bool], Costs | None] = {}
    made = []
    for one in summaries:
        prediction = None
        if one.stats is not None and one.stats.num_draft_tokens:
            prediction = _predicted(one, summaries, lineup, costs, seconds)
        made.append(replace(one, prediction=prediction))
    return made


def _predicted(
    one: ArmSummary,
    summaries: Sequence[ArmSummary],
    lineup: Lineup,
    costs: dict[tuple[str, bool], Costs | None],
    seconds: float,
) -> dict[str, float] | None:
    decoder = lineup.decoders[one.arm]
    at = decoder.drafter_name, decoder.target.packed
    if at not in costs:
        costs[at] = _measured(at[0], one.arm, summaries, lineup, seconds)
    known = costs[at]
    if known is None or one.stats is None:
        return None
    plain = next((s.stats.to_dict() for s in summaries if s.stats is not None and _is_plain(s, one, lineup)), None)
    try:
        return predict_from_stats(one.stats.to_dict(), known, plain=plain).to_dict()
    except UsageError as error:
        log.warning("no prediction for %s: %s", one.arm, error)
        return None


def _measured(drafter: str, arm: str, summaries: Sequence[ArmSummary], lineup: Lineup, seconds: float) -> Costs | None:
    decoder = lineup.decoders[arm]
    own = [s for s in summaries if s.stats is not None and lineup.decoders[s.arm].drafter_name == drafter]
    longest = max(len(s.stats.drafted_per_position) for s in own if s.stats is not None)
    batches = sorted({s.batch for s in own})
    try:
        return measure_costs(decoder, batches, range(1, longest + 2), seconds=seconds)
    except UsageError as error:
        log.warning("no prediction for %s: %s", drafter, error)
        return None


def _is_plain(candidate: ArmSummary, one: ArmSummary, lineup: Lineup) -> bool:
    """Plain decoding at the same batch size and temperature on the same weights."""
    mine, theirs = lineup.decoders.get(candidate.arm), lineup.decoders[one.arm]
    if mine is None or mine.drafter_name != PLAIN or mine.target is not theirs.target:
        return False
    temperatures = [lineup.temperature(name) for name in (candidate.arm, one.arm)]
    return candidate.batch == one.batch and temperatures[0] == temperatures[1]
