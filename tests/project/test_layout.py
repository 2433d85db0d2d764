"""The house: which packages there are, that imports point one way, and how much there is to read."""

from __future__ import annotations

import pytest
from house import FILES, SOURCE, closure, code_lines, imports, longest_chain, reaches

CORE = {name for name in FILES if name.startswith("slipstream.core")}
EVERYTHING = {name.split(".")[1] for name in FILES if name.count(".")}
# what each package may import of the others, functions included
MAY_IMPORT = {
    "errors": set[str](),
    "checks": {"errors"},
    "version": set[str](),
    "core": {"errors"},
    "draft_length": {"core", "drafters", "errors"},
    "drafters": {"checks", "core", "draft_length", "errors", "models"},
    "predicted_outputs": {"core", "draft_length", "drafters", "errors"},
    "config": {"checks", "core", "draft_length", "drafters", "errors"},
    "constraints": {"checks", "core", "errors", "models"},
    "sampling": {"checks", "constraints", "core", "errors"},
    "text": {"constraints", "core", "errors", "models", "sampling"},
    "models": {"core", "config", "errors", "text", "reproducibility"},
    "reproducibility": {"core", "errors", "models"},
    "wiring": EVERYTHING - {"apps", "bench", "certificate", "integrations", "decoder", "jobs"},
    "jobs": {"config", "constraints", "core", "errors", "models", "sampling", "text", "wiring"},
    "decoder": EVERYTHING - {"apps", "bench", "certificate", "integrations"},
    "certificate": EVERYTHING - {"apps", "integrations"},
    "bench": EVERYTHING - {"apps", "integrations"},
    "integrations": EVERYTHING - {"apps"},
    "apps": EVERYTHING,
}


def test_the_root_holds_the_public_face_only() -> None:
    root = sorted(file.stem for file in SOURCE.glob("*.py"))
    print(f"modules at the root: {', '.join(root)}")
    assert root == ["__init__", "checks", "config", "decoder", "errors", "version"]


def test_the_core_is_closed_under_imports_and_read_in_one_sitting() -> None:
    outside = {name.split(".")[0] for name in closure(CORE) - CORE if not name.startswith("slipstream")}
    ours = {name for name in closure(CORE) - CORE if name.startswith("slipstream")}
    lines = sum(code_lines(FILES[name].read_text()) for name in CORE | ours)
    print(f"core: {len(CORE)} files, {lines} lines of code with all they import of ours: {', '.join(sorted(ours))}")
    assert ours == {"slipstream.errors"}
    assert outside & {"torch", "numpy", "transformers", "safetensors", "rich", "typer"} == {"torch", "numpy"}
    assert lines < 1500


def test_a_round_imports_through_few_floors() -> None:
    chain = longest_chain("slipstream.core.scheduler")
    print(f"longest import chain of a round: {len(chain)}: {' -> '.join(chain)}")
    assert set(chain) <= CORE | {"slipstream.errors"} and len(chain) <= 12


@pytest.mark.parametrize("package", sorted(EVERYTHING))
def test_imports_point_one_way(package: str) -> None:
    assert package in MAY_IMPORT, f"{package} has no place in the house yet"
    allowed = {f"slipstream.{name}" for name in MAY_IMPORT[package] | {package}}
    for name in FILES:
        if name == f"slipstream.{package}" or name.startswith(f"slipstream.{package}."):
            ours = {m for m in imports(name) if m.startswith("slipstream.")}
            assert reaches(ours, *allowed) == ours, f"{name}: {sorted(ours - reaches(ours, *allowed))}"


def test_no_module_imports_one_that_imports_it() -> None:
    graph = {name: {m for m in imports(name, top_level=True) if m in FILES} for name in FILES}
    assert graph["slipstream.decoder"] >= {"slipstream.core.scheduler", "slipstream.drafters"}  # the graph is not empty
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            finished.add(name)

    for name in FILES:
        visit(name, ())


HF = ("slipstream.models.hf", "slipstream.integrations.transformers")


def test_transformers_is_imported_in_its_own_packages_only() -> None:
    elsewhere = {}
    for name in FILES:
        imported = reaches(imports(name), "transformers", "tokenizers", "gguf", "safetensors")
        allowed = name.startswith(HF) or (name.startswith("slipstream.bench") and imported == {"transformers"})
        if imported and not allowed:
            elsewhere[name] = imported
    assert len(FILES) > 100 and not elsewhere


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
