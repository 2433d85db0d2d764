"""Figures from runs: medians, intervals with the right coverage, verdicts, and no number for a failed run."""

from typing import Any

import numpy as np
import pytest

from slipstream.bench.records import Run
from slipstream.bench.summary import speed, speed_up, summarize, total_stats, wrong_texts
from slipstream.core.rounds import Round, Seconds
from slipstream.text.results import Stats

EXPERIMENTS, GROUPS, TRUTH, SPREAD = 150, 25, 2.0, 0.3


def experiment(seed: int, repeats: int, jitter: float) -> tuple[list[list[float]], list[list[float]]]:
    """Seconds of two arms: log-normal speed-ups with geometric mean TRUTH, and jitter that repeats bring."""
    rng = np.random.default_rng(seed)
    ratio = np.exp(np.log(TRUTH) + SPREAD * rng.standard_normal(GROUPS))
    base = np.exp(rng.standard_normal(GROUPS))  # prompts take very different times; pairing removes the difference
    noise = np.exp(jitter * rng.standard_normal((2, GROUPS, repeats)))
    return (base[:, None] / ratio[:, None] * noise[0]).tolist(), (base[:, None] * noise[1]).tolist()


@pytest.mark.slow
@pytest.mark.parametrize(("repeats", "jitter"), [(1, 0.0), (3, 0.05)])
def test_intervals_cover_the_truth_in_95_percent_of_experiments(repeats: int, jitter: float) -> None:
    tokens, covered, widths = [10] * GROUPS, 0, []
    for seed in range(EXPERIMENTS):
        times, base = experiment(seed, repeats, jitter)
        ratio = speed_up(tokens, times, tokens, base)
        assert ratio.low is not None and ratio.high is not None and ratio.low <= ratio.value <= ratio.high
        covered += ratio.low <= TRUTH <= ratio.high
        widths.append(np.log(ratio.high / ratio.low))
    assert 0.88 <= covered / EXPERIMENTS <= 0.99
    # the normal interval of a mean of GROUPS logarithms
    assert np.mean(widths) == pytest.approx(2 * 1.96 * SPREAD / GROUPS**0.5, rel=0.12)


def test_intervals_are_deterministic() -> None:
    times, base = experiment(0, 3, 0.1)
    assert speed_up([5] * GROUPS, times, [5] * GROUPS, base) == speed_up([5] * GROUPS, times, [5] * GROUPS, base)


def test_values_are_computed_from_medians_over_repeats() -> None:
    tokens_per_second = speed([10, 30], [[1.0, 2.0, 90.0], [3.0, 2.0, 90.0]])
    assert tokens_per_second.value == 40 / (2.0 + 3.0)
    ratio = speed_up([10, 30], [[1.0, 9.0, 2.0], [1.0]], [10, 20], [[8.0, 0.1, 9.0], [2.0]])
    assert ratio.value == pytest.approx(((8.0 / 2.0) * (30 / 20 * 2.0)) ** 0.5)


def test_slow_prompts_do_not_widen_the_interval_of_a_ratio() -> None:
    slow = [[1.0, 5.0, 2.0], [3.0, 1.0, 8.0]]
    ratio = speed_up([4, 4], slow, [4, 4], [[2 * s for s in row] for row in slow])
    assert (ratio.value, ratio.low, ratio.high) == pytest.approx((2.0, 2.0, 2.0))
    assert (s := speed([4, 4], slow)).low is not None and s.low < s.value


def test_one_measurement_has_no_interval() -> None:
    assert (speed([4], [[2.0]]).value, speed([4], [[2.0]]).low) == (2.0, None)
    assert speed_up([4], [[2.0]], [4], [[4.0]]).high is None
    assert speed([4], [[2.0, 1.0]]).low is not None


def run(arm: str, prompt: str, seconds: float, repeat: int = 0, **changes: Any) -> Run:
    values: dict[str, Any] = {"num_output_tokens": 10, "texts": [[1] * 10], "verdicts": ["identical"]} | changes
    return Run(arm, [prompt], prompt[0], 1, repeat, seconds, **values)


def stats(drafted: int, kept: int, seconds: Seconds, *, lossless: bool = True) -> dict[str, Any]:
    round = Round(0, drafted, 1, 5, tuple(range(drafted)), tuple(range(kept + 1)), kept, kept < drafted, None, seconds)
    return Stats.of([round], lossless=lossless).to_dict()


