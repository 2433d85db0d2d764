"""Arms of one drafter at several draft lengths: what they are compared with, and the best length."""

import pytest

from slipstream.bench.length_series import best_length, best_lengths, references, series_of
from tests.support.toy_runs import summarized, timed

SLOW, FAST, EVEN = [0.9, 1.0, 1.1, 1.0, 1.0], [0.45, 0.5, 0.55, 0.5, 0.5], [1.1, 0.7, 1.3, 0.8, 1.0]


def test_every_arm_is_compared_with_plain_decoding_at_its_temperature() -> None:
    reference_of = references(["none~0", "none~0.8", "ngram@2~0", "ngram@2~0.8", "hf", "model@4~0.3"], "none~0")
    arms = ("ngram@2~0", "ngram@2~0.8", "model@4~0.3", "hf")
    assert [reference_of[name] for name in arms] == ["none~0", "none~0.8", "none~0", "none~0"]
    runs = [*timed("none~0", SLOW), *timed("none~0.8", FAST), *timed("ngram@2~0.8", SLOW)]
    speeds = {summary.arm: summary.speed for summary in summarized(runs, "none~0")}
    assert list(speeds) == ["none~0", "none~0.8", "ngram@2~0.8"]
    assert speeds["ngram@2~0.8"].speed_up.value == pytest.approx(0.5)


def test_the_best_length_is_named_with_its_speed_up() -> None:
    runs = [*timed("none~0", SLOW, drafted=0), *timed("ngram@2~0", FAST), *timed("ngram@4~0", SLOW)]
    (series,) = series_of(summarized(runs, "none~0"))
    best = best_length(series)
    assert series.name == "ngram~0" and [cell.length for cell in series.cells] == [0, 2, 4]
    assert (
        best == "ngram, greedy, batch 1: draft 2, 2.00x plain decoding (2.00 to 2.00), 20.0 tok/s, texts: 5 identical"
    )
    assert best_lengths(summarized(runs, "none~0")) == [best]
    one_length = [*timed("none~0", SLOW, drafted=0), *timed("ngram@2~0", FAST)]
    assert best_lengths(summarized(one_length, "none~0")) == []  # nothing to choose from


def test_if_no_drafter_pays_the_advice_is_not_to_speculate() -> None:
    runs = [*timed("none~0", FAST, drafted=0), *timed("ngram@2~0", SLOW), *timed("ngram@4~0", FAST)]
    (series,) = series_of(summarized(runs, "none~0"))
    best = best_length(series)
    assert best is not None and "do not speculate" in best


def test_a_gain_within_the_interval_is_called_uncertain() -> None:
    runs = [*timed("none~0", SLOW, drafted=0), *timed("ngram@2~0", EVEN)]
    (series,) = series_of(summarized(runs, "none~0"))
    best = best_length(series)
    assert best is not None and "draft 2" in best
    assert best.endswith("the measurement cannot distinguish it from plain decoding")


def test_a_gain_over_fewer_than_five_prompts_has_no_interval_and_is_called_uncertain() -> None:
    runs = [*timed("none~0", SLOW[:4], drafted=0), *timed("ngram@2~0", FAST[:4])]
    (series,) = series_of(summarized(runs, "none~0"))
    best = best_length(series)
    assert best is not None and "2.00x plain decoding, 20.0 tok/s" in best and "cannot distinguish" in best


def test_there_is_no_advice_without_plain_decoding() -> None:
    (series,) = series_of(summarized([*timed("ngram@2", FAST), *timed("ngram@4", SLOW)], "ngram@2"))
    assert best_length(series) is None
