"""The race of `slipstream tune`, its advice, and how it keeps to its budget."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.bench.arms import Arm
from slipstream.bench.plan import BenchPrompt, Group, groups, name_prompts
from slipstream.bench.records import Run, make_header, read_records, start
from slipstream.bench.tuning.advice import Advice, Tuned, advise, tune
from slipstream.bench.tuning.search import Budget, Candidate, Meter, SearchSpace, candidates, in_turn, race
from slipstream.config import DecoderConfig
from slipstream.errors import SlipstreamError, UsageError
from slipstream.text.prompt_sets import builtin_prompts
from slipstream.text.results import Stats
from tests.support.toy_runs import PROMPTS, ticking

SECONDS = [1.0, 2.0, 1.5, 0.8, 1.2, 3.0, 0.9, 1.1]  # of plain decoding, by group
GROUPS = [Group((BenchPrompt(f"chat/{i}", "chat", i, "x"),)) for i in range(len(SECONDS))]
NAMES = ("ngram@2", "ngram@4", "suffix@2", "suffix@4", "model@2", "model@4", "auto")


class Scripted:
    """Stands in for `Meter`: every arm takes plain decoding's time divided by its speed-up, with noise."""

    def __init__(self, speed_ups: Mapping[str, float], *, noise: float = 0.01, **verdicts: str) -> None:
        self.speed_ups, self.noise, self.verdicts = speed_ups, noise, verdicts
        self.now = 0.0
        self.units: list[tuple[list[str], str, int]] = []
        self._rng = np.random.default_rng(0)

    def unit(self, arms: Sequence[Arm], measured: tuple[int, Group], stage: str, deadline: float) -> list[Run] | None:
        repeat, group = measured
        factors = [np.exp(self._rng.normal(0, self.noise)) / self.speed_ups.get(arm.name, 1.0) for arm in arms]
        seconds = [float(SECONDS[group.prompts[0].index] * factor) for factor in factors]
        if self.now + sum(seconds) > deadline:
            return None
        self.now += sum(seconds)
        self.units.append(([arm.name for arm in arms], group.ids[0], repeat))
        return [self._run(arm.name, group, repeat, taken) for arm, taken in zip(arms, seconds, strict=True)]

    def _run(self, arm: str, group: Group, repeat: int, seconds: float) -> Run:
        verdict = self.verdicts.get(arm.partition("@")[0], "identical")
        if verdict == "error":
            return Run(arm, group.ids, "chat", 1, repeat, error="RuntimeError: no memory")
        stats = Stats(num_rounds=10, num_steps=10, num_output_tokens=20, total_seconds=seconds).to_dict()
        return Run(arm, group.ids, "chat", 1, repeat, seconds, 20, [[1] * 20], [verdict], stats, [])  # type: ignore[list-item]


def raced(meter: Scripted, seconds: float = 1000, names: Sequence[str] = NAMES) -> Advice:
    choices = {name: Candidate(name.partition("@")[0], int(name[-1]) if "@" in name else None) for name in names}
    arms = [Arm("none", "none"), *(Arm(name, choice.drafter, choice.length) for name, choice in choices.items())]
    result = race(meter, arms, GROUPS, seconds)
    return advise(1, choices, result)


def test_the_fastest_wins_and_its_speed_up_is_that_of_runs_after_it_was_chosen() -> None:
    meter = Scripted({"model@4": 1.8, "model@2": 1.5, "suffix@4": 1.2, "ngram@2": 0.8})
    advice = raced(meter)
    sizes = [len(names) for names, _, _ in meter.units]
    assert sorted(set(sizes), reverse=True) == [8, 5, 3, 2]  # plain decoding and 7, 4, 2 and 1 candidates
    assert advice.best is not None and advice.best.name == "model@4"
    assert advice.best.units == sizes.count(2) == 8  # every prompt once, then the interval is narrow
    assert advice.best.measured is not None and advice.best.measured.value == pytest.approx(1.8, rel=0.02)
    assert advice.sentence.startswith("batch 1: model@4 with draft model None, 1.")
    assert advice.others[0].name == "model@2" and advice.others[0].lost == "0.83x the speed of model@4"
    assert len({(group, repeat) for _, group, repeat in meter.units}) == len(meter.units)  # no prompt twice the same


