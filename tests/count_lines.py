"""Count the lines of the core: code without blank lines, comments and docstrings, and all lines."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "slipstream"
CORE = [
    "types.py",
    "noise.py",
    "sampling.py",
    "acceptance.py",
    "memo.py",
    "reader.py",
    "feed.py",
    "session.py",
    "engine.py",
    "policy.py",
    "stats.py",
    *(f"drafters/{name}.py" for name in ("__init__", "none", "ngram", "model")),
    *(f"backends/{name}.py" for name in ("__init__", "toy", "slots", "hf")),
]
REQUEST_OPTIONS = ["params.py", "history.py", "truncation.py"]  # penalties, filters and the like
FURTHER_DRAFTERS = [
    "drafters/table.py",
    "drafters/suffix.py",
    "drafters/hybrid.py",
    "drafters/recycle.py",
    "drafters/lookup.py",
    "drafters/exit.py",
    "shallow.py",
    "backends/shallow.py",
    "backends/twin.py",
    "suffix_automaton.py",
    "suffix_kinds.py",
    "suffix_store.py",
]
CONTROL = ["odds.py", "pace.py", "prospects.py", "control.py", "stopping.py"]  # how far to draft
_FAST = (
    "shortcuts",
    "packed",
    "fused",
    "grouped",
    "lean",
    "pieces",
    "ragged",
    "quantised",
    "native",
    "native_parts",
    "compressed",
    "rounded",
    "graphs",
    "aimed",
    "graphed",
)
FAST_PATHS = ["ragged.py", *(f"backends/{name}.py" for name in _FAST)]  # each has its specification in plain PyTorch


def code_lines(source: str) -> int:
    """Lines that hold code."""
    skipped = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in skipped:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False):
            docstring = node.body[0]
            lines -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return len(lines)


def main() -> None:
    """Print the table."""
    parts = {"core": CORE, "control": CONTROL, "request options": REQUEST_OPTIONS}
    parts |= {"further drafters": FURTHER_DRAFTERS, "fast paths": FAST_PATHS}
    for title, names in parts.items():
        total = written = 0
        for name in names:
            source = (SOURCE / name).read_text()
            code, everything = code_lines(source), source.count("\n")
            total, written = total + code, written + everything
            print(f"{name:24} {code:5} code {everything:5} with comments, docstrings and blank lines")
        print(f"{title:24} {total:5} code {written:5}")


if __name__ == "__main__":
    main()
