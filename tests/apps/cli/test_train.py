"""`slipstream train`: interruption, continuation, refusals."""

from __future__ import annotations

import errno
import json
import re
from pathlib import Path

import pytest

from slipstream import SpeculativeDecoder
from slipstream.apps.cli import train as train_module
from slipstream.training import texts, training_job, training_run
from slipstream.training.texts import read_texts
from slipstream.training.trainable_head import TrainableHead
from tests.support import command_line
from tests.support.training_cases import small, write_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_target(tmp_path_factory.mktemp("target")))


def train(capsys, monkeypatch, target: str, out: Path, *arguments: str) -> tuple[int, str, str]:
    options = ("--target", target, "--out", str(out), "--tokens", "1k", "--steps", "16")
    with small():
        return command_line.run(capsys, monkeypatch, "train", *options, *arguments)


@pytest.mark.slow
def test_an_interrupted_training_is_finished_and_its_head_drafts(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    loss, calls = TrainableHead.loss, list[None]()

    def interrupted(head, batch):
        calls.append(None)
        if len(calls) == 20:
            raise KeyboardInterrupt
        return loss(head, batch)

    monkeypatch.setattr(TrainableHead, "loss", interrupted)
    out = tmp_path / "head"
    code, _, err = train(capsys, monkeypatch, target, out)
    assert code == 130
    last = err.splitlines()[-1]
    assert last.startswith("error: interrupted; ") and last.endswith("; the same command continues")
    assert "training.pt holds step " in last and "Traceback" not in err
    code, shown, err = train(capsys, monkeypatch, target, out, "--json", str(tmp_path / "result.json"))
    assert code == 0 and "tokens per round on held-out texts after 16 steps; estimated" in shown
    assert f"use it: slipstream generate --model {target} --draft {out}" in shown
    assert [line for line in err.splitlines() if line.startswith("step 16: loss ")]
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["steps"] == 16 and result["target"] == target and len(result["accepted"]) == 5
    words = ("generate", "ab", "--target", target, "--max-tokens", "30")
    plain = command_line.run(capsys, monkeypatch, *words, "--drafter", "none")[:2]
    assert command_line.run(capsys, monkeypatch, *words, "--draft", str(out), "--drafter", "model")[:2] == plain


@pytest.mark.exhaustive
def test_ctrl_c_while_texts_are_made_keeps_the_finished_ones(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    append, calls = texts.append, list[None]()

    def interrupted(file, data):
        append(file, data)
        calls.append(None)
        if len(calls) == 3:  # during the first batch of texts
            raise KeyboardInterrupt

    monkeypatch.setattr(texts, "append", interrupted)
    monkeypatch.setattr(train_module, "LOG_SECONDS", 0.0)
    out = tmp_path / "head"
    code, _, err = train(capsys, monkeypatch, target, out, "--steps", "2")
    first, *_, before_last, last = err.splitlines()
    kept = read_texts(out)
    assert code == 130 and len(kept) == 3 and first == f"loading {target} ..."
    tokens = sum(len(text.ids) for text in kept)
    kept_in = f"{out / 'texts.jsonl'} holds {tokens} tokens of texts"
    assert last == f"error: interrupted; {kept_in}; the same command continues"
    assert re.fullmatch(r"answering prompts: (\d+) of 1000 tokens, at most [\d:]+ left", before_last)
    assert "inventing prompts: 0 of 1000 tokens, at most 3:00:00 left" in err.splitlines()
    assert any(re.fullmatch(r"inventing prompts: [1-9]\d* of 1000 tokens, .* left", line) for line in err.splitlines())
    monkeypatch.setattr(texts, "append", append)
    code, _, err = train(capsys, monkeypatch, target, out, "--steps", "2")
    assert code == 0 and f"inventing prompts: {tokens} of 1000 tokens, " in err
    again = read_texts(out)
    assert again[:3] == kept and sum(len(text.ids) for text in again) >= 1000


@pytest.mark.exhaustive
def test_more_hours_continue_and_a_finished_training_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    loss, now = TrainableHead.loss, [0.0]

    def slow(head, batch):
        now[0] += 1.0
        return loss(head, batch)

    monkeypatch.setattr(TrainableHead, "loss", slow)
    for module in (texts, training_job, training_run):
        monkeypatch.setattr(module, "monotonic", lambda: now[0])
    shown = [
        train(capsys, monkeypatch, target, tmp_path / "head", "--hours", hours) for hours in ("0.003", "0.01", "1", "1")
    ]
    over = "--hours {} ended the training; the same command with more continues"
    steps = [int(re.search(r"after (\d+) steps", out)[1]) for _, out, _ in shown]
    assert [code for code, *_ in shown] == [0] * 4 and 0 < steps[0] < steps[1] < steps[2] == steps[3] == 16
    assert over.format("0.003") in shown[0][2] and over.format("0.01") in shown[1][2]
    assert "ended" not in shown[2][2] and "finished" not in shown[2][2]
    assert "it was finished already; to train more, give more --tokens or --steps and another --out" in shown[3][2]


def test_without_template_and_prompts_no_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = str(write_target(tmp_path / "bare", template=False))

    def load(self, *args, **options):
        pytest.fail("a model was loaded")

    monkeypatch.setattr(SpeculativeDecoder, "__init__", load)
    code, _, err = train(capsys, monkeypatch, bare, tmp_path / "head")
    assert code == 2 and not (tmp_path / "head").exists()
    assert "has no chat template, so it cannot invent prompts; allowed: --prompts FILE" in err.splitlines()[-1]


def test_a_folder_that_cannot_be_created_is_refused_before_a_model_is_loaded(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    def load(self, *args, **options):
        pytest.fail("a model was loaded")

    def make(self, *args, **options):
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    monkeypatch.setattr(SpeculativeDecoder, "__init__", load)
    monkeypatch.setattr(Path, "mkdir", make)
    code, _, err = train(capsys, monkeypatch, target, tmp_path / "head")
    assert (code, err) == (1, f"error: '{tmp_path / 'head'}': no space left on device; nothing was saved yet\n")


@pytest.mark.slow
def test_prompts_of_a_file_need_no_template(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bare = str(write_target(tmp_path / "bare", template=False))
    (tmp_path / "mine.txt").write_text("abc\nthe heron\n")
    options = ("--steps", "2", "--prompts", str(tmp_path / "mine.txt"))
    code, shown, _ = train(capsys, monkeypatch, bare, tmp_path / "head", *options)
    assert code == 0 and "tokens per round" in shown