@pytest.mark.parametrize("seed", range(5))
def test_the_choice_is_within_three_percent_of_the_best(seed: int) -> None:
    """Prompts vary, arms differ by a few percent, and there is time for about six runs of all."""
    rng = np.random.default_rng(seed)
    speed_ups = {name: float(rng.uniform(0.9, 1.6)) for name in NAMES}
    advice = raced(Scripted(speed_ups, noise=0.02), seconds=150)
    assert advice.best is not None and speed_ups[advice.best.name] >= 0.97 * max(speed_ups.values())


@pytest.mark.parametrize(
    ("speed_up", "noise", "lost"),
    [
        (0.7, 0.01, "no gain beyond the noise"),
        (1.01, 0.0, "gains less than 2%"),
        pytest.param(1.03, 0.5, "no gain beyond", marks=pytest.mark.slow),
    ],
)
def test_a_winner_without_a_certain_gain_is_not_advised(speed_up: float, noise: float, lost: str) -> None:
    advice = raced(Scripted(dict.fromkeys(NAMES, speed_up), noise=noise), seconds=300)
    assert advice.best is None and "do not speculate" in advice.sentence
    assert any(lost in other.lost for other in advice.others)


@pytest.mark.parametrize(
    ("verdict", "lost"),
    [
        ("different", "1 of 1 texts differ from plain decoding and are not ties"),
        ("error", "failed: RuntimeError: no me"),
    ],
)
def test_an_arm_that_fails_or_changes_a_text_drops_out_at_once(verdict: str, lost: str) -> None:
    meter = Scripted({"model@4": 2.0, "model@2": 2.0, "suffix@2": 1.3}, model=verdict)
    advice = raced(meter)
    assert advice.best is not None and advice.best.name == "suffix@2"
    assert not any("model@4" in names for names, _, _ in meter.units[1:])
    failed = {other.name: other.lost for other in advice.others if other.failed}
    assert set(failed) == {"model@2", "model@4"} and all(why.startswith(lost) for why in failed.values())
    assert raced(Scripted({}, ngram=verdict), names=["ngram@2"]).best is None


def test_a_winner_that_was_hardly_confirmed_is_judged_by_all_runs_of_the_race() -> None:
    arms = [Arm("none", "none"), Arm("ngram@2", "ngram", 2), Arm("ngram@4", "ngram", 4)]
    meter = Scripted({"ngram@2": 1.5, "ngram@4": 1.2})
    result = race(meter, arms, GROUPS, 1000)
    result.confirmation = result.confirmation[:1]
    choices = {arm.name: Candidate("ngram", arm.num_draft_tokens) for arm in arms[1:]}  # type: ignore[arg-type]
    best = advise(1, choices, result, needed_seconds=70).best
    assert best is not None and best.units == sum(run.arm == "ngram@2" for run in result.runs) > 1


def test_without_plain_decoding_nothing_is_advised() -> None:
    with pytest.raises(SlipstreamError, match="plain decoding failed, so nothing can be compared: RuntimeError"):
        raced(Scripted({}, none="error"))


def test_the_first_groups_cover_every_family() -> None:
    named = [Group((prompt,)) for prompt in name_prompts(builtin_prompts())]
    first = [group.family for group in in_turn(named)[:8]]
    assert len(set(first)) == 8 and sorted(g.ids[0] for g in in_turn(named)) == sorted(g.ids[0] for g in named)


def test_candidates_have_a_few_lengths_and_those_that_drafters_choose() -> None:
    assert [choice.setting for choice in candidates([], 8)] == [
        *("ngram@2", "ngram@4", "ngram@8", "suffix@2", "suffix@4", "suffix@8"),
        "auto",
    ]
    drafted = [(choice.setting, choice.draft) for choice in candidates(["a", "b"], 3) if choice.draft]
    lengths = [(f"model@{n}", draft) for draft in "ab" for n in (2, 3)]
    assert drafted == [*lengths, ("auto", "a"), ("model", "a"), ("auto", "b"), ("model", "b")]


