"""The comparison of two checkouts' texts, on the toy model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import same_texts
import typer

pytestmark = pytest.mark.exhaustive

ROOT = Path(__file__).parents[2]
FILE = ROOT / "benchmarks" / "same_texts.py"
AUTO = '{"draft_dtype": "auto"}'  # the toy cannot be quantized
TOY = ("--target", "toy", "--draft", "toy:1", "--options", AUTO, "--prompts", "2", "--max-tokens", "12")


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FILE), *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize(
    ("after", "first"),
    [
        ([[1, 2, 3], [4, 5]], None),
        ([[1, 2, 3], [4, 6]], (1, 1)),
        ([[1, 2], [4, 5]], (0, 2)),
        ([[1, 2, 3], [4, 5, 6]], (1, 2)),
    ],
)
def test_the_first_difference_is_found_even_if_it_is_an_early_end(
    after: list[list[int]], first: tuple[int, int] | None
) -> None:
    comparison = same_texts.compare([[1, 2, 3], [4, 5]], after)
    assert comparison == same_texts.Comparison(2 - (first is not None), int(first is not None), first)


def test_missing_texts_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 texts before, 1 after"):
        same_texts.compare([[1], [2]], [[1]])


def test_prompts_are_taken_from_all_categories_in_turn(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"category": name[0], "turns": [name, "more"]} for name in ("a1", "a2", "a3", "b1", "b2")]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert [prompt.prompt for prompt in same_texts.choose_prompts([file], 4)] == ["a1", "b1", "a2", "b2"]
    with pytest.raises(typer.BadParameter, match="the files hold 5"):
        same_texts.choose_prompts([file], 6)


def test_a_checkout_equals_itself_except_for_a_changed_token(tmp_path: Path) -> None:
    out = tmp_path / "found.json"
    process = run(ROOT, ROOT, *TOY, "--json", out, "--self-check")
    assert process.returncode == 1 and "prompt 0, token 11" in process.stdout, process.stderr
    report = json.loads(out.read_text())
    assert all(len(texts) == 2 for texts in report["texts"]["before"].values())
    changed, *others = report["comparisons"].values()
    assert (changed["identical"], changed["different"]) == (1, 1) and len(others) == 9
    assert all((arm["identical"], arm["different"]) == (2, 0) for arm in others)


def test_trees_constraints_and_predictions_are_compared(tmp_path: Path) -> None:
    file, out = tmp_path / "predicted.jsonl", tmp_path / "found.json"
    file.write_text(json.dumps({"category": "own", "prompt": "A heron", "prediction": "12345678"}))
    params = '{"constraint": {"regex": "[0-9]{8}"}}'
    further = ("--num-draft-tokens", "3x2", "--params", params, "--prompt-file", file)
    process = run(ROOT, ROOT, *TOY, *further, "--prompts", "9", "--drafters", "none,model", "--json", out)
    assert process.returncode == 0, process.stderr
    report = json.loads(out.read_text())
    assert report["job"]["num_draft_tokens"] == "3x2" and "12345678" in report["job"]["predictions"]
    texts = [text for arm in report["texts"]["after"].values() for text in arm]
    assert len(texts) == 36 and all(48 <= token < 58 for text in texts for token in text[:8])


def test_identical_texts_fail_only_the_self_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(same_texts, "texts_of", lambda checkout, job, keep: {"none at 0": [[1, 2, 3]]})
    for self_check in (False, True):
        with pytest.raises(SystemExit) as ended:
            same_texts.main(ROOT, ROOT, target="toy", prompts=1, self_check=self_check)
        assert ended.value.code == self_check


def test_a_folder_without_sources_is_an_error(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "src").mkdir()
    job = same_texts.Job("toy", None, {}, {}, 4, 12, 1, ["none"], [0.0], ["A heron"], [None])
    with pytest.raises(SystemExit, match="the worker failed with exit code 1"):
        same_texts.texts_of(tmp_path, job, None)
    assert "is not in" in capfd.readouterr().err
