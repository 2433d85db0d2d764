"""The grid of a sweep, the advice that follows from it, and the command as a user meets it."""

import json
import sys
from pathlib import Path

import pytest

from slipstream.apps import cli
from slipstream.apps.cli import measuring as command
from slipstream.bench.records import FILE, read_records
from slipstream.bench.sweep_grid import Grid, best_of, references, series_of, summarise_by_temperature
from slipstream.certificate.wrong_rules import load_wrong_rule
from slipstream.errors import UsageError
from tests.support.markers import subcases
from tests.support.toy_runs import timed

pytestmark = pytest.mark.slow

SLOW, FAST, EVEN = [0.9, 1.0, 1.1, 1.0], [0.45, 0.5, 0.55, 0.5], [1.1, 0.7, 1.3, 0.8]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["slipstream", "sweep", "--target", "toy", *arguments])
    with pytest.raises(SystemExit) as done:
        cli.main()
    captured = capsys.readouterr()
    return (done.value.code if isinstance(done.value.code, int) else 0), captured.out, captured.err


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
def test_an_impossible_grid_is_refused(drafters, lengths, temperatures, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Grid(drafters, lengths, temperatures)


def test_every_arm_is_compared_with_plain_decoding_at_its_temperature() -> None:
    found = references(["none~0", "none~0.8", "ngram@2~0", "ngram@2~0.8", "hf", "model@4~0.3"], "none~0")
    assert [found[name] for name in ("ngram@2~0", "ngram@2~0.8", "model@4~0.3", "hf")] == [
        "none~0",
        "none~0.8",
        "none~0",
        "none~0",
    ]
    runs = [*timed("none~0", SLOW), *timed("none~0.8", FAST), *timed("ngram@2~0.8", SLOW)]
    speeds = {one.arm: one.speed for one in summarise_by_temperature(runs, "none~0")}
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


def test_where_nothing_pays_the_advice_is_not_to_speculate() -> None:
    runs = [*timed("none~0", FAST, drafted=0), *timed("ngram@2~0", SLOW), *timed("ngram@4~0", FAST)]
    (series,) = series_of(summarise_by_temperature(runs, "none~0"))
    best = best_of(series)
    assert best is not None and best.length == 0 and "do not speculate" in best.sentence


def test_a_gain_within_the_interval_is_not_sold_as_one() -> None:
    runs = [*timed("none~0", SLOW, drafted=0), *timed("ngram@2~0", EVEN)]
    (series,) = series_of(summarise_by_temperature(runs, "none~0"))
    best = best_of(series)
    assert best is not None and best.length == 2 and not best.certain
    assert best.sentence.endswith("the measurement does not tell it from plain decoding")


def test_no_advice_without_plain_decoding() -> None:
    (series,) = series_of(summarise_by_temperature([*timed("ngram@2", FAST), *timed("ngram@4", SLOW)], "ngram@2"))
    assert best_of(series) is None


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"The {bird} looked", "category": bird} for bird in ("heron", "sparrow")]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


SMALL = ("--draft", "toy:2", "--max-tokens", "12", "--repeats", "2")


def test_a_sweep_leaves_runs_a_table_and_advice(capsys, monkeypatch, tmp_path: Path, prompts: str) -> None:
    folder, file = tmp_path / "runs", tmp_path / "out.json"
    arguments = (
        *SMALL,
        "--prompt-file",
        prompts,
        "--drafters",
        "ngram,model",
        "--lengths",
        "0-2",
        "--out",
        str(folder),
    )
    more = ("--temperatures", "0,0.8", "--json", str(file), "--report")
    code, out, err = run(capsys, monkeypatch, *arguments, *more)
    header, runs = read_records(folder)
    report = json.loads(file.read_text())["sweep"]
    assert code == 0, err
    assert len(runs) == 2 * 2 * 2 * (1 + 2 * 2) and header.settings["reference"] == "none~0"
    assert [one["series"] for one in report] == ["ngram~0", "model~0", "ngram~0.8", "model~0.8"]
    assert all([cell["length"] for cell in one["lengths"]] == [0, 1, 2] for one in report)
    model = report[1]["lengths"][2]
    assert model["verdicts"]["identical"] == 2 and len(model["acceptance_by_position"]) == 2
    assert model["stats"]["acceptance_rate"] > 0
    assert report[1]["best"]["sentence"] in out and "2 identical" in out
    assert (folder / "report.html").exists() and "report.html" in err


def test_a_sweep_goes_on_where_it_was_killed(capsys, monkeypatch, tmp_path: Path, prompts: str) -> None:
    folder = tmp_path / "runs"
    arguments = (*SMALL, "--prompt-file", prompts, "--lengths", "0-2", "--out", str(folder))
    assert run(capsys, monkeypatch, *arguments)[0] == 0
    whole = (folder / FILE).read_text().splitlines(keepends=True)
    (folder / FILE).write_text("".join(whole[:5]) + whole[5][:40])  # killed while it wrote the fifth run
    assert run(capsys, monkeypatch, *arguments)[0] == 0
    lines = (folder / FILE).read_text().splitlines(keepends=True)
    assert lines[:5] == whole[:5] and len(lines) == len(whole)
    code, _, err = run(capsys, monkeypatch, *arguments, "--top-k", "5")
    assert code == 2 and "top_k" in err and "allowed: the same settings, or another folder" in err


def test_a_wrong_text_fails_the_command(capsys, monkeypatch, tmp_path: Path, prompts: str) -> None:
    right, wrong = command.load_decoder, load_wrong_rule("first-mismatch-kept")
    monkeypatch.setattr(command, "load_decoder", lambda *args: right(*args).using(acceptance=wrong))
    arguments = (*SMALL, "--prompt-file", prompts, "--lengths", "3", "--out", str(tmp_path / "runs"))
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 1 and "differ from plain decoding and are no ties" in err and "DIFFER" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "8-x"), "--lengths '8-x'; allowed: whole numbers and ranges"),
        (("--lengths", "0-100"), "draft length 65; allowed: 0 to 64\n"),
        (("--lengths", "5-3"), "the range 5-3 is empty"),
        (("--temperatures", "-1"), "--temperatures '-1'; allowed: numbers, 0 or more"),
        (("--temperature", "0.5"), "--temperature 0.5 names one temperature; allowed: --temperatures"),
        (("--num-draft-tokens", "3"), "--num-draft-tokens 3 names one length; allowed: --lengths"),
        (("--drafter", "ngram", "--drafters", "ngram_table"), "--drafter ngram beside --drafters"),
        (("--drafters", "none"), "none is draft length 0"),
        (("--drafters", "oracle"), "drafter"),
        (("--batch-size", "9"), "--batch-size 9; allowed: up to max_batch_size (8)"),
        (("--category", "poetry"), "category 'poetry'"),
    ],
)
def test_wrong_use_is_one_clear_line(capsys, monkeypatch, tmp_path: Path, arguments, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
