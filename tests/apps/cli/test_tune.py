"""`slipstream tune` from end to end with the toy models: the answer, the folder, the budget, refusals, failures."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from slipstream.apps.cli import consoles
from slipstream.apps.cli import tune as command
from slipstream.bench.records import read_records
from slipstream.bench.tuning import search
from slipstream.bench.tuning.search import Meter
from slipstream.config import DecoderConfig
from tests.support import command_line
from tests.support.toy_runs import ticking
from tests.support.wrong_acceptance_rules import load_wrong_rule

pytestmark = pytest.mark.slow
LINES = [{"prompt": f"The {word}", "category": kind} for kind in ("birds", "fish") for word in ("heron", "sparrow")]


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    return command_line.run(capsys, monkeypatch, "tune", "--target", "toy", *arguments)


@pytest.fixture(autouse=True)
def slow_motion(monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget counts readings of the clock, so that the load of the machine changes nothing."""
    monkeypatch.setattr(search, "Budget", ticking)


@pytest.fixture
def small(tmp_path: Path) -> tuple[str, ...]:
    """Arguments for two families of two prompts each, and an output folder."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    return ("--prompt-file", str(file), "--max-tokens", "12", "--budget", "2", "--out", str(tmp_path / "runs" / "t"))


def test_tune_writes_advice_runs_and_settings(capsys, monkeypatch, tmp_path: Path, small) -> None:
    report = tmp_path / "out.json"
    code, out, err = run(capsys, monkeypatch, *small, "--draft", "toy:3", "--batch-sizes", "1,2", "--json", str(report))
    folder = tmp_path / "runs" / "t"
    assert code == 0, err
    saved = json.loads(report.read_text())
    assert saved == json.loads((folder / "tune.json").read_text())
    assert [advice["batch"] for advice in saved["advice"]] == [1, 2]
    for advice in saved["advice"]:
        names = {standing["name"] for standing in [*advice["others"], *([advice["best"]] if advice["best"] else [])]}
        assert {"auto", "model"} <= names and advice["sentence"] in out
        assert advice["speculate"] == (advice["best"] is not None)
        assert all(standing["lost"] for standing in advice["others"])
        assert all(standing["texts"]["different"] == 0 and standing["units"] > 0 for standing in advice["others"])
    assert "batch size 1: speed-up over plain decoding" in out and "use it: slipstream generate --model toy" in out
    assert DecoderConfig.from_json(folder / "slipstream.json").drafter in ("none", "auto", "model", "ngram", "suffix")
    assert {"vllm.json", "vllm.txt", "sglang.txt", "llamacpp.txt"} <= {path.name for path in folder.iterdir()}
    header, runs = read_records(folder)
    assert header.settings["drafts"] == ["toy:3"] and header.settings["budget"] == 2
    lengths = [f"{drafter}@{n}" for drafter in ("model", "ngram", "suffix") for n in (2, 4, 8)]
    assert {run.arm for run in runs} == {"none", "auto", "model", *lengths} == set(header.settings["arms"])
    assert {run.batch for run in runs} == {1, 2}
    assert "batch size 1, round 1 of 4" in err and "batch size 2, confirmation" in err


def test_tune_works_without_a_draft_model_with_sampling_and_on_a_narrow_terminal(
    capsys, monkeypatch, tmp_path: Path, small
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(consoles.err, "_force_terminal", True)
    monkeypatch.setattr(consoles.err, "_width", 50)
    code, out, err = run(capsys, monkeypatch, *small, "--temperature", "0.8", "--longest", "2", "--out", "t")
    assert code == 0 and "batch 1: " in out, err
    names = err[err.rindex("in t: ") :].splitlines()  # broken at words
    assert len(names) > 1 and all(len(line.rstrip()) <= 50 for line in names)
    assert " ".join(map(str.strip, names)).endswith("vllm.json, vllm.txt, sglang.txt, llamacpp.txt")
    saved = json.loads((tmp_path / "t" / "tune.json").read_text())
    assert saved["settings"]["params"]["temperature"] == 0.8
    (advice,) = saved["advice"]
    arms = {result["name"] for result in [*advice["others"], *([advice["best"]] if advice["best"] else [])]}
    assert arms == {"ngram@2", "suffix@2", "auto"}


def test_a_small_budget_gives_unconfirmed_advice_and_settings(capsys, monkeypatch, tmp_path: Path, small) -> None:
    monkeypatch.setattr(search, "Budget", lambda seconds: ticking(seconds, tick=1.0))
    code, out, err = run(capsys, monkeypatch, *small, "--budget", "48", "--draft", "toy:2", "--longest", "4")
    assert code == 0 and "not confirmed: use --budget" in " ".join(out.split()), err
    folder = tmp_path / "runs" / "t"
    (advice,) = json.loads((folder / "tune.json").read_text())["advice"]
    assert advice["needed_seconds"] > 48 and "use it: slipstream generate" in out
    value = json.loads((folder / "vllm.json").read_text())
    assert value is None or value["num_speculative_tokens"] in (2, 4)


def test_a_batch_size_left_out_for_lack_of_time_is_named(capsys, monkeypatch, tmp_path: Path, small) -> None:
    whole = Meter.unit

    def slow(self: Meter, arms: Any, measured: Any, stage: str, deadline: float) -> Any:
        return None if len(measured[1].prompts) == 2 else whole(self, arms, measured, stage, deadline)

    monkeypatch.setattr(Meter, "unit", slow)
    code, out, err = run(capsys, monkeypatch, *small, "--batch-sizes", "1,2")
    assert code == 0 and "batch 1: " in out and "batch 2: " not in out
    assert "batch 2: not measured, as the budget was used up; give more --budget" in err
    assert json.loads((tmp_path / "runs" / "t" / "tune.json").read_text())["unmeasured"] == [2]


def test_too_small_a_budget_has_exit_code_2(capsys, monkeypatch, small) -> None:
    code, out, err = run(capsys, monkeypatch, *small, "--budget", "0.000001")
    assert code == 2 and out == "" and "error: --budget 1e-06 is too small to run every candidate once" in err


def test_a_drafter_with_wrong_texts_is_not_advised_and_fails_the_command(
    capsys, monkeypatch, tmp_path: Path, small
) -> None:
    right, wrong = command.load_decoder, load_wrong_rule("first-mismatch-kept")
    monkeypatch.setattr(command, "load_decoder", lambda *args: right(*args).using(acceptance=wrong))
    code, out, err = run(capsys, monkeypatch, *small, "--draft", "toy:2")
    assert code == 1 and "texts differ from plain decoding and are not ties" in err and "DIFFERENT" in out
    (advice,) = json.loads((tmp_path / "runs" / "t" / "tune.json").read_text())["advice"]
    failed = [standing for standing in advice["others"] if standing["failed"]]
    assert failed and all("not ties" in standing["lost"] for standing in failed)
    assert advice["best"] is None or not advice["best"]["failed"]


def test_a_drafter_that_breaks_is_left_out_and_fails_the_command(capsys, monkeypatch, tmp_path: Path, small) -> None:
    def broken(*arguments: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr("slipstream.drafters.ngram.NgramDrafter.propose", broken)
    code, _, err = run(capsys, monkeypatch, *small)
    assert code == 1 and "ngram@2, batch 1: failed: RuntimeError: no memory" in err
    (advice,) = json.loads((tmp_path / "runs" / "t" / "tune.json").read_text())["advice"]
    assert {result["name"] for result in advice["others"] if result["failed"]} == {"ngram@2", "ngram@4", "ngram@8"}


def test_an_interruption_says_what_is_saved(capsys, monkeypatch, tmp_path: Path, small) -> None:
    whole, calls = Meter.unit, iter(range(100))

    def interrupted(self: Meter, *arguments: Any) -> Any:
        if next(calls) == 5:
            raise KeyboardInterrupt
        return whole(self, *arguments)

    monkeypatch.setattr(Meter, "unit", interrupted)
    code, out, err = run(capsys, monkeypatch, *small)
    folder = tmp_path / "runs" / "t"
    assert code == 130 and out == "" and f"finished runs are saved in {folder / 'runs.jsonl'}" in err
    assert "start over with another --out" in err and read_records(folder)[1]
    code, _, err = run(capsys, monkeypatch, *small)
    assert code == 2 and "already holds runs; allowed: another folder; to start over: rm -r " in err


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--budget", "0"), "--budget 0; allowed: a number of seconds above 0"),
        (("--budget", "nan"), "--budget nan; allowed: a number of seconds above 0"),
        (("--drafter", "ngram"), "--drafter ngram; allowed: auto, as tune chooses the drafter"),
        (("--num-draft-tokens", "3"), "--num-draft-tokens 3; allowed: auto with tune; see --longest"),
        (("--acceptance", "topk:2"), "--acceptance topk:2 changes the output; allowed: lossless rules"),
        (("--batch-sizes", "1,x"), "--batch-sizes '1,x'; allowed: different whole numbers"),
        (("--batch-sizes", "1,1"), "--batch-sizes '1,1'; allowed: different whole numbers"),
        (("--batch-sizes", "9"), "batch size 9; allowed: up to max_batch_size (8)"),
        (("--batch-sizes", "8", "--category", "code"), "batch size 8; allowed: 1 to 5, the number of prompts"),
        (("--draft", "toy:2", "--draft", "toy:2"), "draft 'toy:2' is given twice"),
        (("--category", "poetry"), "category 'poetry'"),
    ],
)
def test_wrong_use_is_one_clear_line(capsys, monkeypatch, elsewhere: Path, arguments, message: str) -> None:
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert list(elsewhere.iterdir()) == []
