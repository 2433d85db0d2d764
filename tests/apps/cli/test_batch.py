"""`slipstream batch`: what it prints, where it fails and with which exit code."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from slipstream.apps.cli import batch, consoles, serve
from slipstream.apps.cli.consoles import err
from slipstream.config import SERVED, DecoderConfig
from slipstream.jobs.job_output import JobOutput
from tests.support.command_line import run
from tests.support.job_cases import by_id, chat, read, requests, toy, write

Capture = pytest.CaptureFixture[str]
TOY = ("--target", "toy")


def test_the_batch_command_equals_decoder_batch(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*requests(8), chat("c", "The heron")]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    code, printed, messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, "--max-batch-size", "4")
    assert code == 0 and printed == "" and messages.startswith("9 of 9 answered in ")
    assert len(messages.splitlines()) == 1
    assert "tokens/s, acceptance " in messages
    toy().batch(source, tmp_path / "python.jsonl")
    assert by_id(out) == by_id(tmp_path / "python.jsonl")
    code, _, messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, "--max-batch-size", "4")
    assert code == 0 and messages.startswith("0 of 9 answered now, 9 earlier in ")


def test_a_settings_file_replaces_the_decoders_flags(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "in.jsonl", requests(2)), tmp_path / "out.jsonl"
    (tmp_path / "settings.json").write_text('{"acceptance": "match", "drafter": "none"}')
    config = ("--config", str(tmp_path / "settings.json"))
    assert run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, *config)[0] == 0
    code, _, messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, *config, "--drafter", "ngram")
    assert code == 2 and "--config replaces the decoder's flags" in messages


def test_settings_missing_from_a_file_keep_the_commands_defaults(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, file = write(tmp_path / "in.jsonl", requests(2)), tmp_path / "out.jsonl", tmp_path / "settings.json"
    file.write_text("{}")
    job = ("batch", str(source), str(out), *TOY)
    assert run(capsys, monkeypatch, *job)[0] == 0
    code, _, messages = run(capsys, monkeypatch, *job, "--config", str(file))
    assert code == 0 and messages.startswith("0 of 2 answered now, 2 earlier in "), messages
    file.write_text('{"acceptance": "block"}')  # the control: a setting of the file has an effect
    assert run(capsys, monkeypatch, *job, "--config", str(file))[0] == 2

    seen: list[DecoderConfig] = []
    monkeypatch.setattr(serve, "load_decoder", lambda models, config, **_: seen.append(config))
    monkeypatch.setattr("slipstream.apps.server.launch.serve", lambda settings, sources, *_: sources[0].load())
    for arguments in ((), ("--config", str(file))):
        file.write_text('{"drafter": "ngram"}')
        assert run(capsys, monkeypatch, "serve", *TOY, *arguments)[0] == 0
    assert seen == [SERVED, replace(SERVED, drafter="ngram")]


def test_a_terminal_shows_once_which_model_is_loaded(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(err, "_force_terminal", True)
    source = write(tmp_path / "in.jsonl", requests(1))
    code, _, messages = run(capsys, monkeypatch, "batch", str(source), str(tmp_path / "out.jsonl"), *TOY)
    assert code == 0 and messages.count("loading toy") == 1


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("no right", "the output '{0}/out.jsonl' cannot be written: no permission to write into '{0}'"),
        ("no right to the errors", "the error file '{0}/e.jsonl' cannot be written: permission denied"),
        ("a letter", "'{0}/out.jsonl', line 1: not a line of a job's output; allowed: a new file, or"),
        ("in use", "'{0}/out.jsonl' is being written by another process"),
    ],
)
def test_an_output_that_cannot_be_written_is_refused_before_a_model_is_loaded(
    fault: str, why: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*arguments: Any, **options: Any) -> None:
        pytest.fail("a model was loaded")

    monkeypatch.setattr(batch, "load_decoder", load)
    source, out, errors = write(tmp_path / "in.jsonl", requests(1)), tmp_path / "out.jsonl", tmp_path / "e.jsonl"
    with ExitStack() as held:
        if fault == "in use":
            held.enter_context(closing(JobOutput(out)))
        elif fault == "a letter":
            out.write_text("a letter\n")
        elif fault == "no right":
            monkeypatch.setattr("os.access", lambda path, mode: path != tmp_path)
        else:
            errors.touch()
            monkeypatch.setattr("os.access", lambda path, mode: mode == os.R_OK or path != errors)
        code, _, messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, "--errors", str(errors))
    assert code in (1, 2) and messages.startswith(f"error: {why.format(tmp_path)}") and len(messages.splitlines()) == 1


def test_flags_apply_to_lines_without_options_of_their_own(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [{"id": 1, "prompt": "The heron"}, {"id": 2, "prompt": "The heron", "max_tokens": 3, "model": "mine"}]
    source, out = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
    flags = ("--max-tokens", "5", "--token-ids", "--model-name", "mine", "--json", str(tmp_path / "report.json"))
    assert run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, *flags)[0] == 0
    assert {line["id"]: len(line["token_ids"]) for line in read(out)} == {1: 5, 2: 3}
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["target"] == "toy" and report["answered"] == 2 and report["errors"] == []


def test_failed_lines_are_reported_with_exit_code_1(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [{"id": f"b{at}", "prompt": "x", "top_p": 9} for at in range(23)]
    source, out = write(tmp_path / "in.jsonl", [*requests(2), *bad]), tmp_path / "out.jsonl"
    errors = tmp_path / "wrong.jsonl"
    code, _, messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY, "--errors", str(errors))
    assert code == 1 and len(by_id(out)) == 2 and len(read(errors)) == 23
    lines = messages.splitlines()
    assert lines[0] == f"{source}, line 3: top_p=9; allowed: a number above 0, up to 1" and len(lines) == 22
    assert lines[20] == f"all 23 failed lines are in {errors}"
    assert lines[21].startswith("2 of 25 answered, 23 failed in ")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("absent.jsonl", "out.jsonl"), "error: 'absent.jsonl' cannot be read: no such file; allowed: a file with"),
        (("empty.jsonl", "out.jsonl"), "error: 'empty.jsonl' holds no requests; allowed: at least one line"),
        (("in.jsonl", "in.jsonl"), "error: 'in.jsonl' is IN and OUT; allowed: two files"),
        (("in.jsonl", "out.jsonl", "--seed", "1"), "error: no such option: --seed"),
        (("openai.jsonl", "out.jsonl", "--top-k", "3"), "error: line 1 is in OpenAI's format, whose requests bring"),
        (("in.jsonl",), "error: Missing argument 'OUT'."),
    ],
)
def test_wrong_use_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...], why: str, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), requests(2))
    write(Path("openai.jsonl"), [chat("a", "x")])
    Path("empty.jsonl").write_text("\n\n")
    code, _, messages = run(capsys, monkeypatch, "batch", *arguments, *TOY)
    assert code == 2 and messages.startswith(why) and len(messages.splitlines()) == 1


def test_an_interrupted_job_says_how_many_lines_are_answered(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.jobs.request_pool import RequestPool

    step, count = RequestPool.step, iter(range(99))

    def interrupted(pool: RequestPool) -> object:
        if next(count) == 12:
            raise KeyboardInterrupt
        return step(pool)

    source, out = write(tmp_path / "in.jsonl", requests(20)), tmp_path / "out.jsonl"
    monkeypatch.setattr(RequestPool, "step", interrupted)
    code, _, messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY)
    num_answered = len(by_id(out))
    assert code == 130
    assert messages.startswith(f"interrupted: {num_answered} of 20 answered, {20 - num_answered} left in ")
    assert "the same command continues" in messages
    assert run(capsys, monkeypatch, "batch", str(source), str(out), *TOY)[0] == 0 and len(by_id(out)) == 20


def test_a_terminal_shows_speed_acceptance_and_the_time_left(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Console(stderr=True, force_terminal=True, width=100, record=True)
    for module in (batch, consoles):
        monkeypatch.setattr(module, "err", terminal)
    seen: list[str] = []
    progress = batch._progress()
    with progress as show:
        from slipstream.jobs.batch_job import JobReport
        from slipstream.jobs.request_pool import Work

        show(JobReport(total=40, answered_before=4, answered=16, seconds=8.0, work=Work(800, 100, 62)))
    seen.append(capsys.readouterr().err)
    assert "20/40" in seen[0] and "8 s, 100 tokens/s, acceptance 62 %, 0:10 left" in seen[0]


def test_a_log_gets_a_progress_line_at_intervals(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out = write(tmp_path / "in.jsonl", requests(3)), tmp_path / "out.jsonl"
    messages = run(capsys, monkeypatch, "batch", str(source), str(out), *TOY)[2]
    assert len(messages.splitlines()) == 1, messages  # the control: a short job prints only its last line
    monkeypatch.setattr(batch, "LINE_SECONDS", 0.0)
    messages = run(capsys, monkeypatch, "batch", str(source), str(tmp_path / "other.jsonl"), *TOY)[2]
    assert len(messages.splitlines()) > 1 and all(" of 3 answered" in line for line in messages.splitlines()), messages
