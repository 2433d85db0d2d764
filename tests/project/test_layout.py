"""The packages, the direction of imports between them, and (printed) the size of the core."""

from __future__ import annotations

import pytest

from tests.support.import_graph import FILES, SOURCE, closure, code_lines, imports, reaches

CORE = {name for name in FILES if name.startswith("slipstream.core")}
# in the order of imports: each package imports those before it, in functions and for types as well
PACKAGES = [
    *("version", "errors", "checks", "durable_files"),
    *("core", "tokenization", "constraints", "sampling", "text"),
    *("models", "reproducibility", "draft_length", "drafters"),
    *("config", "wiring", "jobs", "decoder"),
    *("certificate", "bench", "training", "integrations", "apps", "__main__"),
]


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    return {name: {m for m in imports(name, typing=True) if m in FILES} for name in FILES}


def test_the_root_package_has_only_public_modules() -> None:
    root = sorted(file.stem for file in SOURCE.glob("*.py"))
    print(f"modules at the root: {', '.join(root)}")
    assert root == ["__init__", "__main__", "checks", "config", "decoder", "durable_files", "errors", "version"]


def test_the_core_is_closed_under_imports() -> None:
    outside = {name.split(".")[0] for name in closure(CORE) - CORE if not name.startswith("slipstream")}
    ours = {name for name in closure(CORE) - CORE if name.startswith("slipstream")}
    lines = sum(code_lines(FILES[name].read_text()) for name in CORE | ours)
    print(f"core: {len(CORE)} files, {lines} lines of code with all they import of ours: {', '.join(sorted(ours))}")
    assert ours == {"slipstream.errors"}
    assert outside & {"torch", "numpy", "transformers", "safetensors", "rich", "typer"} == {"torch", "numpy"}


def test_packages_import_one_way(graph: dict[str, set[str]]) -> None:
    places = {"slipstream": len(PACKAGES), **{f"slipstream.{name}": i for i, name in enumerate(PACKAGES)}}

    def place(module: str) -> int:
        return places[".".join(module.split(".")[:2])]

    upwards = [f"{name} imports {other}" for name in FILES for other in graph[name] if place(other) > place(name)]
    assert upwards == []
    assert places.keys() == {".".join(name.split(".")[:2]) for name in FILES}


def test_imports_form_no_cycle(graph: dict[str, set[str]]) -> None:
    assert graph["slipstream.wiring.run_order"] >= {"slipstream.core.types"}  # the package is not empty
    finished: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path[path.index(name) :], name))
        if name not in finished:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            finished.add(name)

    for name in FILES:
        visit(name, ())


HF = (
    "slipstream.tokenization.hf_",  # tokenizers
    "slipstream.tokenization.file_tokenizer",
    "slipstream.models.weights",
    "slipstream.models.plain_models",
    "slipstream.models.quantized_models",
    "slipstream.models.decoder",
    "slipstream.models.heads",
    "slipstream.models.hf",
    "slipstream.integrations.transformers",
)


def test_transformers_is_imported_only_in_its_own_packages() -> None:
    elsewhere = {}
    for name in FILES:
        imported = reaches(imports(name), "transformers", "tokenizers", "gguf", "safetensors")
        allowed = name.startswith(HF) or (name.startswith("slipstream.bench") and imported == {"transformers"})
        if imported and not allowed:
            elsewhere[name] = imported
    assert len(FILES) > 100 and not elsewhere
