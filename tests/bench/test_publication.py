"""Tables for a README or a paper have the figures of the summaries; names are escaped, and methods are cited."""

from __future__ import annotations

import csv
import io
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from slipstream.apps import cli
from slipstream.bench.records import read_records
from slipstream.bench.report.bibliography import bibtex, citations
from slipstream.bench.report.html import render
from slipstream.bench.report.markdown import markdown
from slipstream.bench.report.publication import csv_text, latex, latex_table
from slipstream.bench.report.report_data import Records, against, load, local_time, models
from slipstream.bench.result_tables import Cell, Table
from slipstream.bench.summary import summarize, without_few_prompts
from slipstream.errors import UsageError
from tests.support.toy_runs import NASTY, fail, make

pytestmark = pytest.mark.slow

ARMS = ("none", "ngram@2", "model@3", "model@3/topk:2", "token_recycling@2/block")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "bench", ",".join(ARMS))


@pytest.fixture(scope="module")
def data(folder: Path) -> Records:
    return load(folder)


def table(text: str) -> dict[tuple[str, str, str], dict[str, str]]:
    lines = list(csv.DictReader(io.StringIO(text)))
    return {(line["batch_size"], line["family"], line["arm"]): line for line in lines}


def rows(text: str) -> list[list[str]]:
    """The cells of the first table."""
    table = text.split("\n\n")[1].splitlines()
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table]


def test_figures_of_the_table_equal_those_of_the_summary(data: Records) -> None:
    text = markdown(data)
    cells = {row[0]: row[1:] for row in rows(text)}
    model = next(summary for summary in data.summaries if (summary.arm, summary.batch) == ("model@3", 1))
    assert cells["batch size 1"] == [f"`{arm}`" for arm in ARMS]
    assert cells["chat"][2] == f"{model.families['chat'].speed_up.value:.2f} (n = 4)"
    assert cells["chat"][0] == "1.00 (n = 4)" and cells["n"][2] == "8"
    mean = model.speed.speed_up
    assert cells["geometric mean"][2] == f"{mean.value:.2f} ({mean.low:.2f} to {mean.high:.2f})"
    assert cells["texts identical / tie / different"][:3] == ["the reference", "8 / 0 / 0", "8 / 0 / 0"]
    assert cells["texts identical / tie / different"][3].endswith("(lossy)")
    assert cells["acceptance rate"] == ["-", *cells["acceptance rate"][1:]]
    assert cells["acceptance rate"][2].endswith("%")
    assert cells["tokens per forward"][2] == f"{model.stats.block_efficiency:.2f}"


def test_the_text_names_settings_machine_and_versions(folder: Path, data: Records) -> None:
    header, _ = read_records(folder)
    text = markdown(data)
    assert "up to 24 tokens, 8 prompts, 2 repeats" in text
    assert "toy with toy:2 as draft model of model, 3 tokens, model, 3 tokens, topk:2 rule, dtype auto, greedy" in text
    for value in (header.machine["processor"], local_time(header.started), *header.versions.values()):
        assert str(value) in text
    assert text.count("| geometric mean |") == 2 and "\n\n| batch size 2 |" in text


def test_ratios_to_another_reference_are_recomputed_from_the_runs(data: Records) -> None:
    other = against(data, "model@3")
    assert other.summaries == [without_few_prompts(summary) for summary in summarize(data.runs, "model@3")]
    means = next(row for row in rows(markdown(other)) if row[0] == "geometric mean")
    assert means[3] == "1.00" and "relative to `model@3` in the same run" in markdown(other)
    with pytest.raises(UsageError, match="reference 'hf' is not among the arms; allowed: none, ngram@2"):
        against(data, "hf")


def test_names_cannot_break_the_table(data: Records) -> None:
    lines = markdown(data).splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert any("&lt;script>" in line for line in table) and not any("<script" in line for line in table)
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table}) == 1


def test_csv_has_a_line_per_batch_family_and_arm_with_the_figures_of_the_summary(data: Records) -> None:
    lines = table(csv_text(data))
    assert {key[1] for key in lines} == {"all", "chat", NASTY} and len(lines) == 2 * 3 * 5
    for summary in data.summaries:
        line, speed = lines[str(summary.batch), "all", summary.arm], summary.speed
        assert speed is not None and speed.speed_up is not None
        assert float(line["tokens_per_second"]) == speed.tokens_per_second.value and int(line["n"]) == speed.groups
        assert float(line["speed_up"]) == speed.speed_up.value and line["speed_up_over"] == "none"
        assert bool(line["speed_up_low"]) is (summary.batch == 1) and line["lossless"] == str(summary.lossless)
        assert int(line["identical"]) == summary.verdicts["identical"]
    ngram = lines["1", "chat", "ngram@2"]
    of_chat = next(arm for arm in data.of_family("chat").summaries if (arm.arm, arm.batch) == ("ngram@2", 1))
    assert float(ngram["tokens_per_forward"]) == of_chat.block_efficiency and not ngram["speed_up_low"]
    assert ngram["n"] == "4" and lines["1", "all", "none"]["acceptance_rate"] == ""
    assert table(csv_text(against(data, "ngram@2")))["1", "all", "ngram@2"]["speed_up"] == "1.0"


