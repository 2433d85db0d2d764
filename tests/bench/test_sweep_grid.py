"""The grid of a sweep, and the advice derived from its measurements."""

import pytest

from slipstream.bench.sweep_grid import Grid, best_of, references, series_of, summarise_by_temperature
from slipstream.errors import UsageError
from tests.support.markers import subcases
from tests.support.toy_runs import timed

SLOW, FAST, EVEN = [0.9, 1.0, 1.1, 1.0], [0.45, 0.5, 0.55, 0.5], [1.1, 0.7, 1.3, 0.8]


def test_the_grid_has_plain_decoding_once_per_temperature() -> None:
    grid = Grid(("ngram", "model"), (4, 0, 2), (0.0, 0.8))
    names = [arm.name for arm in grid.arms()]
    first = ["none~0", "ngram@2~0", "ngram@4~0", "model@2~0", "model@4~0"]
    assert names == [*first, *(name.replace("~0", "~0.8") for name in first)]
    assert [arm.temperature for arm in grid.arms()] == [0.0] * 5 + [0.8] * 5
    assert grid.reference == "none~0" and len(Grid(("ngram",), (2, 4), (0.0,)).arms()) == 3


@subcases(
    "drafters, lengths, temperatures, message",
    [
        (("none",), (1,), (0.0,), "none is draft length 0"),
        (("ngram", "ngram"), (1,), (0.0,), "drafters: 'ngram' is given twice.*each once"),
        (("ngram",), (0,), (0.0,), "at least one of them above 0"),
        (("ngram",), range(101), (0.0,), "^draft length 65; allowed: 0 to 64$"),
        (("ngram",), (1,), (), "temperatures=.*at least one"),
    ],
)
def test_an_invalid_grid_is_refused(drafters, lengths, temperatures, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Grid(drafters, lengths, temperatures)


def test_every_arm_is_compared_with_plain_decoding_at_its_temperature() -> None:
    reference_of = references(["none~0", "none~0.8", "ngram@2~0", "ngram@2~0.8", "hf", "model@4~0.3"], "none~0")
    assert [reference_of[name] for name in ("ngram@2~0", "ngram@2~0.8", "model@4~0.3", "hf")] == [
        "none~0",
        "none~0.8",
        "none~0",
        "none~0",
    ]
    runs = [*timed("none~0", SLOW), *timed("none~0.8", FAST), *timed("ngram@2~0.8", SLOW)]
    speeds = {summary.arm: summary.speed for summary in summarise_by_temperature(runs, "none~0")}
    assert list(speeds) == ["none~0", "none~0.8", "ngram@2~0.8"]
    assert speeds["ngram@2~0.8"].speed_up.value == pytest.approx(0.5)


def test_the_best_length_is_named_with_its_speed_up() -> None:
    runs = [*timed("none~0", SLOW, drafted=0), *timed("ngram@2~0", FAST), *timed("ngram@4~0", SLOW)]
    (series,) = series_of(summarise_by_temperature(runs, "none~0"))
    best = best_of(series)
    assert series.name == "ngram~0" and [cell.length for cell in series.cells] == [0, 2, 4]
    assert best is not None and best.length == 2 and best.certain
    assert (
        best.sentence
        == "ngram, greedy, batch 1: draft 2, 2.00x plain decoding (2.00 to 2.00), 20.0 tok/s, texts: 4 identical"
    )


def test_if_no_drafter_pays_the_advice_is_not_to_speculate() -> None:
    runs = [*timed("none~0", FAST, drafted=0), *timed("ngram@2~0", SLOW), *timed("ngram@4~0", FAST)]
    (series,) = series_of(summarise_by_temperature(runs, "none~0"))
    best = best_of(series)
    assert best is not None and best.length == 0 and "do not speculate" in best.sentence


def test_a_gain_within_the_interval_is_called_uncertain() -> None:
    runs = [*timed("none~0", SLOW, drafted=0), *timed("ngram@2~0", EVEN)]
    (series,) = series_of(summarise_by_temperature(runs, "none~0"))
    best = best_of(series)
    assert best is not None and best.length == 2 and not best.certain
    assert best.sentence.endswith("the measurement cannot distinguish it from plain decoding")


def test_there_is_no_advice_without_plain_decoding() -> None:
    (series,) = series_of(summarise_by_temperature([*timed("ngram@2", FAST), *timed("ngram@4", SLOW)], "ngram@2"))
    assert best_of(series) is None
