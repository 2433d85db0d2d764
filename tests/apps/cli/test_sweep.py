"""`slipstream sweep`: runs, a table, advice, refusals."""

import json
from pathlib import Path

import pytest

from slipstream.apps.cli import measuring as command
from slipstream.bench.records import FILE, read_records
from tests.support import command_line
from tests.support.wrong_acceptance_rules import load_wrong_rule

pytestmark = pytest.mark.slow


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    return command_line.run(capsys, monkeypatch, "sweep", "--target", "toy", *arguments)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": f"The {bird} looked", "category": bird} for bird in ("heron", "sparrow")]
    file.write_text("\n".join(map(json.dumps, lines)))
    return str(file)


SMALL = ("--draft", "toy:2", "--max-tokens", "12", "--repeats", "2")


def test_a_sweep_leaves_runs_a_table_and_advice(capsys, monkeypatch, tmp_path: Path, prompts: str) -> None:
    folder, file = tmp_path / "runs", tmp_path / "out.json"
    arguments = (*SMALL, "--prompt-file", prompts, "--drafters", "ngram,model", "--lengths", "0-2")
    arguments += ("--out", str(folder))
    more = ("--temperatures", "0,0.8", "--json", str(file), "--report")
    code, out, err = run(capsys, monkeypatch, *arguments, *more)
    header, runs = read_records(folder)
    report = json.loads(file.read_text())
    assert code == 0, err
    assert len(runs) == 2 * 2 * 2 * (1 + 2 * 2) and header.settings["reference"] == "none~0"
    arms = {arm["arm"]: arm for arm in report["summary"]}
    drafting = [f"{drafter}@{n}" for drafter in ("ngram", "model") for n in (1, 2)]
    assert set(arms) == {f"{name}~{t}" for t in ("0", "0.8") for name in ("none", *drafting)}
    model = arms["model@2~0"]
    assert model["verdicts"]["identical"] == 2 and len(model["acceptance_by_position"]) == 2
    assert model["stats"]["acceptance_rate"] > 0
    assert "speed-up against none~0," in out and "speed-up against none~0.8," in out
    assert len(report["best_lengths"]) == 4 and all(best in " ".join(out.split()) for best in report["best_lengths"])
    assert any(path.stem.startswith("speed_by_draft_length") for path in (folder / "plots").iterdir())
    assert (folder / "report.html").exists() and "report.html" in err


def test_a_sweep_resumes_where_it_was_killed(capsys, monkeypatch, tmp_path: Path, prompts: str) -> None:
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


@pytest.mark.parametrize(
    ("arguments", "drafter"), [((), "suffix"), (("--draft", "toy:2"), "model"), (("--drafter", "ngram:3"), "ngram:3")]
)
def test_without_drafters_it_sweeps_the_decoders_own(
    capsys, monkeypatch, tmp_path: Path, prompts: str, arguments: tuple[str, ...], drafter: str
) -> None:
    small = ("--max-tokens", "4", "--repeats", "1", "--prompt-file", prompts, "--lengths", "2")
    assert run(capsys, monkeypatch, *arguments, *small, "--out", str(tmp_path / "runs"))[0] == 0
    header, _ = read_records(tmp_path / "runs")
    assert header.settings["arms"] == ["none~0", f"{drafter}@2~0"]


def test_a_wrong_text_fails_the_command(capsys, monkeypatch, tmp_path: Path, prompts: str) -> None:
    right, wrong = command.load_decoder, load_wrong_rule("first-mismatch-kept")
    monkeypatch.setattr(command, "load_decoder", lambda *args: right(*args).using(acceptance=wrong))
    arguments = (*SMALL, "--prompt-file", prompts, "--lengths", "3", "--out", str(tmp_path / "runs"))
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 1 and "differ from plain decoding and are not ties" in err and "DIFFER" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--lengths", "8-x"), "--lengths '8-x'; allowed: whole numbers and ranges"),
        (("--lengths", "0-100"), "draft length 65; allowed: 1 to 64 tokens\n"),
        (("--lengths", "5-3"), "the range 5-3 is empty"),
        (("--temperatures", "-1"), "--temperatures '-1'; allowed: numbers, 0 or more"),
        (("--temperature", "0.5"), "--temperature 0.5 names one temperature; allowed: --temperatures"),
        (("--num-draft-tokens", "3"), "--num-draft-tokens 3 names one length; allowed: --lengths"),
        (("--drafter", "ngram", "--drafters", "ngram_table"), "--drafter ngram with --drafters"),
        (("--drafters", "none"), "`none` drafts nothing"),
        (("--drafters", "ngram,ngram"), "arm 'ngram@1~0' is given twice"),
        (("--drafters", "oracle"), "drafter"),
        (("--batch-size", "9"), "batch size 9; allowed: up to max_batch_size (8)"),
        (("--category", "poetry"), "category 'poetry'"),
    ],
)
def test_wrong_use_is_one_clear_line(capsys, monkeypatch, tmp_path: Path, arguments, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(capsys, monkeypatch, *arguments)
    assert code == 2 and out == "" and message in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
