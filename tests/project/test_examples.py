"""The examples run on the embedded model or the toy and show what they promise; their saved output is clean."""

import ast
import contextlib
import importlib.util
import io
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import nbformat
import pytest

import slipstream
from tests.support.training_cases import write_target

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
NOTEBOOKS = sorted(path for path in ROOT.rglob("*.ipynb") if ".venv" not in path.parts)
SETTINGS = {
    "SLIPSTREAM_TARGET": "smollm2",
    "SLIPSTREAM_DRAFT": "",
    "SLIPSTREAM_MAX_TOKENS": "12",
    "SLIPSTREAM_REPEATS": "1",
    "OMP_NUM_THREADS": "1",
}
TOY = {"SLIPSTREAM_TARGET": "toy"}  # for tests that do not depend on the model
NAMES = ("getting_started", "top_k_acceptance", "longest_matching_prefix", "batches", "draft_length")
URL_OR_TAG = re.compile(r"https?://\S+|<[^<>]*>")
ABSOLUTE = re.compile(r"(?<![\w./])(?:~|[A-Za-z]:)?[/\\][\w.-]+[/\\][\w.-]+")


def _runner() -> ModuleType:
    spec = importlib.util.spec_from_file_location("slipstream_examples_run", FOLDER / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


run: Any = _runner()


def notebook(*cells: str) -> Any:
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])


def read_here(name: str, monkeypatch: pytest.MonkeyPatch, changes: Mapping[str, str] | None = None) -> str:
    """The printed and displayed output of a notebook's code, run in this process to save imports."""
    for variable, value in {**SETTINGS, **(changes or {})}.items():
        monkeypatch.setenv(variable, value)
    names: dict[str, Any] = {"__name__": "__main__"}
    with contextlib.redirect_stdout(io.StringIO()) as out:
        for cell in nbformat.read(FOLDER / f"{name}.ipynb", as_version=4).cells:
            if cell.cell_type == "code":
                print(_displayed(cell.source, names))
    return out.getvalue()


def _displayed(source: str, names: dict[str, Any]) -> str:
    """Run a cell; return the value of its last line as HTML and as text."""
    *statements, last = ast.parse(source).body
    if not isinstance(last, ast.Expr):
        exec(compile(source, "cell", "exec"), names)
        return ""
    exec(compile(ast.Module(statements, []), "cell", "exec"), names)
    value = eval(compile(ast.Expression(last.value), "cell", "eval"), names)
    return "" if value is None else f"{getattr(value, '_repr_html_', str)()}\n{value!r}"


def leaks(text: str) -> list[str]:
    """Absolute paths in a text, and names of folders of this machine."""
    paths = ABSOLUTE.findall(URL_OR_TAG.sub(" ", text))
    return paths + [folder for folder in (str(ROOT), str(Path.home())) if len(folder) > 1 and folder in text]