def test_speed_ups_are_paired_by_prompt_overall_and_per_family() -> None:
    times = {"a/1": (8.0, 2.0), "a/2": (1.0, 1.0), "b/1": (1.0, 2.0)}
    runs = [run(arm, prompt, pair[i]) for prompt, pair in times.items() for i, arm in enumerate(("none", "ngram"))]
    none, ngram = summarize(runs, "none")
    assert none.speed is not None and none.speed.speed_up is not None and none.speed.speed_up.value == 1.0
    assert ngram.speed is not None and ngram.speed.speed_up is not None
    assert ngram.speed.speed_up.value == pytest.approx((4 * 1 * 0.5) ** (1 / 3))
    assert ngram.speed.tokens_per_second.value == 30 / 5
    values = {name: figures.speed_up.value for name, figures in ngram.families.items() if figures.speed_up is not None}
    assert values == {"a": pytest.approx(2.0), "b": pytest.approx(0.5)}


def test_a_failed_run_removes_the_numbers_of_its_family_only() -> None:
    broken = run("hf", "a/1", 0.0, num_output_tokens=0, texts=[], verdicts=[], error="ValueError: no")
    runs = [run("none", "a/1", 1.0), broken, run("none", "b/1", 1.0), run("hf", "b/1", 2.0)]
    none, baseline = summarize(runs, "none")
    assert none.failed == 0 and none.speed is not None
    assert baseline.speed is None and baseline.failed == 1 and baseline.error == "ValueError: no"
    assert list(baseline.families) == ["b"] and baseline.verdicts["identical"] == 1


def test_there_is_no_ratio_if_the_reference_failed() -> None:
    broken = run("none", "a/1", 0.0, num_output_tokens=0, texts=[], verdicts=[], error="ValueError: no")
    ngram = summarize([broken, run("ngram", "a/1", 1.0)], "none")[1]
    assert ngram.speed is not None and ngram.speed.speed_up is None and ngram.speed.tokens_per_second.value == 10


def test_the_worst_verdict_of_several_repeats_counts() -> None:
    good, bad = stats(2, 1, Seconds(total=1.0)), stats(2, 1, Seconds(total=1.0), lossless=False)
    verdicts = ["identical", "different", "tie"]
    runs = [run("ngram", "a/1", 1.0, i, verdicts=[v], stats=good) for i, v in enumerate(verdicts)]
    runs += [run("model/typical", "a/1", 1.0, verdicts=["different"], stats=bad)]
    runs += [run("hf", "a/1", 1.0, verdicts=["different"])]
    summaries = summarize(runs, "none")
    assert [summary.verdicts["different"] for summary in summaries] == [1, 1, 1]
    assert [summary.arm for summary in wrong_texts(summaries)] == ["ngram"]  # no other arm promises this text


def test_time_is_split_into_shares_of_the_measured_seconds() -> None:
    parts = Seconds(prefill=1.0, draft=2.0, verify=3.0, accept=0.5, total=7.0)
    (summary,) = summarize([run("model", "a/1", 10.0, stats=stats(4, 2, parts))], "none")
    assert summary.time_split == pytest.approx(
        {"prefill": 0.1, "draft": 0.2, "verify": 0.3, "accept": 0.05, "overhead": 0.35}
    )  # without the prompt, a round took 6 seconds, of which half a second is overhead
    assert summary.round_overhead == pytest.approx(0.5 / 6) == summary.to_dict()["round_overhead"]
    (baseline,) = summarize([run("hf", "a/1", 1.0)], "none")
    assert baseline.round_overhead is None


def test_statistics_of_several_runs_add_up() -> None:
    parts = Seconds(total=1.0)
    first, second = stats(4, 2, parts), stats(2, 2, parts)
    total = total_stats([first, second])
    assert (total.num_draft_tokens, total.num_accepted_tokens, total.num_rounds, total.total_seconds) == (6, 4, 2, 2.0)
    assert total.drafted_per_position == [2, 2, 1, 1] and total.accepted_per_position == [2, 2, 0, 0]
    assert total.lossless and not total_stats([first, stats(1, 1, parts, lossless=False)]).lossless
    (summary,) = summarize([run("m", "a/1", 1.0, stats=first), run("m", "a/2", 1.0, stats=second)], "none")
    assert summary.acceptance_by_position == [1.0, 1.0, 0.0, 0.0] and summary.to_dict()["stats"]["alpha"] == 4 / 5
