"""How `tune` chooses an arm from runs whose best arm is known by construction, and the race that makes those runs."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from slipstream import Stats
from slipstream.bench.arms import Arm, parse_arm
from slipstream.bench.plan import BenchPrompt, Group, name_prompts
from slipstream.bench.records import Run
from slipstream.bench.speed_model.accepted_lengths import Acceptance
from slipstream.bench.speed_model.round_costs import Costs
from slipstream.bench.tuning.advice import advise, log_speed_ups, optimism
from slipstream.bench.tuning.search import (
    FIRST_RUNG,
    Candidate,
    Entry,
    Screened,
    in_turn,
    predictable,
    search,
    settled,
    shortlist,
    survivors,
    unpredictable,
)
from slipstream.errors import SlipstreamError
from slipstream.text.prompt_sets import builtin_prompts

TOKENS = 20
PLAIN = [1.0, 2.0, 1.5, 0.8, 1.2, 3.0, 0.9, 1.1]


def run(
    arm: str,
    group: int,
    repeat: int,
    seconds: float,
    *,
    draft: float = 0.0,
    verdict: str = "identical",
    positions: tuple[list[int], list[int]] = ([10, 10], [7, 3]),
) -> Run:
    """draft: the share of the time that drafting took; positions: tokens drafted and accepted at each, in 10 rounds."""
    drafted, accepted = ([], []) if arm == "none" else positions
    stats = Stats(
        num_rounds=10,
        num_steps=10,
        num_output_tokens=TOKENS,
        num_draft_tokens=sum(drafted),
        num_accepted_tokens=sum(accepted),
        total_seconds=seconds,
        draft_seconds=draft * seconds,
        accepted_per_position=accepted,
        drafted_per_position=drafted,
    ).to_dict()
    texts = [[1] * TOKENS]
    return Run(arm, [f"chat/{group}"], "chat", 1, repeat, seconds, TOKENS, texts, [verdict], stats, [])  # type: ignore[list-item]


def timed(arm: str, seconds: Sequence[float], repeats: int = 2, **more: object) -> list[Run]:
    return [run(arm, i, repeat, time, **more) for repeat in range(1, repeats + 1) for i, time in enumerate(seconds)]  # type: ignore[arg-type]


def scaled(factor: float, noise: float = 0.0, seed: int = 0) -> list[float]:
    rng = np.random.default_rng(seed)
    return [float(time * factor * np.exp(rng.normal(0, noise))) for time in PLAIN]


def entries(*names: str) -> dict[str, Entry]:
    entry_of = {}
    for name in names:
        arm = parse_arm(name)
        assert arm.drafter is not None
        entry_of[name] = Entry(
            Candidate(arm.drafter, arm.num_draft_tokens, "d" if arm.drafter == "model" else None), 1.5
        )
    return entry_of


def test_a_clearly_better_drafter_is_advised_with_its_measured_speed_up() -> None:
    runs = [*timed("none", PLAIN), *timed("ngram@3", scaled(0.9, 0.02)), *timed("model@4", scaled(0.5, 0.02, 1))]
    advice = advise(1, entries("ngram@3", "model@4"), runs)
    assert advice.best is not None and advice.best.name == "model@4" and advice.best.predicted == 1.5
    assert advice.expected is not None and advice.expected.value == pytest.approx(2.0, rel=0.03)
    assert advice.expected.low is not None and advice.expected.low > 1.9
    assert advice.optimism < 1e-3  # one arm wins every resample, so its speed-up is not corrected
    assert (
        advice.sentence.startswith("batch 1: model@4 with draft model d, 1.99x plain decoding (1.97 to")
        and advice.units == 16
    )
    assert advice.best.texts == {"identical": 8, "reference": 0, "not compared": 0, "tie": 0, "different": 0}
    assert advice.best.acceptance_by_position == (0.7, 0.3) and advice.best.tokens_per_round == 2.0
    assert [standing.lost for standing in advice.others] == ["drafts too rarely accepted"]


def test_drafters_that_do_not_pay_are_not_advised_and_the_reason_is_named() -> None:
    dear, rare = timed("model@4", scaled(1.4), draft=0.6), timed("ngram@3", scaled(1.3), draft=0.02)
    advice = advise(1, entries("ngram@3", "model@4"), [*timed("none", PLAIN), *dear, *rare])
    assert advice.best is None and advice.expected is None
    assert advice.sentence == "batch 1: do not speculate (plain decoding, 13.9 tok/s)"
    lost = {standing.name: standing.lost for standing in advice.others}
    assert lost == {"ngram@3": "drafts too rarely accepted", "model@4": "drafting costs too much (60% of the time)"}
    assert [standing.name for standing in advice.others] == ["ngram@3", "model@4"]


@pytest.mark.parametrize(
    ("drafted", "accepted", "lost"),
    [
        ([2, 2], [2, 1], "drafts in only 20% of the rounds"),
        ([], [], "drafts in only 0% of the rounds"),
        ([4, 4], [1, 0], "drafts too rarely accepted"),
        ([10, 9], [9, 8], "too few tokens per forward"),  # accepted more often than those of the best
    ],
)
def test_a_drafter_that_rarely_drafts_is_not_said_to_be_rarely_accepted(drafted, accepted, lost: str) -> None:
    slow = timed("ngram@2", scaled(1.0), positions=(drafted, accepted))
    runs = [*timed("none", PLAIN), *slow, *timed("model@4", scaled(0.5))]
    advice = advise(1, entries("ngram@2", "model@4"), runs)
    assert advice.best is not None and [standing.lost for standing in advice.others] == [lost]


@pytest.mark.parametrize(
    ("factor", "noise", "lost"),
    [(0.99, 0.0, "gains less than 2%"), (1.0, 0.3, "no difference beyond the noise"), (0.9, 0.6, "beyond the noise")],
)
def test_a_gain_that_is_small_or_within_the_noise_is_not_advised(factor, noise, lost: str) -> None:
    advice = advise(1, entries("suffix@4"), [*timed("none", PLAIN), *timed("suffix@4", scaled(factor, noise))])
    assert advice.best is None and advice.others[0].lost.endswith(lost)


def test_a_large_gain_whose_interval_reaches_1_is_not_advised() -> None:
    uneven = [time / ratio for time, ratio in zip(PLAIN, [6.0, 0.8, 0.9, 0.9, 1.0, 0.9, 0.8, 1.1], strict=True)]
    advice = advise(1, entries("suffix@4"), [*timed("none", PLAIN), *timed("suffix@4", uneven)])
    (standing,) = advice.others
    assert standing.measured is not None and standing.measured.low is not None
    assert standing.measured.value > 1.1 and standing.measured.low < 1 and advice.best is None
    assert (
        advice.sentence.endswith("x may be chance: more prompts or time would tell")
        and "suffix@4 at" in advice.sentence
    )


def test_the_simpler_of_two_equal_drafters_wins() -> None:
    same = scaled(0.6, 0.05)
    advice = advise(
        1, entries("ngram@3", "model@4"), [*timed("none", PLAIN), *timed("model@4", same), *timed("ngram@3", same)]
    )
    assert advice.best is not None and advice.best.name == "ngram@3"
    assert [standing.lost for standing in advice.others] == ["no difference beyond the noise"]


def test_the_advised_speed_up_is_corrected_for_choosing_the_luckiest() -> None:
    names = [f"ngram@{n}" for n in range(1, 6)]
    noisy = [made for n, name in enumerate(names) for made in timed(name, scaled(0.6, 0.2, n))]
    advice = advise(1, entries(*names), [*timed("none", PLAIN), *noisy])
    assert advice.best is not None and advice.best.measured is not None and advice.expected is not None
    assert advice.optimism > 0.01
    assert advice.expected.value == pytest.approx(advice.best.measured.value * np.exp(-advice.optimism))


def test_the_correction_removes_most_of_the_bias_of_choosing_the_best() -> None:
    rng, raw, corrected = np.random.default_rng(1), [], []
    for _ in range(100):
        logs = rng.normal(0, 0.3, 16) + rng.normal(0, 0.15, (4, 16))  # four arms that are equally good: 0 is right
        raw.append(logs.mean(axis=1).max())
        corrected.append(raw[-1] - optimism(logs))
    assert np.mean(raw) > 0.02 and abs(np.mean(corrected)) < 0.6 * np.mean(raw)
    assert optimism(np.zeros((1, 8))) == 0 == optimism(np.zeros((3, 1)))
    # both prompts drawn alike, each in a quarter of the resamples: 1 over a mean of 0.5, or 0.5 over one of 0.25
    assert optimism(np.array([[1.0, 0.0], [0.0, 0.5]])) == pytest.approx((0.5 + 0.25) / 4, abs=0.01)


def test_log_speed_ups_are_paired_by_prompt_or_else_by_repeat() -> None:
    runs = [*timed("none", [1.0, 4.0]), *timed("a", [0.5, 1.0]), *timed("b", [1.0])]
    assert np.exp(log_speed_ups(runs, ["a"], "none")).tolist() == [pytest.approx([2.0, 4.0])]
    assert np.exp(log_speed_ups(runs, ["a", "b"], "none")).tolist() == [
        pytest.approx([2.0, 2.0]),
        pytest.approx([1, 1]),
    ]


def test_an_arm_that_failed_or_whose_text_differs_is_never_advised() -> None:
    wrong = timed("model@4", scaled(0.3), verdict="different")
    broken = [
        replace(measured, error="RuntimeError: no memory", texts=[], verdicts=[])
        for measured in timed("ngram@3", PLAIN)
    ]
    runs = [*timed("none", PLAIN), *wrong, *broken, *timed("suffix@4", scaled(0.8))]
    advice = advise(1, entries("ngram@3", "suffix@4", "model@4"), runs)
    assert advice.best is not None and advice.best.name == "suffix@4"
    lost = {arm.name: (arm.failed, arm.lost) for arm in advice.others}
    assert lost["model@4"] == (True, "8 of 8 texts differ from plain decoding and are no ties")
    assert lost["ngram@3"] == (True, "failed: RuntimeError: no memory")
    failed = [replace(measured, error="RuntimeError: no memory") for measured in timed("none", PLAIN)]
    with pytest.raises(SlipstreamError, match=r"plain decoding failed.*no memory"):
        advise(1, entries("ngram@3"), failed)


def test_one_run_of_each_arm_gives_no_interval_and_no_advice() -> None:
    advice = advise(1, entries("ngram@3"), [run("none", 0, 1, 1.0), run("ngram@3", 0, 1, 0.5)])
    assert advice.best is None and advice.others[0].measured is not None and advice.others[0].measured.low is None


def test_a_single_run_of_each_arm_is_enough_for_advice_that_is_called_unconfirmed() -> None:
    runs = [run("none", 0, 1, 1.0), run("ngram@3", 0, 1, 0.9), run("suffix@3", 0, 1, 0.5)]
    advice = advise(1, entries("ngram@3", "suffix@3"), runs, needed_seconds=90)
    assert advice.best is not None and advice.best.name == "suffix@3"
    assert advice.sentence == (
        "batch 1: suffix@3, 2.00x plain decoding; not confirmed (1 run of each): give --budget 90 or more to be sure"
    )
    assert [standing.lost for standing in advice.others] == ["too few runs to tell"]
    slow = advise(1, entries("ngram@3"), [run("none", 0, 1, 1.0), run("ngram@3", 0, 1, 0.99)], needed_seconds=90)
    assert slow.best is None and slow.sentence.endswith(
        "tok/s); not confirmed (1 run of each): give --budget 90 or more to be sure"
    )


def costs(step: float) -> Costs:
    widths = {w: 10.0 + 0.1 * w for w in range(1, 10)}
    return Costs({1: widths}, {1: dict.fromkeys(widths, 0.5)}, {1: step}, {1: 0.1})


def test_screening_says_that_a_drafter_drafts_too_rarely() -> None:
    rare = Acceptance((0.02, 0.01), (0.03, 0.02))
    slow = replace(costs(0.01), draft_round={1: 20.0})
    out = Screened(Candidate("model", draft="d"), rare, slow).entry(1, 8).out
    assert out == "drafts in only 3% of the rounds"


@pytest.mark.parametrize(
    ("step", "alpha", "length", "out"),
    [
        (0.01, 0.9, 8, None),
        (2.0, 0.7, 3, None),
        (30.0, 0.9, 1, "drafting costs too much"),
        (5.0, 0.02, 1, "drafts too rarely accepted"),
    ],
)
def test_screening_takes_the_best_predicted_length_and_says_why_a_drafter_is_out(step, alpha, length, out) -> None:
    entry = Screened(Candidate("model", draft="d"), Acceptance.by_position([alpha] * 8), costs(step)).entry(1, 8)
    assert entry.candidate == Candidate("model", length, "d") and entry.out == out
    assert entry.predicted is not None and (entry.predicted < 0.8) == (out is not None)


def test_drafters_without_a_prediction_are_still_measured() -> None:
    predicted = Screened(Candidate("suffix"), Acceptance.by_position([0.9] * 7), costs(0.0))
    unpredicted, nothing = Screened(Candidate("ngram")), Screened(Candidate("ngram"), Acceptance((), ()), costs(0.0))
    assert [candidate.candidate.setting for candidate in shortlist([predicted, unpredicted], [], 1, 8)] == [
        "suffix@7",
        "ngram@7",
        "auto",
    ]
    assert [candidate.candidate.setting for candidate in shortlist([unpredicted], [], 1, 4)] == ["ngram@4", "auto"]
    assert nothing.entry(1, 8).out == "drafts too rarely found (never)"
    assert [candidate.setting for candidate in unpredictable(["a", "b"])] == ["auto", "model"] * 2
    candidates = [(candidate.drafter, candidate.draft) for candidate in predictable(["a", "b"])]
    assert candidates == [("ngram", None), ("suffix", None), ("model", "a"), ("model", "b")]
    assert (Candidate("auto").kind, Candidate("auto", draft="a").kind) == ("suffix", "hybrid")
    assert Screened(Candidate("model"), failed="X").entry(1, 8).failed


class Scripted:
    """A meter whose arms take PLAIN times their factor, with noise; the time limit allows `max_units` units."""

    def __init__(self, factors: Mapping[str, float], max_units: int, noise: float = 0.01) -> None:
        self.factors, self.left, self.noise = factors, max_units, noise
        self.asked: list[tuple[list[str], str, int]] = []
        self._rng = np.random.default_rng(0)

    def unit(self, arms: Sequence[Arm], group: Group, batch: int, repeat: int, deadline: float) -> list[Run] | None:
        if len(self.asked) == self.left:
            return None
        self.asked.append(([arm.name for arm in arms], group.ids[0], repeat))
        at = group.prompts[0].index
        noise = np.exp(self._rng.normal(0, self.noise, len(arms)))
        pairs = zip(arms, noise, strict=True)
        return [run(arm.name, at, repeat, PLAIN[at] * self.factors[arm.name] * float(n)) for arm, n in pairs]


GROUPS = [Group((BenchPrompt(f"chat/{i}", "chat", i, "x"),)) for i in range(len(PLAIN))]


def arms_of(*names: str) -> list[Arm]:
    return [parse_arm(name) for name in names]


def test_the_search_drops_beaten_arms_and_ends_once_the_best_is_known() -> None:
    meter = Scripted({"none": 1.0, "ngram@3": 0.9, "model@4": 0.5, "suffix@4": 0.5}, max_units=500)
    runs = search(meter, arms_of("none", "ngram@3", "model@4", "suffix@4"), GROUPS, 1, 1e9)
    lineups = [names for names, _, _ in meter.asked]
    assert lineups[0] == ["none", "ngram@3", "model@4", "suffix@4"] and lineups[-1] == ["none", "model@4", "suffix@4"]
    assert len(lineups) == 9  # the second rung, the first one that begins after all eight groups
    assert [group for _, group, _ in meter.asked] == [*(f"chat/{i}" for i in range(8)), "chat/0"]
    assert meter.asked[8][2] == 2 and len(runs) == sum(map(len, lineups))


def test_the_search_ends_when_only_plain_decoding_or_no_time_is_left() -> None:
    meter = Scripted({"none": 1.0, "ngram@3": 1.5}, max_units=500)
    search(meter, arms_of("none", "ngram@3"), GROUPS, 1, 1e9)
    assert len(meter.asked) == FIRST_RUNG
    meter = Scripted({"none": 1.0, "ngram@3": 0.9}, max_units=30, noise=0.5)
    assert len(search(meter, arms_of("none", "ngram@3"), GROUPS, 1, 1e9)) == 60 and len(meter.asked) == 30


def test_differences_within_the_noise_drop_no_arm_and_end_no_search() -> None:
    runs = [*timed("none", PLAIN), *timed("a", scaled(0.95, 0.3, 1)), *timed("b", scaled(0.9, 0.3, 2))]
    assert survivors(runs, ["none", "a", "b"]) == ["none", "a", "b"] and not settled(runs, ["none", "a", "b"])
    clear = [*timed("none", PLAIN), *timed("a", scaled(0.5)), *timed("b", scaled(0.8, 0.05))]
    assert survivors(clear, ["none", "a", "b"]) == ["none", "a"] and settled(clear, ["none", "a"])


def test_the_first_groups_cover_every_family() -> None:
    named = [Group((prompt,)) for prompt in name_prompts(builtin_prompts())]
    first = [group.family for group in in_turn(named)[:8]]
    assert len(set(first)) == 8 and sorted(g.ids[0] for g in in_turn(named)) == sorted(g.ids[0] for g in named)
