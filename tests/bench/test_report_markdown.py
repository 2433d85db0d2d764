"""The table for a README: its figures come from the runs, any arm can be the baseline, and the machine is named."""

import re
import sys
from pathlib import Path

import pytest

from slipstream.apps import cli
from slipstream.bench.records import read_records
from slipstream.bench.report.markdown import markdown
from slipstream.bench.report.report_data import against, load, local_time
from slipstream.bench.summary import summarize
from slipstream.errors import UsageError
from tests.support.toy_runs import fail, make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "bench", "none,ngram@2,model@3,model@3/topk:2", batches=[1, 2])


def rows(text: str) -> list[list[str]]:
    """The cells of the first table."""
    table = text.split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_figures_of_the_table_equal_those_of_the_summary(folder: Path) -> None:
    text = markdown(load(folder))
    cells = {row[0]: row[1:] for row in rows(text)}
    model = next(summary for summary in load(folder).summaries if (summary.arm, summary.batch) == ("model@3", 1))
    assert cells["batch size 1"] == ["`none`", "`ngram@2`", "`model@3`", "`model@3/topk:2`"]
    assert cells["chat"][2] == f"{model.families['chat'].speed_up.value:.2f}" and cells["chat"][0] == "1.00"
    mean = model.speed.speed_up
    assert cells["geometric mean"][2] == f"{mean.value:.2f} ({mean.low:.2f} to {mean.high:.2f})"
    assert cells["texts identical / tie / different"][:3] == ["the reference", "4 / 0 / 0", "4 / 0 / 0"]
    assert cells["texts identical / tie / different"][3].endswith("(lossy)")
    assert cells["acceptance rate"] == ["-", *cells["acceptance rate"][1:]]
    assert cells["acceptance rate"][2].endswith("%")
    assert cells["tokens per forward"][2] == f"{model.stats.block_efficiency:.2f}"


def test_the_text_names_settings_machine_and_versions(folder: Path) -> None:
    header, _ = read_records(folder)
    text = markdown(load(folder))
    assert "toy with toy:2 as draft model, dtype auto, greedy, up to 24 tokens, 4 prompts, 2 repeats" in text
    for value in (header.machine["processor"], local_time(header.started), *header.versions.values()):
        assert str(value) in text
    assert text.count("| geometric mean |") == 2 and "\n\n| batch size 2 |" in text


def test_ratios_to_another_reference_are_recomputed_from_the_runs(folder: Path) -> None:
    data = load(folder)
    other = against(data, "model@3")
    assert other.summaries == summarize(data.runs, "model@3")
    means = next(row for row in rows(markdown(other)) if row[0] == "geometric mean")
    assert means[3] == "1.00" and "relative to `model@3` in the same run" in markdown(other)
    with pytest.raises(UsageError, match="reference 'hf' is not among the arms; allowed: none, ngram@2"):
        against(data, "hf")


def test_names_cannot_break_the_table(folder: Path) -> None:
    lines = markdown(load(folder)).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert any("&lt;script>" in line for line in table) and not any("<script" in line for line in table)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_a_failed_arm_has_no_figure(tmp_path: Path) -> None:
    folder = make(tmp_path / "bench", "none,ngram@2", batches=[1], repeats=1)
    fail(folder, "ngram@2", "RuntimeError: out of memory")
    cells = {row[0]: row[1:] for row in rows(markdown(load(folder)))}
    assert cells["geometric mean"][1] == cells["tokens per second"][1] == cells["chat"][1] == "failed"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--markdown", "--reference", "ngram@2"), 0, "relative to `ngram@2`"),
        (("--markdown", "--reference", "hf"), 2, "reference 'hf' is not among the arms"),
        (("--markdown", "--ids"), 2, "--ids with --markdown"),
        (("--reference", "none"), 2, "--reference none without --markdown"),
    ],
)
def test_report_markdown_prints_the_table_and_writes_nothing(
    capsys, monkeypatch, folder: Path, arguments, code, message
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "report", str(folder), *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    captured = capsys.readouterr()
    assert exited.value.code == code and message in (captured.err if code else captured.out)
    assert [file.name for file in folder.iterdir()] == ["runs.jsonl"]