def tuned(
    folder: Path, seconds: float, *, drafts: tuple[str, ...] = ("toy:2",), tick: float = 0.004
) -> tuple[Tuned, Budget, SearchSpace]:
    params, prompts = SamplingParams(max_tokens=12, seed=0), name_prompts(PROMPTS)
    space = SearchSpace(SpeculativeDecoder("toy", drafts[0] if drafts else None), drafts, params)
    start(folder, make_header({"target": "toy"}, [space.plain], prompts, DecoderConfig(), params))
    budget = ticking(seconds, tick)
    meter = Meter(space.lineup, folder, budget, lambda stage, doing: None)
    return tune(space, meter, prompts, [1, 2], 3), budget, space


@pytest.mark.slow
def test_candidates_name_which_of_several_draft_models_they_use(tmp_path: Path) -> None:
    result, _, space = tuned(tmp_path, 2, drafts=("toy:2", "toy:4"))
    for advice in result.advice:
        results = [*advice.others, *([advice.best] if advice.best else [])]
        assert {"auto toy:2", "model@2 toy:2", "model toy:4", "ngram@2"} <= {result.name for result in results}
        assert all(result.units for result in results)
    assert {draft: space.decoder(Candidate("model", 2, draft)).draft.name for draft in ("toy:2", "toy:4")} == {  # type: ignore[union-attr]
        "toy:2": "toy:2",
        "toy:4": "toy:4",
    }
    with pytest.raises(UsageError, match=r"draft 'toy' is given twice"):
        SearchSpace(SpeculativeDecoder("toy"), ["toy", "toy"], SamplingParams())


def test_the_budget_is_kept_and_shared_by_batch_sizes(tmp_path: Path) -> None:
    _, budget, _ = tuned(tmp_path, 1.0)
    assert budget.now <= 1.05
    assert {run.batch for run in read_records(tmp_path)[1]} == {1, 2}


@pytest.mark.parametrize(("seconds", "runs"), [(0.001, 0), (0.1, 1)])
def test_a_budget_too_small_for_one_run_of_each_is_refused(tmp_path: Path, seconds: float, runs: int) -> None:
    with pytest.raises(
        UsageError,
        match=r"^--budget .* is too small to run every candidate once; allowed: about 10 s here, or fewer --draft",
    ):
        tuned(tmp_path, seconds)
    assert runs <= len(read_records(tmp_path)[1]) < 11


@pytest.mark.slow
def test_a_small_budget_gives_advice_that_is_called_unconfirmed_and_names_one_that_is_enough(tmp_path: Path) -> None:
    advice = tuned(tmp_path, 60, tick=1.0)[0].advice[0]
    counts = Counter(run.arm for run in read_records(tmp_path)[1] if run.batch == 1)
    results = [*advice.others, *([advice.best] if advice.best else [])]
    assert all(0 < result.units <= counts[result.name] for result in results)
    assert advice.needed_seconds is not None and advice.needed_seconds > 60
    assert advice.sentence.endswith(f"not confirmed: use --budget {advice.needed_seconds} or more to be sure")
    confirmed = tuned(tmp_path / "more", 400, tick=1.0)[0].advice[0]
    assert confirmed.needed_seconds is None and "not confirmed" not in confirmed.sentence


def test_a_unit_that_exceeds_the_budget_is_not_begun(tmp_path: Path) -> None:
    params, prompts = SamplingParams(max_tokens=4, seed=0), name_prompts(PROMPTS)
    space = SearchSpace(SpeculativeDecoder("toy"), [], params)
    start(tmp_path, make_header({"target": "toy"}, [space.plain], prompts, DecoderConfig(), params))
    meter = Meter(space.lineup, tmp_path, ticking(100, tick=1.0), lambda stage, doing: None)
    arms, group = [space.plain, space.arm(Candidate("ngram", 2))], groups(prompts, 1)[0]
    assert meter.expected(arms, 1) == 0
    first = meter.unit(arms, (1, group), "", 100)
    assert first is not None and [run.arm for run in first] == ["none", "ngram@2"]
    assert meter.expected(arms, 1) > 0 and meter.expected(arms, 2) > 0
    assert meter.unit(arms, (2, group), "", meter.now + 1) is None
    assert len(read_records(tmp_path)[1]) == 2
