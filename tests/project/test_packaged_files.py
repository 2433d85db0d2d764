"""Every file that the code reads at run time is part of an installed package."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "slipstream"


def patterns() -> list[str]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(settings["tool"]["setuptools"]["package-data"]["slipstream"])


def left_out(patterns_kept: list[str]) -> list[str]:
    """Files of the package, other than Python files, that no pattern includes."""
    named = {path for pattern in patterns_kept for path in PACKAGE.glob(pattern)}
    files = (path for path in PACKAGE.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc"))
    return sorted(str(path.relative_to(PACKAGE)) for path in files if path not in named)


def test_all_files_are_packaged() -> None:
    assert left_out(patterns()) == []
