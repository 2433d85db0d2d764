"""Reports: ratios with intervals, charts, sample texts, and a page in which every value is escaped."""

import re
import sys
import time
import xml.etree.ElementTree as ET
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from slipstream.apps import cli
from slipstream.apps.cli.application import app
from slipstream.apps.cli.measuring import command_line
from slipstream.apps.cli.report import report_command
from slipstream.bench import report
from slipstream.bench.arms import label
from slipstream.bench.records import Header, append, read_records, start
from slipstream.bench.report import plots, write_report
from slipstream.bench.report.headline import advice, flags, headline, text_verdicts
from slipstream.bench.report.html import BASELINES, describe, render, settings_table
from slipstream.bench.report.plots import Chart, Line, Point, charts, selected
from slipstream.bench.report.report_data import (
    Records,
    acceptance,
    acceptance_at,
    load,
    local_time,
    restored,
    sample,
    sampled_texts,
    total_ratio,
)
from slipstream.bench.result_tables import FIGURES
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.toy import ToyTokenizer
from slipstream.text.round_view import views
from tests.support.toy_runs import NASTY, fail, make, summarized, timed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("runs") / "bench")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return write_report(folder, ToyTokenizer()).read_text()


class Reader(HTMLParser):
    """Collects tags, the cells of tables and every attribute that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.loads: list[str] = []
        self.tables: list[list[list[str]]] = []
        self._inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loads += [f"{k}={v}" for k, v in attrs if k in ("src", "href", "xlink:href", "data", "action", "srcset")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._inside = True
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._inside = self._inside and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.tables[-1][-1][-1] += data


# ratios


def test_a_ratio_of_totals_is_not_a_mean_of_ratios() -> None:
    ratio = total_ratio([1, 30, 1, 30, 1], [10, 40, 10, 40, 10])
    assert ratio is not None and ratio.value == pytest.approx(63 / 110)
    assert ratio.low is not None and ratio.high is not None and 0.1 <= ratio.low < ratio.value < ratio.high <= 0.75


def test_a_ratio_over_zero_is_none_and_four_prompts_have_no_interval() -> None:
    assert total_ratio([1, 2], [0, 0]) is None and total_ratio([], []) is None
    few = total_ratio([3] * 4, [4] * 4)
    assert few is not None and (few.value, few.low, few.high) == (0.75, None, None)


def test_acceptance_counts_tokens_over_all_runs() -> None:
    runs = timed("ngram@1", [1.0], accepted=4) + timed("ngram@1", [1.0], drafted=30, accepted=6)
    for rate in (acceptance(runs), acceptance_at(runs, 0)):
        assert rate is not None and rate.value == pytest.approx(10 / 40)
    assert acceptance_at(runs, 1) is None and acceptance(timed("none", [1.0], drafted=0)) is None


# charts


def test_every_kind_of_chart_is_drawn_and_names_its_units(folder: Path) -> None:
    drawn = charts(load(folder))
    kinds = ("speed_up_by_family", "speed_by_draft_length", "acceptance_by_draft_length", "acceptance_by_position")
    assert {c.name for c in drawn} == {f"{kind}_batch_{batch}" for kind in kinds for batch in (1, 2)}
    assert all("Texts: " in chart.caption for chart in drawn if chart.name.startswith("speed"))
    assert all(re.search(r"\(times\)|\(tokens\)", chart.x_label) for chart in drawn)
    for chart in (chart for chart in drawn if not chart.name.startswith("acceptance_by_position")):
        assert "95 % bootstrap intervals" in chart.caption
        points = [p for line in chart.lines for p in line.points]
        assert points and all(p.low is None or (p.high is not None and p.low <= p.high) for p in points)
        assert any(p.low is not None for p in points) is chart.name.endswith("_1")  # batches of 2 are four groups


def test_acceptance_by_position_shows_positions_and_intervals_of_which_enough_is_known() -> None:
    for num_prompts, has_bars in ((3, False), (10, True)):
        drafting = [run for accepted in (2, 8) for run in timed("auto", [1.0] * num_prompts, accepted=accepted)]
        drafting = [replace(run, repeat=number // num_prompts) for number, run in enumerate(drafting)]
        for run in drafting:
            run.stats["drafted_per_position"] = [10, 10, 10, int(run.prompts == ["chat/0"])]
            run.stats["accepted_per_position"] = [run.stats["num_accepted_tokens"], 4, 3, 1]
        runs = [*timed("none", [2.0] * num_prompts, drafted=0), *drafting]
        data = Records(Header({}, {}, {}, ""), runs, summarized(runs, "none"), {"none": "none", "auto": "none"})
        (chart,) = (chart for chart in charts(data) if chart.name.startswith("acceptance_by_position"))
        (line,) = chart.lines
        assert [(point.x, point.value) for point in line.points] == [(1, 0.5), (2, 0.4), (3, 0.3)]
        assert [point.low is not None for point in line.points] == [has_bars] * 3
        assert ("95 % bootstrap intervals" in chart.caption) == has_bars


def test_charts_by_draft_length_begin_with_plain_decoding(folder: Path) -> None:
    chart = next(c for c in charts(load(folder)) if c.name == "speed_by_draft_length_batch_1")
    assert {line.name: [p.x for p in line.points] for line in chart.lines} == {
        "ngram": [0, 2],
        "model": [0, 1, 2, 3],
        "model, topk:2 rule": [0, 3],
    }


def test_only_the_fastest_of_each_kind_is_shown_if_there_are_many_arms() -> None:
    runs = [run for n in range(1, 9) for run in timed(f"ngram@{n}", [1.0 + abs(n - 5)])] + timed("none", [2.0])
    summaries = summarized(runs, "none")
    assert [summary.arm for summary in selected(summaries)] == ["ngram@5", "none"]
    assert len(selected(summaries[:6])) == 6


@pytest.mark.slow
def test_plots_are_valid_files_and_deterministic(folder: Path, tmp_path: Path) -> None:
    drawn = charts(load(folder))[:2]
    files = plots.save(drawn, tmp_path / "a")
    endings = ("pdf", "png", "svg")
    assert [file.name for file in files] == [f"{chart.name}.{ending}" for chart in drawn for ending in endings]
    for pdf, png, svg in (files[:3], files[3:]):
        assert pdf.read_bytes().startswith(b"%PDF-") and pdf.stat().st_size > 5000
        assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n") and png.stat().st_size > 5000
        assert ET.fromstring(svg.read_text()).tag.endswith("svg")
    again = plots.save(drawn[:1], tmp_path / "b")
    assert [file.read_bytes() for file in again] == [file.read_bytes() for file in files[:3]]
    with pytest.raises(UsageError, match="plots cannot be written to"):
        plots.save(drawn, files[0])


def test_inline_charts_on_one_page_share_no_ids() -> None:
    lines = (Line("a", (Point(0, 1, 0.9, 1.1), Point(1, 2)), 0), Line("costs $5 & <more>", (Point(0, 1),), 1))
    first, second = (plots.inline_svg(Chart(name, "T", "c", "x (s)", "y", lines)) for name in ("one", "two"))
    ids = re.findall(r'\bid="([^"]+)"', first)
    assert ids and not set(ids) & set(re.findall(r'\bid="([^"]+)"', second))
    used = re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', first)
    assert used and all((a or b) in ids for a, b in used)
    assert "currentColor" in first and "var(--grid)" in first and "<style" not in first
    assert "costs $5 &amp; &lt;more&gt;" in first
    assert ET.fromstring(first).attrib["aria-label"] == "T"


def test_long_and_foreign_names_fit_without_warnings() -> None:
    rows = ("a family with a name that goes on and on and never seems to end", "\u7ffb\u8a33")
    chart = Chart("n", "T", "c", "x (times)", "", (Line("a", (Point(0, 1), Point(1, 2)), 0),), "rows", rows)
    drawn = plots.inline_svg(chart)
    assert f"{rows[0][:25]}..." in drawn and rows[1] in drawn


@pytest.mark.parametrize(
    ("lengths", "ticks", "joined"),
    [((7,), [7], [[7]]), ((0, 7), None, [[0], [7]]), ((0, 1, 2, 4), [0, 1, 2, 3, 4], [[0, 1, 2], [4]])],
)
def test_lengths_are_whole_numbers_and_only_measured_neighbors_are_joined(lengths, ticks, joined) -> None:
    points = tuple(Point(x, 1.0 + x, 0.5 + x, 1.5 + x) for x in lengths)
    with plots._drawn(Chart("n", "T", "c", "x (tokens)", "y", (Line("a", points, 0),)), "none") as figure:
        (axes,) = figure.axes
        low, high = axes.get_xlim()
        shown = [tick for tick in axes.get_xticks() if low <= tick <= high]
        assert all(tick == int(tick) for tick in shown) and (ticks is None or shown == ticks)
        lines = [list(line.get_xdata()) for line in axes.lines if line.get_linestyle() != "None"]
        assert lines == joined
        assert axes.get_legend_handles_labels()[1] == ["a"]


def test_charts_of_one_batch_size_have_the_same_size(page: str) -> None:
    boxes = [re.findall(r'viewBox="0 0 ([0-9.]+) ([0-9.]+)"', part) for part in page.split('<div class="plots">')[1:]]
    assert len(boxes) == 2 and all(len(set(block)) == 1 and len(block) > 1 for block in boxes)


def folder_of(*parts: tuple[str, list[float]], lossy: str = "") -> Records:
    """A folder of runs with these times; the arm "hf" is a baseline."""
    runs = [run for arm, seconds in parts for run in timed(arm, seconds)]
    for run in runs:
        run.verdicts[:] = ["reference" if run.arm == "none" else "identical"]
        if run.arm == lossy:
            run.stats["lossless"] = False
    runs = [replace(run, stats=None) if run.arm == "hf" else run for run in runs]
    names = {arm: "none" for arm, _ in parts}
    return Records(Header({}, {}, {}, ""), runs, summarized(runs, "none"), names)


def test_the_headline_names_the_fastest_lossless_arm_its_intervals_and_the_prompts() -> None:
    times = [("none", [2.0, 3.0]), ("auto", [1.0, 1.0]), ("ngram@2", [1.5, 1.5]), ("model@2/topk:2", [0.1, 0.1])]
    data = folder_of(*times, lossy="model@2/topk:2")
    assert headline(data) == "auto: 2.45x plain decoding, no interval, 2 prompts: too few for a claim"
    assert text_verdicts(data) == "2 of 2 texts are identical to plain decoding's."
    times = [(arm, seconds * 4) for arm, seconds in times]
    data, few = folder_of(*times, ("hf", [4.0, 8.0] * 4), lossy="model@2/topk:2"), "8 prompts: too few for a claim"
    assert headline(data) == f"auto: 2.45x plain decoding (2.10 to 2.85), 5.66x Hugging Face (4.36 to 7.34), {few}"
    data = folder_of(("none", [2.0] * 10), ("auto", [1.0] * 10))
    assert headline(data) == "auto: 2.00x plain decoding (2.00 to 2.00), 10 prompts"
    data = folder_of(("none", [1.0, 1.0, 1.0]), ("auto", [2.0, 2.0]), ("ngram@2", [2.0]))
    assert headline(data).startswith("No drafter was faster than plain decoding, 3 prompts:")
    assert text_verdicts(data) == "3 of 3 texts are identical to plain decoding's."  # from two prompts and from one


def test_every_number_of_the_headline_is_in_a_table() -> None:
    data = folder_of(("none", [2.0, 3.0] * 3), ("auto", [1.0, 1.1] * 3), ("hf", [4.0, 8.0] * 3))
    page = render(data, [], None)
    rows = {row[0]: row for row in Reader(page).tables[0]}
    assert rows["arm"][4] == "over Hugging Face"
    ratios = re.findall(r"[\d.]+x|\([\d.]+ to [\d.]+\)", headline(data))
    assert len(ratios) == 4 and all(any(part in cell for cell in rows["auto"]) for part in ratios)
    assert "Batch size 1, 6 prompts" in page and rows["auto"][1] == "6"


def test_advice_considers_every_arm_and_says_if_it_is_uncertain() -> None:
    data = folder_of(("none", [2.0, 3.0] * 3), ("ngram@7", [1.4, 1.4] * 3), ("auto", [1.0, 1.6] * 3))
    (choice,) = advice(data)
    assert choice.sentence.startswith("Batch size 1: use auto, ") and choice.flags == "--drafter auto"
    assert "the next is ngram, 7 tokens, " in choice.sentence and "may be equally fast" in choice.sentence
    (choice,) = advice(folder_of(("none", [2.0, 3.0] * 3), ("ngram@7", [1.4] * 6), ("auto", [1.0] * 6)))
    assert "equally fast" not in choice.sentence
    (choice,) = advice(folder_of(("none", [1.0, 1.0]), ("ngram@7", [1.4, 1.4]), ("hf", [0.5, 0.5])))
    assert "do not speculate; plain decoding is the fastest" in choice.sentence
    assert "Hugging Face was faster still, 2.00x" in choice.sentence and choice.flags == "--drafter none"
    assert flags("model@4/rejection.plain~0.8") == (
        "--drafter model --num-draft-tokens 4 --acceptance rejection --fast false --temperature 0.8"
    )


def test_arms_are_named_in_words() -> None:
    assert label("ngram~0") == "ngram, greedy" and label("ngram~0", temperature=False) == "ngram"
    assert label("model@1/rejection.plain~0.8") == "model, 1 token, rejection rule, unpacked weights, temperature 0.8"
    assert label("auto.predicted") == "auto, with predictions" != label("auto")
    assert (label("hf"), label("hf-lookup@7"), label("none")) == (
        "Hugging Face",
        "Hugging Face prompt lookup, 7 tokens",
        "plain",
    )


def test_times_are_local_and_name_their_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "America/New_York")
    time.tzset()
    assert local_time("2026-07-01T22:05:00+00:00") == "1 July 2026, 18:05 EDT"
    monkeypatch.undo()
    time.tzset()
    assert local_time("now") == "now"


def test_lines_differ_without_color() -> None:
    looks = [plots._look(Line("x", (), look)) for look in range(24)]
    assert len({(look["marker"], look["linestyle"]) for look in looks}) == len(looks)


def test_a_missing_matplotlib_is_one_line_with_the_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    with pytest.raises(SlipstreamError, match=r"^plots need matplotlib; run: pip install matplotlib jinja2$"):
        write_report(folder, ToyTokenizer())


# samples


def test_rounds_restored_from_records_give_the_text_of_the_run(folder: Path) -> None:
    _, runs = read_records(folder)
    for run in (run for run in runs if run.rounds):
        for row, text in enumerate(run.texts):
            rounds = restored(run.rounds, row, run.batch)
            assert [token for round in rounds for token in round.tokens] == text
            pieces = [
                piece for view in views(rounds, ToyTokenizer()) for piece in view.pieces if piece.kind != "rejected"
            ]
            assert "".join(piece.text for piece in pieces) == ToyTokenizer().decode(text)


def test_samples_show_each_prompt_once_and_only_runs_that_drafted(folder: Path) -> None:
    _, runs = read_records(folder)
    samples = sampled_texts(runs, ["model@3", "model@2", "model@1", "ngram@2", "model@3/topk:2", "none"], 2)
    assert [[(run.arm, run.prompts[row]) for run, row in texts] for texts in samples.values()] == [
        [("model@3", f"{family}/{n}") for n in (1, 2)] for family in ("chat", NASTY)
    ]
    assert sampled_texts([run for run in runs if run.arm == "none"], ["none"], 2) == {}


def test_a_sample_marks_accepted_and_rejected_tokens_and_shows_its_verdict(folder: Path) -> None:
    _, runs = read_records(folder)
    run = next(run for run in runs if run.arm == "model@3" and run.stats["num_rejected_rounds"])
    shown = sample(run, 0, ToyTokenizer())
    assert {"acc", "rej", "own"} <= {name for name, _ in shown.spans} and shown.caption.endswith("text: identical")
    assert re.search(r"\[\d+\]", "".join(text for _, text in sample(run, 0, None).spans))


# the page


def test_the_report_loads_nothing_from_elsewhere(page: str) -> None:
    reader = Reader(page)
    assert all(load.split("=", 1)[1].startswith("#") for load in reader.loads)
    assert not {"script", "img", "link", "iframe", "object"} & set(reader.tags)
    assert "@import" not in page and "url(http" not in page and "default-src 'none'" in page
    assert "prefers-color-scheme: dark" in page and 'name="viewport"' in page


def test_names_and_texts_of_the_runs_are_escaped(page: str) -> None:
    assert "<script" not in page and "alert(" in page and "<b>fish" not in page
    assert "&lt;script&gt;" in page


def test_every_speed_stands_beside_the_verdict_on_its_texts(page: str) -> None:
    overall = Reader(page).tables[0]
    assert overall[0][:6] == ["arm", "n", "tokens per second", "speed-up", "texts", "acceptance rate"]
    rows = {row[0]: row for row in overall[1:]}
    assert rows["plain"][4] == "8 reference" and rows["ngram, 2 tokens"][4] == "8 identical"
    assert {row[1] for row in overall[1:]} == {"8"}
    assert re.fullmatch(r"\d+\.\d \(\d+\.\d to \d+\.\d\)", rows["model, 3 tokens"][2])
    assert re.fullmatch(r"\d+\.\d\dx \(.+ to .+\)", rows["model, 3 tokens"][3]) and rows["plain"][3] == "1.00x"
    assert "speed-ups are over plain</p>" in page
    families = next(table for table in Reader(page).tables if table[0][0] == "family")
    assert [row[0] for row in families[1:]] == ["chat", NASTY] and families[0][1:] == [row[0] for row in overall[1:]]
    assert all(re.fullmatch(r"\d+\.\d\dx, n = 4; 4 of 4", cell) for row in families[1:] for cell in row[1:6])


def test_the_report_and_the_terminal_call_figures_by_the_same_names(page: str) -> None:
    columns = Reader(page).tables[0][0]
    assert {name.replace("\n", " ") for name in FIGURES} - {"tok/s"} < set(columns)


def test_a_column_says_what_speed_ups_are_over_if_they_differ() -> None:
    data = folder_of(("none", [2.0, 3.0]), ("auto", [1.0, 1.1]), ("none~1", [2.0, 2.0]))
    data = replace(data, references=data.references | {"none~1": "none~1"})
    assert Reader(render(data, [], None)).tables[0][0][4] == "over"


def test_lossy_arms_are_marked_as_lossy(page: str) -> None:
    assert "model, 3 tokens, topk:2 rule is lossy: its output is not the target&#39;s own." in page


def test_the_report_lists_settings_versions_and_the_machine(page: str, folder: Path) -> None:
    header, _ = read_records(folder)
    for name in ("target", "arms", "sampling", "longest answer", "prompts", "processor", "cores", "PyTorch", "GPU"):
        assert f"<dt>{name}</dt>" in page
    for value in ("24 tokens", "greedy", header.versions["torch"], local_time(header.started)):
        assert value in page
    assert not re.search(r">(null|None|true|false|\{|\[)", page[page.index("<h2>Settings") :])


def test_the_report_lists_settings_that_differ_from_the_defaults(folder: Path) -> None:
    header, _ = read_records(folder)
    changed = {
        "config": header.settings["config"] | {"fast": False},
        "params": header.settings["params"] | {"top_k": 5},
    }
    listed = dict(settings_table(replace(header, settings=header.settings | changed)))
    assert listed["fast"] == "no" and listed["top k"] == "5" and "top p" not in listed
    assert listed["draft model"] == "toy:2"
    assert "Prompt lookup" in describe("ngram@2") and describe("ngram@2").endswith("2 tokens per draft")
    assert all(describe(name) for name in (*BASELINES, "auto@chain", "model@4x2/match.plain", "auto.predicted"))


def test_the_report_shows_prompts_beside_answers_and_the_command(tmp_path: Path) -> None:
    folder = make(tmp_path / "bench", "none,ngram@2", batches=[1], repeats=1)
    data = load(folder)
    page = render(
        replace(data, header=replace(data.header, command="slipstream bench --arms 'a b'")), [], ToyTokenizer()
    )
    assert 'aria-label="Prompt">So the heron ate &lt;b&gt;fish&lt;/b&gt;</div>' in page
    shown = re.sub(r"</?span[^>]*>", "", page)
    assert ">slipstream bench --arms &#39;a b&#39;</code>" in shown and 'id="drafts"' in page


def test_the_command_is_kept_without_the_folder_of_its_results(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (["--out", "runs one"], ["--out=runs"], []):
        monkeypatch.setattr(
            sys, "argv", ["/usr/bin/slipstream", "bench", *folder, "--arms", "none,hf", "--prompt-file", "a b"]
        )
        assert command_line() == "slipstream bench --arms none,hf --prompt-file 'a b'"


def test_charts_with_fewer_than_three_points_are_left_out() -> None:
    runs = timed("none", [2.0], drafted=0) + timed("ngram@7", [1.0])
    data = Records(Header({}, {}, {}, ""), runs, summarized(runs, "none"), {"none": "none", "ngram@7": "none"})
    assert charts(data) == []
    data = folder_of(("none", [2.0]), ("ngram@1", [1.0]), ("ngram@2", [1.0]))
    assert [chart.name for chart in charts(data)]
    assert all(sum(len(line.points) for line in chart.lines) >= 3 for chart in charts(data))


def test_a_failed_arm_has_no_speed_and_its_error_is_shown(tmp_path: Path) -> None:
    folder = make(tmp_path / "bench", "none,ngram@2", batches=[1], repeats=1)
    assert "Failures" not in render(load(folder), [], None)
    fail(folder, "ngram@2", "RuntimeError: out of <memory>")
    page = Reader(render(load(folder), [], None))
    assert next(row for row in page.tables[0] if row[0] == "ngram, 2 tokens")[2] == "failed"
    assert ["ngram, 2 tokens", "1", "1", "RuntimeError: out of <memory>"] in [
        row for table in page.tables for row in table
    ]


def test_the_report_warns_about_wrong_texts(tmp_path: Path) -> None:
    folder = make(tmp_path / "bench", "none,ngram@2", batches=[1], repeats=1)
    data = load(folder)
    assert 'class="bad"' not in render(data, [], None)
    (folder / "runs.jsonl").write_text((folder / "runs.jsonl").read_text().replace('"identical"', '"different"'))
    assert "ngram, 2 tokens, batch 1: 8 texts differ from plain decoding" in render(load(folder), [], None)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (None, "cannot be read"),
        ({}, "names no arms or no reference"),
        ({"arms": ["none"], "reference": "none"}, "holds no runs yet"),
    ],
)
def test_a_folder_without_runs_is_refused(tmp_path: Path, settings: dict[str, Any] | None, message: str) -> None:
    if settings is not None:
        start(tmp_path, Header(settings, {}, {}, ""))
    with pytest.raises(UsageError, match=message):
        write_report(tmp_path)


@pytest.mark.slow
def test_arms_that_tune_chose_while_it_measured_are_reported(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The header of a `tune` folder names only the arms of its screening."""
    monkeypatch.setattr(report, "charts", lambda data: [])  # the charts are tested above
    header, runs = read_records(folder)
    start(tmp_path, replace(header, settings=header.settings | {"arms": ["none", "ngram@2"]}))
    for run in runs:
        append(tmp_path, run)
    assert load(tmp_path).references == load(folder).references
    assert "model@3" in load(tmp_path).header.settings["arms"]
    assert label("model@3") in write_report(tmp_path, ToyTokenizer()).read_text()


@pytest.mark.slow
def test_report_loads_no_weights(capsys, monkeypatch, folder: Path) -> None:
    assert any(command.callback is report_command for command in app.registered_commands)
    monkeypatch.setattr(report, "charts", lambda data: [])  # the charts are tested above
    for arguments, in_ids in (((), False), (("--ids",), True)):
        monkeypatch.setattr(sys, "argv", ["slipstream", "report", str(folder), *arguments])
        with pytest.raises(SystemExit) as exited:
            cli.main()
        assert exited.value.code == 0 and capsys.readouterr().out.strip() == str(folder / "report.html")
        assert bool(re.search(r">\[\d+\]<", (folder / "report.html").read_text())) == in_ids
