"""The source as a graph of imports, and the number of code lines of each module."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from functools import cache
from pathlib import Path

import slipstream

SOURCE = Path(slipstream.__file__).parent
BLOCKS = (ast.stmt, ast.excepthandler, ast.match_case)  # what can hold statements


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


def statements(tree: ast.AST, *, top_level: bool, typing: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements; with `typing`, those under `if TYPE_CHECKING` too; with `top_level`, none in functions."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and not typing and _names(node.test, "TYPE_CHECKING"):
            yield from (s for branch in node.orelse for s in statements(branch, top_level=top_level))
        elif isinstance(node, BLOCKS) and not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from statements(node, top_level=top_level, typing=typing)


def _names(test: ast.expr, name: str) -> bool:
    return any(name in (getattr(node, "id", None), getattr(node, "attr", None)) for node in ast.walk(test))


@cache
def _tree(name: str) -> ast.Module:
    return ast.parse(FILES[name].read_text())


@cache
def imports(name: str, *, top_level: bool = False, typing: bool = False) -> frozenset[str]:
    """Modules that a module imports; `from package import module` counts as the module."""
    modules = set()
    for statement in statements(_tree(name), top_level=top_level, typing=typing):
        if isinstance(statement, ast.Import):
            modules |= {alias.name for alias in statement.names}
            continue
        assert statement.level == 0, f"{name}: a relative import"
        for alias in statement.names:
            submodule = f"{statement.module}.{alias.name}"
            modules.add(submodule if submodule in FILES else str(statement.module))
    return frozenset(modules)


def reaches(imported: AbstractSet[str], *forbidden: str) -> set[str]:
    """Those of `imported` that are one of the forbidden modules or lie inside one."""
    return {m for m in imported for f in forbidden if m == f or m.startswith(f + ".")}


def closure(names: set[str]) -> set[str]:
    """Everything that these modules import, directly or not, functions included, themselves included."""
    seen: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [m for m in imports(name) if name in FILES and m in FILES]
            seen |= {m for m in imports(name) if m not in FILES} if name in FILES else set()
    return seen


def code_lines(source: str) -> int:
    """Lines that hold code, without blank lines, comments and docstrings."""
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
