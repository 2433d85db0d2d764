"""Predictions on the command line, in prompt files, in conversations and as arms of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.apps.chat.conversation import Chat
from slipstream.bench.arms import parse_arm
from slipstream.text.prompt_sets import read_prompts
from tests.support.chat_fakes import Recorder
from tests.support.command_line import run

TOY = ("--target", "toy", "--max-tokens", "60", "--drafter", "ngram", "--num-draft-tokens", "8")


@pytest.fixture
def expected() -> str:
    return SpeculativeDecoder("toy", drafter="none").generate("The heron", SamplingParams(max_tokens=60)).text


def test_generate_reads_a_prediction_file_and_reports_its_accepted_tokens(
    capsys: Any, monkeypatch: Any, tmp_path: Path, expected: str
) -> None:
    file, out = tmp_path / "old.txt", tmp_path / "out.json"
    file.write_text(expected)
    arguments = ("generate", "-p", "The heron", "--prediction", str(file), *TOY, "--json", str(out))
    code, text, notes = run(capsys, monkeypatch, *arguments)
    stats = json.loads(out.read_text())["results"][0]["stats"]
    assert code == 0 and text.strip() == expected.strip() and stats["accepted_prediction_tokens"] > 40
    assert f"prediction: {stats['accepted_prediction_tokens']} accepted" in notes
    code, text, notes = run(capsys, monkeypatch, "generate", "-p", "The heron", *TOY)
    assert text.strip() == expected.strip() and "prediction" not in notes


def test_each_line_of_a_prompt_file_may_have_its_own_prediction(
    capsys: Any, monkeypatch: Any, tmp_path: Path, expected: str
) -> None:
    file, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    lines = [{"prompt": "The heron", "prediction": expected}, {"prompt": "A sparrow"}]
    file.write_text("\n".join(map(json.dumps, lines)))
    code, _, _ = run(capsys, monkeypatch, "generate", "--prompt-file", str(file), *TOY, "--json", str(out))
    accepted = [result["stats"]["accepted_prediction_tokens"] for result in json.loads(out.read_text())["results"]]
    assert code == 0 and accepted[0] > 40 and accepted[1] is None


def test_compare_runs_plain_decoding_without_the_prediction(
    capsys: Any, monkeypatch: Any, tmp_path: Path, expected: str
) -> None:
    file, out = tmp_path / "old.txt", tmp_path / "out.json"
    file.write_text(expected)
    arguments = ("compare", "-p", "The heron", "--prediction", str(file), *TOY, "--json", str(out))
    code, _, _ = run(capsys, monkeypatch, *arguments)
    saved = json.loads(out.read_text())
    assert code == 0 and saved["summary"]["stats"]["accepted_prediction_tokens"] > 40
    assert saved["summary"]["arms"]["speculative"]["identical"] == 1


@pytest.mark.parametrize(
    ("text", "message"), [(None, "cannot be read"), (b"", "is empty"), (b"\xff\xfe", "cannot be read")]
)
def test_an_unreadable_or_empty_prediction_file_is_refused_in_one_line(
    capsys: Any, monkeypatch: Any, tmp_path: Path, text: bytes | None, message: str
) -> None:
    file = tmp_path / "old.txt"
    if text is not None:
        file.write_bytes(text)
    code, _, notes = run(capsys, monkeypatch, "generate", "-p", "a", "--prediction", str(file), "--target", "toy")
    assert code == 2 and message in notes and "allowed: a file of UTF-8 text" in notes and "Traceback" not in notes


def test_a_prediction_in_a_prompt_file_must_be_a_text(tmp_path: Path) -> None:
    for wrong in ("", 5, ["a"]):
        (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "prediction": wrong}))
        with pytest.raises(UsageError, match=r"line 1: prediction=.*; allowed: a non-empty text, or none"):
            read_prompts(tmp_path / "p.jsonl")


def test_only_arms_named_predicted_get_predictions(
    capsys: Any, monkeypatch: Any, tmp_path: Path, expected: str
) -> None:
    assert parse_arm("none.predicted").predicted and parse_arm("ngram@4.plain.predicted~0.8").predicted
    with pytest.raises(UsageError, match=r"arm 'hf-lookup@7\.predicted'; allowed"):
        parse_arm("hf-lookup@7.predicted")
    file, out = tmp_path / "p.jsonl", tmp_path / "out.json"
    bench = ("bench", "--target", "toy", "--prompt-file", str(file), "--arms", "none,ngram@8.predicted")
    bench = (*bench, "--max-tokens", "60", "--out", str(tmp_path / "runs"))
    file.write_text(json.dumps({"prompt": "The heron"}))
    code, _, notes = run(capsys, monkeypatch, *bench)
    assert code == 2 and "arm 'ngram@8.predicted', but no prompt has a prediction; allowed" in notes.replace("\n", " ")
    file.write_text(json.dumps({"prompt": "The heron", "prediction": expected}))
    code, _, _ = run(capsys, monkeypatch, *bench, "--json", str(out))
    runs = [json.loads(line) for line in (tmp_path / "runs" / "runs.jsonl").read_text().splitlines()]
    counts = {record["arm"]: record["stats"]["accepted_prediction_tokens"] for record in runs if "arm" in record}
    assert code == 0 and counts["none"] is None and counts["ngram@8.predicted"] > 40


def test_a_conversation_uses_the_prediction_unless_it_decodes_plainly(expected: str) -> None:
    chat = Chat(SpeculativeDecoder("toy", drafter="none"), Recorder(), SamplingParams(max_tokens=60))
    first = chat.ask("The heron")
    assert first is not None and "prediction" not in first.summary
    chat.turns.clear()
    chat.params = SamplingParams(max_tokens=60, prediction=first.answer)
    again = chat.ask("The heron")
    assert again is not None and again.answer == first.answer and "prediction: " in again.summary
    chat.turns.clear()
    chat.speculative = False
    plain = chat.ask("The heron")
    assert plain is not None and plain.answer == first.answer and "prediction" not in plain.summary