def test_a_failed_arm_has_its_error_and_no_speed(tmp_path: Path) -> None:
    folder = make(tmp_path / "bench", "none,ngram@2", batches=[1], repeats=1)
    fail(folder, "ngram@2", "RuntimeError: out of memory, and more")
    line = table(csv_text(load(folder)))["1", "all", "ngram@2"]
    assert line["n"] == line["speed_up"] == "" and line["error"] == "RuntimeError: out of memory, and more"
    assert "failed" in latex(load(folder))
    cells = {row[0]: row[1:] for row in rows(markdown(load(folder)))}
    assert cells["geometric mean"][1] == cells["tokens per second"][1] == cells["chat"][1] == "failed"


def test_latex_tables_have_as_many_cells_as_columns_and_escape_names(data: Records) -> None:
    text = latex(data, "50 % more & others", "See #2.")
    tables = re.findall(r"\\begin\{tabular\}\{([lr]+)\}\n(.*?)\\end\{tabular\}", text, re.DOTALL)
    assert len(tables) == 4 and text.count(r"\begin{table}") == text.count(r"\end{table}") == 4
    for columns, body in tables:
        assert [line.strip() for line in body.splitlines() if "rule" in line.split("{")[0] and "&" not in line] == [
            r"\toprule",
            r"\midrule",
            r"\bottomrule",
        ]
        rows = [line for line in body.splitlines() if line.endswith(r"\\")]
        assert len(rows) >= 2 and {len(re.findall(r"(?<!\\)&", row)) + 1 for row in rows} == {len(columns)}
    prose = re.sub(r"\\[a-zA-Z]+(\{[^}]*\})?|\\[&%$#_{}]|\$\\times\$|\$n\$", "", text.partition("\n\n")[2])
    assert not re.search(r"[#^~<>|\"_$%]", prose), prose
    assert r"50 \% more \& others" in text and r"See \#2." in text and "Measured " in text
    depth = 0
    for character in re.sub(r"\\[{}\\]", "", text):
        depth += {"{": 1, "}": -1}.get(character, 0)
        assert depth >= 0
    assert depth == 0


def test_a_cell_has_its_interval_in_brackets() -> None:
    text = latex_table(Table("t", ["arm", "n", "speed-up"], [["a_b", "9", Cell("1.76x", "1.25", "2.49")]]), "c", "l")
    assert r"Arm & $n$ & Speed-up \\" in text and r"a\_b & 9 & 1.76$\times$ [1.25, 2.49] \\" in text


def test_the_methods_of_the_arms_are_cited_and_no_others(data: Records) -> None:
    keys = [reference.key for reference in citations(data)]
    assert keys == [
        "slipstream",
        "leviathan2023fast",
        "chen2023accelerating",
        "saxena2023prompt",
        "luo2025turning",
        "sun2025block",
    ]
    entries = re.findall(r"@(\w+)\{([^,]+),\n((?:  \w+ = \{.*\},\n)+)\}\n", bibtex(data))
    assert [key for _, key, _ in entries] == keys
    assert all({"author", "title", "year"} <= set(re.findall(r"^  (\w+)", body, re.M)) for *_, body in entries)
    page = render(data, [], None)
    assert "Leviathan et al. (2023): Fast Inference from Transformers via Speculative Decoding." in page


def test_the_page_has_the_authors_title_and_note(data: Records) -> None:
    page = render(data, [], None, "A <title>", "A & note")
    assert "<title>A &lt;title&gt;</title>" in page and "<h1>A &lt;title&gt;</h1>" in page and "A &amp; note" in page


def test_the_draft_model_is_named_only_with_the_arms_that_use_it(data: Records) -> None:
    assert models(data) == "toy with toy:2 as draft model of model, 3 tokens, model, 3 tokens, topk:2 rule"
    some = replace(data, references={"none": "none", "ngram@2": "none", "hf": "none"})
    assert models(some) == "toy"
    assert models(replace(data, references={"none": "none", "auto": "none"})) == "toy with toy:2 as draft model"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--markdown", "--reference", "ngram@2"), 0, "relative to `ngram@2`"),
        (("--markdown", "--reference", "hf"), 2, "reference 'hf' is not among the arms"),
        (("--markdown", "--ids"), 2, "--ids with --markdown"),
        (("--reference", "none"), 2, "--reference none alone"),
        (("--csv", "-"), 0, "batch_size,family,arm,n,tokens,"),
        (("--latex", "-", "--title", "T", "--reference", "ngram@2"), 0, "speed-ups are over ngram, 2 tokens"),
        (("--bibtex", "-"), 0, "@inproceedings{leviathan2023fast,"),
        (("--csv", "/nowhere/x.csv"), 2, "--csv '/nowhere/x.csv' cannot be written"),
        (("--csv", "-", "--title", "T"), 2, "--title without a page"),
        (("--bibtex", "-", "--reference", "none"), 2, "--reference none alone"),
        (("--csv", "-", "--latex", "-"), 2, "standard output is named twice"),
        (("--csv", "-", "--markdown"), 2, "standard output is named twice"),
    ],
)
def test_tables_are_written_where_they_are_asked_for(
    capsys, monkeypatch, folder: Path, arguments: tuple[str, ...], code: int, message: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["slipstream", "report", str(folder), *arguments])
    with pytest.raises(SystemExit) as exited:
        cli.main()
    captured = capsys.readouterr()
    assert exited.value.code == code and message in (captured.err if code else captured.out)
    assert [file.name for file in folder.iterdir()] == ["runs.jsonl"]
