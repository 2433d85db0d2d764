"""The README shows the true output of its code, and every name in it exists."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from slipstream.apps import cli
from slipstream.core import acceptance

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]


def printed(code: str) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    return out.getvalue()


@pytest.mark.smollm2
def test_the_eight_lines_print_what_the_readme_says() -> None:
    shown = BLOCKS[BLOCKS.index(("python", PYTHON[0])) + 1][1]
    assert len(PYTHON[0].split("\n\n")) == 2 and len([line for line in PYTHON[0].splitlines() if line]) <= 8
    text, figure = shown.splitlines()
    out = printed(PYTHON[0]).splitlines()
    assert out[0] == text and re.fullmatch(r"\d\.\d tokens per forward", figure)
    # depends on costs
    assert re.fullmatch(r"\d+\.\d tokens per forward", out[1]) and 1.5 <= float(out[1].split()[0]) <= 10


def test_every_acceptance_rule_is_explained() -> None:
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    for name in acceptance.RULES:
        assert f"`{name}" in page, name


def test_every_command_is_in_the_readme() -> None:
    names = {command.name or command.callback.__name__ for command in cli.app.registered_commands if not command.hidden}  # type: ignore[union-attr]
    names |= {str(group.name) for group in cli.app.registered_groups}
    assert len(names) > 5
    for name in names:
        assert f"`{name}`" in README or f"slipstream {name}" in README, name
