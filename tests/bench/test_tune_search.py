"""The search of `slipstream tune` with the toy models: candidates, predictions, the budget."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.plan import groups, name_prompts
from slipstream.bench.records import make_header, read_records, start
from slipstream.bench.speed_model.probe import measure_costs
from slipstream.bench.speed_model.round_costs import Costs, TokenCosts
from slipstream.bench.tuning.advice import Tuned, tune
from slipstream.bench.tuning.search import SCREENING, Budget, Candidate, Meter, SearchSpace
from slipstream.config import DecoderConfig
from slipstream.errors import UsageError
from tests.support.toy_runs import PROMPTS, ticking

pytestmark = pytest.mark.slow


def tuned(
    folder: Path, seconds: float, *, drafts: tuple[str, ...] = ("toy:2",), longest: int = 3, tick: float = 0.004
) -> tuple[Tuned, Budget, SearchSpace]:
    params, prompts = SamplingParams(max_tokens=12, seed=0), name_prompts(PROMPTS)
    space = SearchSpace(SpeculativeDecoder("toy", drafts[0] if drafts else None), drafts, params)
    start(folder, make_header({"target": "toy"}, [space.plain], prompts, DecoderConfig(), params))
    budget = ticking(seconds, tick)
    meter = Meter(space.lineup, folder, budget, lambda stage, doing: None)
    return tune(space, meter, prompts, [1, 2], longest), budget, space


def test_candidates_name_which_of_several_draft_models_they_use(tmp_path: Path) -> None:
    result, _, space = tuned(tmp_path, 2, drafts=("toy:2", "toy:4"))
    names = {
        standing.name: standing.candidate
        for advice in result.advice
        for standing in [*advice.others, *([advice.best] if advice.best else [])]
    }
    assert {"auto toy:2", "model toy:2", "auto toy:4", "model toy:4", "suffix"} >= {n for n in names if "@" not in n}
    drafted = {name: standing for name, standing in names.items() if standing.kind == "model"}
    assert {standing.draft for standing in drafted.values()} == {"toy:2", "toy:4"}
    loaded = {draft: space.decoder(Candidate("model", 2, draft)).draft for draft in ("toy:2", "toy:4")}
    assert all(standing is not None and standing.name == draft for draft, standing in loaded.items())
    with pytest.raises(UsageError, match=r"draft 'toy' is given twice"):
        SearchSpace(SpeculativeDecoder("toy"), ["toy", "toy"], SamplingParams())


def test_screened_candidates_have_predictions_and_measured_costs(tmp_path: Path) -> None:
    result, _, space = tuned(tmp_path, 2)
    assert [candidate.candidate.drafter for candidate in result.screened] == ["ngram", "suffix", "model"]
    assert all(candidate.acceptance is not None and candidate.costs is not None for candidate in result.screened)
    first = result.screened[0].costs
    assert first is not None and all(
        candidate.costs.target == first.target for candidate in result.screened if candidate.costs
    )
    shapes = space.lineup.decoder.shapes  # at one row, a width that was slower than a wider one is left out
    assert {b: set(ms) for b, ms in first.target.items()} == {
        b: {shapes.width_for(n, b) for n in range(1, 5)} for b in (1, 2)
    }
    standings = [
        candidate for advice in result.advice for candidate in [*advice.others, *([advice.best] if advice.best else [])]
    ]
    assert all((candidate.predicted is None) == (candidate.candidate.length is None) for candidate in standings)


def test_costs_are_measured_for_chains_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = list[int | str]()

    def measure_noting_length(decoder: SpeculativeDecoder, *arguments: Any, **options: Any) -> Any:
        lengths.append(decoder.config.num_draft_tokens)
        return measure_costs(decoder, *arguments, **options)

    monkeypatch.setattr("slipstream.bench.tuning.search.measure_costs", measure_noting_length)
    tuned(tmp_path, 2)
    assert set(lengths) == {"chain"}


def test_ragged_costs_of_the_first_drafter_are_used_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[Costs]()

    def with_ragged(*arguments: Any, **options: Any) -> Costs:
        ragged = TokenCosts({2: {2: 1.0 + len(measured), 8: 9.0}}, {2: {2: 0.0, 8: 0.0}})
        measured.append(replace(measure_costs(*arguments, **options), ragged=ragged))
        return measured[-1]

    monkeypatch.setattr("slipstream.bench.tuning.search.measure_costs", with_ragged)
    result, _, _ = tuned(tmp_path, 2)
    assert len(measured) == 3 and all(
        screened.costs and screened.costs.ragged == measured[0].ragged for screened in result.screened
    )


@pytest.mark.parametrize("seconds", [0.8, 1.6])
def test_the_budget_is_kept(tmp_path: Path, seconds: float) -> None:
    _, budget, _ = tuned(tmp_path, seconds)
    assert budget.now <= seconds * 1.05
    runs = [run for run in read_records(tmp_path)[1] if run.repeat != SCREENING]
    assert {run.batch for run in runs} == {1, 2}


@pytest.mark.parametrize(("seconds", "runs"), [(0.001, 0), (0.01, 1), (0.02, 1)])
def test_a_budget_too_small_to_screen_is_refused_after_the_first_run(tmp_path: Path, seconds: float, runs: int) -> None:
    with pytest.raises(
        UsageError,
        match=r"^--budget .* is too small to run every drafter once; allowed: about 10 s here, or fewer --draft",
    ):
        tuned(tmp_path, seconds, tick=0.004)
    assert len(read_records(tmp_path)[1]) == runs


@pytest.mark.parametrize("seconds", [12, 20])
def test_a_small_budget_is_spent_on_the_screened_drafters_and_says_what_would_be_enough(
    tmp_path: Path, seconds: float
) -> None:
    result, _, _ = tuned(tmp_path, seconds, tick=1.0)
    advice = result.advice[0]
    candidates = [*advice.others, *([advice.best] if advice.best else [])]
    assert {candidate.name for candidate in candidates} == {"ngram@3", "suffix@3", "model@3"}
    assert advice.units > 0 and advice.needed_seconds is not None and advice.needed_seconds > seconds
    assert advice.sentence.endswith(f"of each): give --budget {advice.needed_seconds} or more to be sure")
    confirmed = tuned(tmp_path / "more", 200, tick=1.0)[0].advice[0]
    assert confirmed.needed_seconds is None and "not confirmed" not in confirmed.sentence


def test_a_unit_that_exceeds_the_budget_is_not_begun(tmp_path: Path) -> None:
    params, prompts = SamplingParams(max_tokens=4, seed=0), name_prompts(PROMPTS)
    space = SearchSpace(SpeculativeDecoder("toy"), [], params)
    start(tmp_path, make_header({"target": "toy"}, [space.plain], prompts, DecoderConfig(), params))
    meter = Meter(space.lineup, tmp_path, ticking(100, tick=1.0), lambda stage, doing: None)
    arms, group = [space.plain, space.arm(Candidate("ngram", 2))], groups(prompts, 1)[0]
    assert meter.expected(arms, 1) == 0
    first = meter.unit(arms, group, 1, 1, 100)
    assert first is not None and [run.arm for run in first] == ["none", "ngram@2"]
    assert meter.expected(arms, 1) > 0 and meter.expected(arms, 2) > 0
    assert meter.unit(arms, group, 1, 2, meter.budget.now + 1) is None
    assert len(read_records(tmp_path)[1]) == 2
