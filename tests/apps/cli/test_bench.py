"""`slipstream bench`: tables, records, exit codes, one clear line for every mistake."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from slipstream.apps.cli import measuring as bench
from slipstream.bench.arms import parse_arms, reference_of
from slipstream.bench.records import FILE, read_records
from slipstream.core.limits import MAX_DRAFT_TOKENS
from tests.support.command_line import run
from tests.support.wrong_acceptance_rules import load_wrong_rule

pytestmark = pytest.mark.slow

PLANS = Path(__file__).parents[3] / "benchmarks"
PROMPTS = ({"prompt": "The heron looked", "category": "birds"}, {"prompt": "a fish, a fish", "category": "fish"})


@pytest.fixture
def toy(tmp_path: Path) -> tuple[str, ...]:
    """The arguments every call shares."""
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    models = ("--target", "toy", "--draft", "toy:2", "--prompt-file", str(file))
    return ("bench", *models, "--max-tokens", "16", "--repeats", "2", "--out", str(tmp_path / "runs"))


def test_bench_prints_tables_and_writes_records(capsys, monkeypatch, tmp_path: Path, toy) -> None:
    report = tmp_path / "out.json"
    options = ("--arms", "none,ngram@3,model@4", "--batch-sizes", "1,2", "--json", str(report))
    code, out, err = run(capsys, monkeypatch, *toy, *options)
    assert code == 0
    assert "batch size 1: speed-up against none" in out and "batch size 2" in out
    assert re.search(r"ngram@3 .*x .*2 identical", out) and "where the time went" in out and "birds" in out
    assert "1/3 birds/1, batch 1: none" in err and "3/3 birds/1, fish/1, batch 2" in err
    header, runs = read_records(tmp_path / "runs")
    assert len(runs) == 3 * 2 * 3 and header.settings["arms"] == ["none", "ngram@3", "model@4"]
    saved = json.loads(report.read_text())
    assert saved["settings"] == header.settings and len(saved["summary"]) == 6
    ngram = next(summary for summary in saved["summary"] if (summary["arm"], summary["batch"]) == ("ngram@3", 1))
    assert ngram["verdicts"]["identical"] == 2 and set(ngram["families"]) == {"birds", "fish"}
    assert ngram["speed"]["tokens"] == 32 and ngram["speed"]["speed_up"]["value"] > 0
    assert ngram["speed"]["groups"] == 2 and ngram["speed"]["speed_up"]["low"] is None  # too few for an interval
    assert sum(ngram["time_split"].values()) == pytest.approx(1.0)


@pytest.mark.parametrize("arguments", [("bench", "--arms", "none"), ("sweep", "--lengths", "0-1")])
def test_without_out_the_runs_go_into_a_new_folder_in_runs(
    capsys, monkeypatch, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("one.txt").write_text("The heron")
    small = ("--target", "toy", "--prompt-file", "one.txt", "--max-tokens", "4", "--repeats", "1")
    assert run(capsys, monkeypatch, *arguments, *small)[0] == 0
    assert [path.name for path in tmp_path.glob(f"runs/{arguments[0]}-*/{FILE}")] == [FILE]


def test_bench_resumes_a_run_and_refuses_other_settings(capsys, monkeypatch, tmp_path: Path, toy) -> None:
    assert run(capsys, monkeypatch, *toy)[0] == 0
    file = tmp_path / "runs" / FILE
    whole = file.read_bytes()
    lines = whole.splitlines(keepends=True)
    file.write_bytes(b"".join(lines[:4]) + lines[4][:30])
    code, _, err = run(capsys, monkeypatch, *toy)
    assert code == 0 and "3 of 8 measurements are in the folder already" in err
    again = file.read_bytes()
    assert again.startswith(b"".join(lines[:4])) and len(again.splitlines()) == len(lines)
    code, _, err = run(capsys, monkeypatch, *toy, "--temperature", "0.5")
    assert code == 2 and "was begun with params.temperature=0.0, now 0.5" in err and len(err.splitlines()) == 1
    assert file.read_bytes() == again


def test_the_default_arms_are_plain_decoding_and_the_decoders_drafter(capsys, monkeypatch, tmp_path: Path, toy) -> None:
    assert run(capsys, monkeypatch, *toy, "--drafter", "ngram_table", "--num-draft-tokens", "3")[0] == 0
    header, runs = read_records(tmp_path / "runs")
    assert header.settings["arms"] == ["none", "ngram_table"]
    lengths = {
        len(round["draft"])
        for record in runs
        if record.arm == "ngram_table" and record.rounds
        for round in record.rounds
    }
    assert 0 < max(lengths) <= 3


def test_the_builtin_prompts_are_the_default(capsys, monkeypatch, tmp_path: Path) -> None:
    options = ("--limit", "1", "--max-tokens", "4", "--repeats", "1", "--out", str(tmp_path))
    assert run(capsys, monkeypatch, "bench", "--target", "toy", *options)[0] == 0
    families = {record.family for record in read_records(tmp_path)[1]}
    assert {"code", "summary"} <= families and all("/" in record.prompts[0] for record in read_records(tmp_path)[1])


def test_wrong_texts_are_exit_code_1_for_a_lossless_arm_but_not_for_a_lossy_one(
    capsys, monkeypatch, caplog, tmp_path: Path, toy
) -> None:
    right = bench.load_decoder
    wrong = load_wrong_rule("first-mismatch-kept")
    monkeypatch.setattr(bench, "load_decoder", lambda *args: right(*args).using(acceptance=wrong))
    code, out, err = run(capsys, monkeypatch, *toy, "--arms", "none,model@4")
    assert code == 1 and "DIFFERENT" in out
    assert re.search(r"error: arm model@4, batch 1: \d of 2 texts differ from plain decoding", err)
    monkeypatch.setattr(bench, "load_decoder", right)
    options = ("--out", str(tmp_path / "lossy"), "--arms", "none,model@4/topk:10")
    code, out, _ = run(capsys, monkeypatch, *toy, *options)
    assert code == 0 and "different" in out and "DIFFERENT" not in out
    assert "model@4/topk:10 (lossy)" in out and "topk:10 is lossy" in caplog.text


def test_a_failed_arm_has_a_line_but_no_number(capsys, monkeypatch, tmp_path: Path, toy) -> None:
    class Broken(bench.Lineup):
        def generate(self, arm: Any, prompts: Any, params: Any) -> Any:
            if arm.name == "ngram":
                raise MemoryError("no [room] left")
            return super().generate(arm, prompts, params)

    monkeypatch.setattr(bench, "Lineup", Broken)
    code, out, err = run(capsys, monkeypatch, *toy, "--arms", "none,ngram")
    assert code == 1 and re.search(r"ngram +failed", out) and "MemoryError: no [room] left" in out
    assert "ngram FAILED" in err and "error: arm ngram, batch 1: 4 of its runs failed: MemoryError: no [room]" in err
    assert re.search(r"none +[\d.]+ ", out)


def test_a_finished_folder_is_printed_again_without_loading_a_model(capsys, monkeypatch, toy) -> None:
    options = ("--arms", "none,model@2", "--report")
    code, first, _ = run(capsys, monkeypatch, *toy, *options)
    assert code == 0
    monkeypatch.setattr(bench, "load_decoder", lambda *args: pytest.fail("a model was loaded"))
    code, again, err = run(capsys, monkeypatch, *toy, *options)
    assert code == 0 and again == first and "all 8 measurements are there already" in err and "report.html" in err


def test_ctrl_c_says_how_to_continue(capsys, monkeypatch, tmp_path: Path, toy) -> None:
    class Impatient(bench.Lineup):
        def generate(self, arm: Any, prompts: Any, params: Any) -> Any:
            if (tmp_path / "runs" / FILE).read_text().count('"kind":"run"') == 3:
                raise KeyboardInterrupt
            return super().generate(arm, prompts, params)

    with monkeypatch.context() as patched:
        patched.setattr(bench, "Lineup", Impatient)
        code, out, err = run(capsys, monkeypatch, *toy)
    last = err.splitlines()[-1]
    assert code == 130 and out == "" and last.startswith("error: interrupted") and f"--out {tmp_path / 'runs'}" in last
    code, out, err = run(capsys, monkeypatch, *toy)
    assert code == 0 and "3 of 8 measurements are in the folder already" in err


def test_flags_override_the_options_of_a_plan(capsys, monkeypatch, tmp_path: Path) -> None:
    plan, prompts = tmp_path / "plan.json", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(prompt) + "\n" for prompt in PROMPTS))
    options = {"target": "toy", "draft": "toy:2", "arms": ["none", "model@2"], "prompt_file": str(prompts)}
    options |= {"max_tokens": 16, "repeats": 3, "category": ["fish"], "batch_sizes": [1], "raw": True}
    plan.write_text(json.dumps(options | {"out": str(tmp_path / "runs"), "load_options": {}, "stop": ["zz"]}))
    assert run(capsys, monkeypatch, "bench", "--plan", str(plan), "--repeats", "2", "--draft", "toy:3")[0] == 0
    header, runs = read_records(tmp_path / "runs")
    recorded = header.settings
    assert (recorded["target"], recorded["draft"], recorded["repeats"], recorded["chat"]) == ("toy", "toy:3", 2, False)
    assert recorded["arms"] == ["none", "model@2"] and recorded["params"]["stop"] == ["zz"]
    assert list(recorded["prompts"]) == ["fish/1"]
    assert len(runs) == 4


WRONG_PLANS = [
    ('{"limits": 3}', "has the unknown key 'limits'; allowed: acceptance, activations, arms, at_once, bad_words"),
    ('{"repeats": null}', "repeats=None; allowed: a string, a number, true or false"),
    ('{"repeats": 1.5}', "--repeats '1.5'; allowed: a whole number"),
    ('{"plan": "x.json"}', "has the unknown key 'plan'"),
    ("[1]", "is not an object"),
    ("{", "cannot be read"),
]


@pytest.mark.parametrize("content,message", WRONG_PLANS, ids=[content for content, _ in WRONG_PLANS])
def test_a_wrong_plan_is_one_line(capsys, monkeypatch, tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "plan.json").write_text(content)
    code, out, err = run(capsys, monkeypatch, "bench", "--target", "toy", "--plan", str(tmp_path / "plan.json"))
    assert code == 2 and out == "" and len(err.splitlines()) == 1 and message in err


@pytest.mark.parametrize("plan", sorted(PLANS.glob("*.json")), ids=lambda plan: plan.name)
def test_the_projects_own_plans_run(capsys, monkeypatch, tmp_path: Path, plan: Path) -> None:
    toy = ("--target", "toy", "--draft", "toy:2", "--arms", "none,model@2", "--reference", "none")
    small = ("--max-tokens", "2", "--repeats", "1", "--limit", "1", "--out", str(tmp_path))
    monkeypatch.setattr(bench, "write_report", lambda folder, tokenizer: folder / "report.html")
    wanted = json.loads(plan.read_text())
    fewer = ("--at-once", "8") if "at_once" in wanted else ()
    code, _, err = run(capsys, monkeypatch, "bench", "--plan", str(plan), *toy, *small, *fewer)
    assert code == 0, err
    arms = parse_arms(",".join(wanted["arms"]))
    assert reference_of(arms, wanted["reference"]) == wanted["reference"]
    assert wanted["reference"] == "hf" or "hf" not in wanted["arms"]
    assert read_records(tmp_path)[0].settings["repeats"] == 1


WRONG_USE = [
    (("--arms", "magic"), "drafter='magic'; allowed: auto, cross_vocabulary, hybrid, layer_skip, model, ngram"),
    (("--arms", "none,none"), "arm 'none' is given twice"),
    (("--arms", f"model@{MAX_DRAFT_TOKENS + 1}"), "draft length 65"),
    (("--arms", "none,hf"), "arm 'hf' needs a Hugging Face model; target 'toy' is not one"),
    (("--arms", "none", "--drafter", "ngram"), "--drafter ngram with --arms"),
    (("--arms", "none,hf-lookup", "--batch-sizes", "2"), "'hf-lookup' decodes one prompt at a time"),
    (("--reference", "hf"), "reference 'hf' is not among the arms"),
    (("--batch-sizes", "one"), "--batch-sizes 'one'; allowed"),
    (("--batch-sizes", "9"), "batch size 9; allowed: up to max_batch_size (8)"),
    (("--batch-sizes", "3"), "batch size 3; allowed: 1 to 2"),
    (("--at-once", "2"), "--at-once with --batch-sizes 1; allowed: the only batch size is max_batch_size (8)"),
    (("--at-once", "3", "--batch-sizes", "1", "--max-batch-size", "1"), "--at-once 3; allowed: 1 to 2"),
    (("--repeats", "0"), "--repeats"),
    (("--category", "plants"), "category 'plants' is not in"),
    (("--config", "missing.json"), "cannot be read"),
    (("--out", "/proc/none/runs"), "cannot be made"),
]


@pytest.mark.parametrize("options,message", WRONG_USE, ids=lambda value: " ".join(value)[-40:])
def test_wrong_use_is_one_line_and_exit_code_2(capsys, monkeypatch, toy, options, message: str) -> None:
    code, _, err = run(capsys, monkeypatch, *toy, *options)
    lines = [line for line in err.splitlines() if line.startswith("error:")]
    assert code == 2 and len(lines) == 1 and message in lines[0]


def test_the_help_explains_how_arms_are_written(capsys, monkeypatch) -> None:
    code, out, _ = run(capsys, monkeypatch, "bench", "--help")
    assert code == 0 and "DRAFTER[@LENGTH][/RULE][.plain][.predicted][~TEMP]," in " ".join(out.split())
