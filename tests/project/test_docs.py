"""The documentation: its code runs, its links resolve, its figures stand on one page, and it stays short."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from slipstream.apps import cli
from tests.support.markers import subcases
from tests.support.page_browser import CHROMIUM, Opened, running_browser
from tests.support.tiny_models import fresh, tokenizer

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
RECORDS = sorted((ROOT / "benchmarks" / "records").glob("*.md"))
BLOCK = re.compile(r"(?ms)^( *)```(\w*)([^\n]*)\n(.*?)^\1```$")
FIGURE = re.compile(
    r"(?<![\w.])\d+(?:\.\d+)?x(?!\w)|\d\.\d+ times (?:as|faster)|\d (?:tok/s|tokens per second|tokens per forward)"
)
MOST_WORDS = 15_000  # of the pages that are to be read; reference and dated results are looked up
LOOKED_UP = {"models.md", "defaults.md", "glossary.md", "results.md"}
GENERATED = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md", "security.md": "SECURITY.md"}
# Models that the documentation names, which are not on every machine, and their substitutes in the tests.
TARGETS = re.compile(r'"(?:Qwen/[\w.-]+|smollm2)"')
HELP = {"--help", "-h", "--help-all", "--version"}
OTHER_PROGRAMS = {"python", "pip", "uv", "curl", "cat", "docker", "ray", "torchrun", "source", "git", "vllm", "caddy"}


def blocks(page: Path, language: str) -> list[str]:
    """The code blocks of a page in one language, except those marked as a sketch."""
    codes = []
    for indent, name, more, code in BLOCK.findall(page.read_text(encoding="utf-8")):
        if name == language and "sketch" not in more:
            codes.append(re.sub(rf"(?m)^{indent}", "", code))
    return codes


def prose(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


WITH_PYTHON = [page for page in PAGES if blocks(page, "python")]


@pytest.mark.smollm2
@subcases("page", WITH_PYTHON, ids=lambda page: page.stem)
def test_python_blocks_of_a_page_run_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = tmp_path / "small"
    fresh("llama", hidden_size=64, intermediate_size=128).save_pretrained(small)
    tokenizer().save_pretrained(small)
    names: dict[str, object] = {"__name__": "page"}
    for code in blocks(page, "python"):
        if "from_pretrained" in code or "quantize=" in code:
            code = TARGETS.sub(repr(str(small)), code)
        elif "SpeculativeDecoder(" in code and "constraint=" not in code:
            code = re.sub(r"SpeculativeDecoder\(([^)]*)\)", lambda m: TARGETS.sub('"toy"', m.group()), code)
        compiled = compile(code, page.name, "exec")
        if "OpenAI(" not in code:  # tests/clients and tests/apps/server have a server
            exec(compiled, names)


def command_of(words: list[str]) -> tuple[Any, list[str]]:
    """The command that a line calls, and its arguments."""
    command: Any = typer.main.get_command(cli.app)
    while (parts := getattr(command, "commands", None)) and words and words[0] in parts:
        command, words = parts[words[0]], words[1:]
    assert command.name != "slipstream" or not words or words[0].startswith("-"), f"no command {words[0]!r}"
    return command, words


def problem_of(line: str) -> str | None:
    """An error message for a line of shell, or None."""
    words = shlex.split(line, comments=True)
    while words and words[0] in ("cat",) and "|" in words:
        words = words[words.index("|") + 1 :]
    if not words:
        return None
    if words[0] == "slipstream":
        command, arguments = command_of(words[1:])
        names = {name for option in command.params for name in [*option.opts, *option.secondary_opts]} | HELP
        used = [word.partition("=")[0] for word in arguments if re.match(r"--?[a-z]", word)]
        return next((f"no option {name}" for name in used if name not in names), None)
    if words[0] == "make":
        targets = re.findall(r"(?m)^([\w-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"))
        return next((f"no target {word}" for word in words[1:] if "=" not in word and word not in targets), None)
    if words[0] == "python" and words[1].startswith("benchmarks/"):
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        for word in words:
            parameter = word[2:].replace("-", "_")
            if word.startswith("--") and not re.search(rf"[\"']{word}[\"']|\b{parameter}\b", source):
                return f"no option {word}"
        return None
    return None if words[0] in OTHER_PROGRAMS else f"unknown program {words[0]}"


@subcases("page", [page for page in [*PAGES, *RECORDS] if blocks(page, "sh")], ids=lambda page: page.stem)
def test_commands_and_options_in_shell_blocks_exist(page: Path) -> None:
    lines = [
        part
        for code in blocks(page, "sh")
        for line in code.replace("\\\n", "").splitlines()
        for part in line.split(" && ")
    ]
    assert {line: problem for line in lines if (problem := problem_of(line)) is not None} == {}


@subcases("page", [page for page in PAGES if blocks(page, "json")], ids=lambda page: page.stem)
def test_json_blocks_are_valid_json(page: Path) -> None:
    for code in blocks(page, "json"):
        for line in code.splitlines():
            json.loads(line)


def slug(heading: str) -> str:
    plain = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())


def broken_links(page: Path) -> list[str]:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)|<(https?://[^>]+)>", prose(page)):
        address = link[0] or link[1]
        if address.startswith("http"):
            continue
        file, _, anchor = address.partition("#")
        target = page.parent / file if file else page
        if not target.exists():
            broken.append(address)
        elif anchor and target.suffix == ".md":
            headings = re.findall(r"(?m)^#+ (.*)$", prose(target))
            if anchor not in map(slug, headings):
                broken.append(address)
    return broken


@subcases("page", [*PAGES, *RECORDS], ids=lambda page: page.stem)
def test_links_and_their_anchors_exist(page: Path) -> None:
    assert broken_links(page) == []


@subcases("page", [page for page in PAGES if page.name not in ("results.md", "README.md")], ids=lambda page: page.stem)
def test_speed_figures_are_only_on_the_results_page(page: Path) -> None:
    assert FIGURE.findall(prose(page)) == []


def test_figures_of_the_readme_are_also_on_the_results_page() -> None:
    readme, results = prose(ROOT / "README.md"), (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    figures = re.findall(r"\| \**(\d+\.\d+)\**(?= \|)", readme)
    assert figures and all(figure in results for figure in figures)
    assert FIGURE.findall(readme) == []


def words_of(page: Path) -> int:
    """The number of words outside code; a word has at least one letter."""
    return sum(bool(re.search(r"[A-Za-z]", word)) for word in prose(page).split())


def test_every_picture_is_used_on_a_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    pictures = [file for file in (ROOT / "docs" / "images").iterdir() if file.suffix in (".png", ".svg")]
    assert pictures and [file.name for file in pictures if f"images/{file.name})" not in text] == []


def test_the_documentation_is_short() -> None:
    total = sum(words_of(page) for page in PAGES if page.name not in LOOKED_UP)
    assert total < MOST_WORDS, f"{total} words"


@pytest.mark.slow
def test_the_site_builds_and_fetches_nothing_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="pip install './slipstream[docs]'")
    pytest.importorskip("mkdocstrings")
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        fetched = re.findall(r'<(?:script|img|iframe)[^>]*src="?(https?:[^"\s>]+)', page.read_text(encoding="utf-8"))
        fetched += re.findall(
            r'<link[^>]*rel="?(?:stylesheet|preload)"?[^>]*href="?(https?:[^"\s>]+)', page.read_text()
        )
        assert fetched == [], page.name
    commands = (tmp_path / "site" / "reference" / "cli.html").read_text(encoding="utf-8")
    assert "--max-tokens" in commands and "slipstream models check" in commands
    python = re.sub(r"<[^>]+>", "", (tmp_path / "site" / "reference" / "python.html").read_text(encoding="utf-8"))
    assert "slipstream.SpeculativeDecoder" in python and "slipstream.decoder.SpeculativeDecoder" not in python
    assert re.search(r"^tokenizer: needed only with loaded models and text prompts$", python, flags=re.MULTILINE)
    assert re.search(r"^draft_tokenizer: ", python, flags=re.MULTILINE), "one argument a line"
    if CHROMIUM.exists() and importlib.util.find_spec("playwright"):
        with running_browser() as browser:
            page = Opened(browser)((tmp_path / "site" / "index.html").as_uri())  # a file, without a server
            page.locator("input.md-search__input").press_sequentially("roll back")  # the theme listens to keys
            page.wait_for_selector(".md-search-result a >> text=Operate")
