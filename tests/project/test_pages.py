"""Files, names and commands that the documentation mentions exist."""

import re
from pathlib import Path

from tests.support.markers import subcases

ROOT = Path(__file__).parents[2]
AREAS = ("src", "docs", "examples", "benchmarks", "tests", "packaging")

NAMED = re.compile(
    r"`((?:\w+/)*\w+\.(?:py|c|h|json|jsonl))`|\b((?:benchmarks|examples|tests)/[\w/]+\.(?:py|json|jsonl))"
)
MADE = {"runs.jsonl", "slipstream.json", "tune.json", "vllm.json", "mine.py"}  # by commands or readers


@subcases("page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")]), ids=lambda p: p.stem)
def test_files_named_on_a_page_exist(page: Path) -> None:
    files = [str(path.relative_to(ROOT)) for area in AREAS for path in (ROOT / area).rglob("*")]
    named = {in_code or in_text for in_code, in_text in NAMED.findall(page.read_text())} - MADE
    assert [name for name in sorted(named) if not any(f"/{path}".endswith(f"/{name}") for path in files)] == []
