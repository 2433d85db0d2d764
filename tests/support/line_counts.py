"""Prints the lines of Python of the source and of the tests, package by package: `make lines`."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def lines_of(folder: Path) -> int:
    """How many lines of Python are in a folder."""
    return sum(len(file.read_text(encoding="utf-8").splitlines()) for file in folder.rglob("*.py"))


def table() -> list[tuple[str, int, int]]:
    """The packages with their lines of source and of tests; what lies at the root comes last."""
    source, tests = ROOT / "src" / "slipstream", ROOT / "tests"
    folders = {path.name for root in (source, tests) for path in root.iterdir() if path.is_dir()} - {"__pycache__"}
    rows = [(name, lines_of(source / name), lines_of(tests / name)) for name in sorted(folders)]
    rest = [lines_of(root) - sum(row[column] for row in rows) for column, root in ((1, source), (2, tests))]
    return [*rows, ("(root)", rest[0], rest[1])]


def main() -> None:
    rows = table()
    for name, source, tests in [*rows, ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))]:
        print(f"{name:<20}{source:>8,}{tests:>8,}")


if __name__ == "__main__":
    main()