@pytest.mark.slow
@pytest.mark.parametrize(
    "target", ["tiny", pytest.param("smollm2", marks=[pytest.mark.smollm2, pytest.mark.exhaustive])]
)
def test_getting_started_compares_speeds_with_identical_texts(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if target == "tiny":
        target = str(write_target(tmp_path))
    output = read_here("getting_started", monkeypatch, {"SLIPSTREAM_TARGET": target})
    race = re.findall(r"^ +[\d.]+ +[\d.]+ +[\d.]+x  (True|False) ", output, flags=re.MULTILINE)
    assert race == ["True"] * 3
    lengths = re.findall(r"^(\d|auto) +[\d.]+ +[\d.]+x  (True|False)$", output, flags=re.MULTILINE)
    assert lengths == [(length, "True") for length in ("1", "4", "8", "auto")]
    assert "<details>" in output and "round accepted/drafted" in output and "Result('" in output
    assert "Stats(12 tokens" in output
    assert re.search(r"^ended by: (stop|length)$", output, flags=re.MULTILINE)
    assert "have the same tokens" in output and f"SpeculativeDecoder('{target}'" in output
    assert target != "smollm2" or "Italy" in output


@pytest.mark.smollm2
def test_top_k_acceptance_shows_an_exact_and_a_different_text(monkeypatch: pytest.MonkeyPatch) -> None:
    output = read_here("top_k_acceptance", monkeypatch)
    assert "exact is identical to plain: True" in output
    assert "top 10 is identical to plain: False" in output
    assert re.search(r"exact .* lossless: True", output) and re.search(r"top 10 .* lossless: False", output)
    assert "<details>" in output, "the result does not display itself"


@pytest.mark.exhaustive
@pytest.mark.smollm2
def test_the_longest_matching_prefix_gives_the_greedy_text(monkeypatch: pytest.MonkeyPatch) -> None:
    output = read_here("longest_matching_prefix", monkeypatch)
    assert re.search(r"speculative .* identical to plain: True", output)
    assert re.search(r"hf generate .* s, identical to plain: (True|False)", output)


@pytest.mark.slow
def test_the_batches_notebook_gives_the_texts_of_single_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    output = read_here("batches", monkeypatch, TOY)
    assert output.count("batch identical to one by one: True") == 2, "greedy and nucleus"
    assert "greedy text identical to plain: True" in output
    assert "text of a seed identical to plain: True" in output
    plain, _, batch = (int(n) for n in re.findall(r"tokens in (\d+) forwards", output)[:3])
    assert batch < plain


@pytest.mark.slow
def test_every_draft_length_is_measured_and_plotted(monkeypatch: pytest.MonkeyPatch) -> None:
    plt = pytest.importorskip("matplotlib.pyplot")
    shown = list[int]()
    monkeypatch.setattr(plt, "show", lambda: shown.extend(len(axes.lines) for axes in plt.gcf().axes))
    output = read_here("draft_length", monkeypatch, TOY | {"SLIPSTREAM_DRAFT": "toy:2"})
    rows = re.findall(r"^ +(\d) .* (True|False)$", output, flags=re.MULTILINE)
    assert rows == [(str(length), "True") for length in range(2, 9)]
    plt.close("all")
    assert shown == [1, 2]
    assert "have the same tokens" in output


@pytest.mark.smollm2
@pytest.mark.parametrize("draft", ["", pytest.param("smollm2", marks=pytest.mark.exhaustive)])
def test_the_script_prints_text_and_acceptance_rate(
    draft: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for variable, value in (SETTINGS | {"SLIPSTREAM_DRAFT": draft}).items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(sys, "argv", ["speculative_generate.py"])
    runpy.run_path(str(FOLDER / "speculative_generate.py"), run_name="__main__")
    output = capsys.readouterr().out
    assert re.search(r"^Output: \S", output, flags=re.MULTILINE)
    rate = re.search(r"^Acceptance rate: (\d\.\d{3})$", output, flags=re.MULTILINE)
    assert rate is not None
    assert not draft or rate.group(1) == "1.000", "a model that drafts for itself is always right"


@pytest.mark.slow
def test_the_runner_fails_if_a_cell_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, cell in (("good", "print('fine')"), ("bad", "raise ValueError('on purpose')")):
        nbformat.write(notebook(cell), tmp_path / f"{name}.ipynb")
    before = (tmp_path / "bad.ipynb").read_bytes()
    assert run.main(["--save", "bad", "good"], tmp_path) == 1
    bad, good = capsys.readouterr().out.splitlines()
    assert bad.endswith("failed: ValueError: on purpose") and good.endswith("ok")
    assert (tmp_path / "bad.ipynb").read_bytes() == before, "a failed run was saved"
    assert nbformat.read(tmp_path / "good.ipynb", 4).cells[0].outputs[0].text == "fine\n"


def test_the_runner_fails_if_a_script_fails_and_passes_settings(tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("raise SystemExit('no such model')")
    (tmp_path / "good.py").write_text(
        "import os; print(os.environ['SLIPSTREAM_TARGET'], os.environ['SLIPSTREAM_DRAFT'])"
    )
    assert run.run_example(tmp_path / "bad.py", {}).error == "no such model"
    assert run.main(["bad"], tmp_path) == 1
    assert run.run_example(tmp_path / "good.py", {"SLIPSTREAM_TARGET": "t", "SLIPSTREAM_DRAFT": ""}).output == "t \n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["nothing"], "example 'nothing'; allowed: batches,"),
        (["--draft", "d"], "--draft needs --target"),
        (["--max-tokens", "0"], "'0'; allowed: a whole number, 1 or more"),
    ],
)
def test_wrong_use_of_the_runner_is_one_clear_line(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run.main(arguments)
    assert stopped.value.code == 2
    assert line in capsys.readouterr().err


def test_every_example_is_known_and_listed_in_the_readme() -> None:
    assert {path.stem for path in NOTEBOOKS} == set(NAMES)
    assert [path.stem for path in run.examples(FOLDER)] == sorted([*NAMES, "speculative_generate"])
    readme = (FOLDER / "README.md").read_text()
    assert all(path.name in readme for path in run.examples(FOLDER))
    assert min(readme.index(path.name) for path in run.examples(FOLDER)) == readme.index("getting_started.ipynb")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_saved_outputs_are_complete_and_clean(path: Path) -> None:
    saved = nbformat.read(path, as_version=4)
    nbformat.validate(saved)
    code = [cell for cell in saved.cells if cell.cell_type == "code"]
    counts = [cell.execution_count for cell in code]
    assert counts == list(range(1, len(code) + 1)), "not saved by a run from top to bottom"
    kinds = [(o.output_type, o.get("name")) for cell in code for o in cell.outputs]
    assert all(kind != "error" and name != "stderr" for kind, name in kinds)
    results = [
        o.data["text/plain"]
        for cell in code
        for o in cell.outputs
        if "Result(" in o.get("data", {}).get("text/plain", "")
    ]
    assert all(re.fullmatch(r"Result\('.*', \d+ tokens, [\d.]+ per forward, \w+\)", text) for text in results)
    assert not leaks(run.text_outputs(saved) + "\n".join(cell.source for cell in saved.cells))


@pytest.mark.parametrize("name", NAMES)
def test_the_first_code_cell_names_the_small_model(name: str) -> None:
    saved = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    first = next(cell.source for cell in saved.cells if cell.cell_type == "code")
    for variable, default in (("TARGET", "smollm2"), ("DRAFT", "")):
        assert f'{variable} = os.environ.get("SLIPSTREAM_{variable}", "{default}")' in first


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_import_public_names_only(path: Path) -> None:
    source = "\n".join(cell.source for cell in nbformat.read(path, 4).cells if cell.cell_type == "code")
    imported = re.findall(r"^from (slipstream\S*) import (.+)$", source, flags=re.MULTILINE)
    assert imported and all(module == "slipstream" for module, _ in imported)
    names = {name.strip() for _, line in imported for name in line.split(",")}
    assert names <= set(slipstream.__all__)
