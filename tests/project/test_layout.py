"""Imports point one way. The arrows are read from the source, not from what happens to be loaded."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import slipstream

SOURCE = Path(slipstream.__file__).parent
CORE = (
    *("types", "history", "sampling", "acceptance", "memo", "reader", "feed", "session", "engine", "policy", "stats"),
    *("noise", "params"),
)
LIMIT = 250


def module_name(file: Path) -> str:
    parts = file.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(file): file for file in sorted(SOURCE.rglob("*.py"))}


def statements(tree: ast.AST, *, top_level: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements outside `if TYPE_CHECKING`; with top_level, those outside functions as well."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from (s for branch in node.orelse for s in statements(branch, top_level=top_level))
        elif not (top_level and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)):
            yield from statements(node, top_level=top_level)


def imports(name: str, *, top_level: bool = False, source: str | None = None) -> set[str]:
    """Modules that a module imports; `from package import module` counts as the module."""
    found = set()
    for statement in statements(ast.parse(source or FILES[name].read_text()), top_level=top_level):
        if isinstance(statement, ast.Import):
            found |= {alias.name for alias in statement.names}
            continue
        assert statement.level == 0, f"{name}: a relative import"
        for alias in statement.names:
            submodule = f"{statement.module}.{alias.name}"
            found.add(submodule if submodule in FILES else str(statement.module))
    return found


def reaches(imported: set[str], *forbidden: str) -> set[str]:
    """Those of `imported` that are one of the forbidden modules or lie inside one."""
    return {m for m in imported for f in forbidden if m == f or m.startswith(f + ".")}


@pytest.mark.parametrize("name", FILES)
def test_transformers_is_imported_in_backends_and_the_drop_in_only(name: str) -> None:
    if not name.startswith(("slipstream.models.loading", "slipstream.integrations.transformers")):
        assert not reaches(imports(name), "transformers", "tokenizers", "gguf", "safetensors")


LOWER = [f"slipstream.{name}" for name in (*CORE, "text")] + [n for n in FILES if n.startswith("slipstream.drafters")]


@pytest.mark.parametrize("name", LOWER)
def test_the_core_knows_no_face(name: str) -> None:
    faces = ("decoder", "cli", "config", "bench", "report", "chat", "compare", "prediction", "reference", "drop_in")
    assert {f"slipstream.{face}" for face in faces} <= FILES.keys()  # a face that is not there cannot be imported
    assert not reaches(imports(name), *(f"slipstream.{face}" for face in faces))
    assert "slipstream" not in imports(name)


FORBIDDEN = {
    "types": (
        "noise",
        "sampling",
        "acceptance",
        "session",
        "policy",
        "stats",
        "engine",
        "drafters",
        "backends",
        "text",
    ),
    "params": (
        "noise",
        "sampling",
        "acceptance",
        "session",
        "policy",
        "stats",
        "engine",
        "drafters",
        "backends",
        "text",
    ),
    "noise": ("types", "params", "sampling", "acceptance", "session", "policy", "stats", "engine", "drafters"),
    "sampling": ("acceptance", "session", "policy", "stats", "engine", "drafters", "backends", "text"),
    "acceptance": ("session", "engine", "policy", "stats", "drafters", "backends", "text"),
    "session": ("acceptance", "sampling", "engine", "policy", "stats", "drafters", "text"),
    "reader": ("acceptance", "sampling", "session", "engine", "policy", "stats", "drafters", "text"),
    "feed": (
        "acceptance",
        "sampling",
        "session",
        "reader",
        "engine",
        "policy",
        "stats",
        "drafters",
        "backends",
        "text",
    ),
    "ragged": ("acceptance", "sampling", "engine", "policy", "stats", "drafters", "text"),
    "policy": ("acceptance", "sampling", "session", "engine", "drafters", "backends", "text"),
    "stats": ("acceptance", "sampling", "session", "engine", "drafters", "backends", "text"),
    "text": ("acceptance", "sampling", "session", "engine", "drafters", "backends", "policy", "stats"),
    "engine": ("decoder", "text", "backends", "stats"),
    "backends": ("sampling", "acceptance", "session", "reader", "engine", "drafters", "policy", "stats", "decoder"),
    "drafters": ("acceptance", "engine", "policy", "stats", "backends", "text"),
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_arrows_point_down(name: str) -> None:
    prefix = f"slipstream.{name}"
    for module in (m for m in FILES if m == prefix or m.startswith(prefix + ".")):
        assert not reaches(imports(module), *(f"slipstream.{other}" for other in FORBIDDEN[name])), module


def test_no_module_imports_one_that_imports_it() -> None:
    graph = {name: {m for m in imports(name, top_level=True) if m in FILES} for name in FILES}
    assert graph["slipstream.decoder"] >= {"slipstream.core.loop", "slipstream.drafters"}  # the graph is not empty
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            finished.add(name)

    for name in FILES:
        visit(name, ())


@pytest.mark.parametrize("name", [f"slipstream.{name}" for name in CORE] + [n for n in FILES if ".drafters" in n])
def test_a_core_file_is_read_in_one_sitting(name: str) -> None:
    assert len(FILES[name].read_text().splitlines()) <= LIMIT


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import transformers.cache_utils", {"transformers.cache_utils"}),
        ("def f():\n    from transformers import Cache", {"transformers"}),
        ("from slipstream import decoder", {"slipstream.decoder"}),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import transformers", {"typing"}),
    ],
)
def test_the_reader_of_imports_sees_every_form(source: str, found: set[str]) -> None:
    assert imports("made up", source=source) == found
    assert bool(reaches(found, "transformers")) == any(name.startswith("transformers") for name in found)
