"""Predicted against observed speed-up: the costs of a round are measured after the runs; `predict` does the rest."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

from slipstream.bench.arms import PLAIN
from slipstream.bench.lineup import Lineup
from slipstream.bench.prediction.formula import Acceptance, Costs, measure_costs, predict_from_stats
from slipstream.bench.prediction.probe import tree_siblings
from slipstream.bench.summary import ArmSummary
from slipstream.errors import UsageError

log = logging.getLogger("slipstream")


def measured_costs(
    summaries: Sequence[ArmSummary], lineup: Lineup, seconds: float, batches: Sequence[int] = ()
) -> dict[str, Costs]:
    """The costs of every arm that drafted, measured once for each drafter, kind of weights and width of trees.

    seconds: for each of these, or as long as three turns take. batches: measured besides those of the runs.
    """
    drafted = [one for one in summaries if one.stats is not None and one.stats.num_draft_tokens]
    kinds: dict[tuple[str, bool, int], list[ArmSummary]] = {}
    for one in drafted:
        kinds.setdefault(_kind(one, lineup), []).append(one)
    found: dict[str, Costs] = {}
    for (_, _, siblings), own in kinds.items():
        longest = max(_levels(one, siblings) for one in own)
        sizes = sorted({one.batch for one in own} | set(batches))
        try:
            costs = measure_costs(lineup.decoders[own[0].arm], sizes, range(1, longest + 2), seconds=seconds)
        except UsageError as error:
            log.warning("no prediction for %s: %s", own[0].arm, error)
            continue
        found |= dict.fromkeys((one.arm for one in own), costs)
    return {one.arm: found[one.arm] for one in drafted if one.arm in found}  # in the order of the arms


def with_predictions(summaries: Sequence[ArmSummary], lineup: Lineup, costs: Mapping[str, Costs]) -> list[ArmSummary]:
    """The summaries with predictions for arms whose costs are known, prompt processing left out."""
    return [replace(one, prediction=_predicted(one, summaries, lineup, costs.get(one.arm))) for one in summaries]


def _levels(one: ArmSummary, siblings: int) -> int:
    """The levels of the arm's drafts, or of combs that have as many tokens if these are more."""
    known = Acceptance.from_stats(one.counts or {})
    return max(known.longest, ceil(round(known.num_nodes(known.longest) / (1 + siblings), 9)))


def _kind(one: ArmSummary, lineup: Lineup) -> tuple[str, bool, int]:
    decoder = lineup.decoders[one.arm]
    return decoder.drafter_name, decoder.target.packed, tree_siblings(decoder)


def _predicted(
    one: ArmSummary, summaries: Sequence[ArmSummary], lineup: Lineup, costs: Costs | None
) -> dict[str, float] | None:
    counts = one.counts
    if costs is None or counts is None or not counts["num_draft_tokens"]:
        return None
    plain = next((s.stats.to_dict() for s in summaries if s.stats is not None and _is_plain(s, one, lineup)), None)
    try:
        return predict_from_stats(counts, costs, plain=plain).to_dict()
    except UsageError as error:
        log.warning("no prediction for %s: %s", one.arm, error)
        return None


def _is_plain(candidate: ArmSummary, one: ArmSummary, lineup: Lineup) -> bool:
    """Plain decoding at the same batch size and temperature on the same weights."""
    mine, theirs = lineup.decoders.get(candidate.arm), lineup.decoders[one.arm]
    if mine is None or mine.drafter_name != PLAIN or mine.target is not theirs.target:
        return False
    temperatures = [lineup.temperature(name) for name in (candidate.arm, one.arm)]
    return candidate.batch == one.batch and temperatures[0] == temperatures[1]
