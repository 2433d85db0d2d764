"""The dependencies of an installation: the commands can import what they need, and the library needs four packages."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.import_graph import FILES, imports, reaches

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CORE = ("torch", "transformers", "numpy", "safetensors")


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def names(requirements: list[str]) -> set[str]:
    return {normalized(Requirement(text).name) for text in requirements}


def with_requirements(packages: set[str]) -> set[str]:
    """These packages and all their installed requirements, without extras."""
    reached, waiting = set[str](), set(packages)
    while waiting:
        name = waiting.pop()
        reached.add(name)
        try:
            required = [Requirement(text) for text in requires(name) or []]
        except PackageNotFoundError:  # of another system
            continue
        waiting |= {normalized(r.name) for r in required if r.marker is None or r.marker.evaluate({"extra": ""})}
        waiting -= reached
    return reached


DECLARED = names(PROJECT["dependencies"])
MODULES = {module: {normalized(name) for name in owners} for module, owners in packages_distributions().items()}


@pytest.mark.slow
def test_every_imported_package_is_declared() -> None:
    optional = {name for extra in PROJECT["optional-dependencies"].values() for name in names(extra)}
    allowed = with_requirements(DECLARED) | optional
    imported = {module.split(".")[0] for name in FILES for module in imports(name)}
    undeclared = {module for module in imported & MODULES.keys() if not MODULES[module] & allowed}
    assert imported >= {"torch", "rich", "fastapi", "filelock"} and undeclared == set()


@pytest.mark.slow
def test_modules_import_no_extra_at_top_level() -> None:
    """Every import of the packages, except those in functions of a file that belongs to an extra."""
    optional = names([text for extra in PROJECT["optional-dependencies"].values() for text in extra]) - {
        "slipstream-lm"
    }
    above = {module.split(".")[0] for name in FILES for module in imports(name, top_level=True)}
    extra = {module for module in above & MODULES.keys() if MODULES[module] & (optional - with_requirements(DECLARED))}
    assert extra - {"ray"} == set()  # imported by files that only a cluster runs
    assert {"gguf", "accelerate", "prompt-toolkit", "llguidance", "fastapi", "uvicorn"} <= DECLARED


@pytest.mark.slow
def test_names_missing_from_the_oldest_transformers_are_not_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The names missing from the oldest allowed version were found by importing every module with it installed."""
    from transformers import cache_utils

    monkeypatch.delattr(cache_utils, "DummyLayer", raising=False)  # which came with 5.23
    users = [name for name in FILES if reaches(imports(name), "transformers.cache_utils")]
    modules = {name: runpy.run_path(str(FILES[name])) for name in users}
    attention = modules["slipstream.models.hf.supported_models"]["ATTENTION"]
    assert attention == (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)


@pytest.mark.slow
def test_the_library_works_with_its_four_core_packages_only(tmp_path: Path) -> None:
    blocked = with_requirements(DECLARED) - with_requirements(set(CORE))
    modules = sorted(module for module, owners in MODULES.items() if owners <= blocked)
    assert {"fastapi", "uvicorn", "gguf", "llguidance", "prompt_toolkit"} <= set(modules)
    script = f"""
import sys
sys.modules.update(dict.fromkeys({modules}))
import torch, transformers
import slipstream
assert slipstream.SpeculativeDecoder("toy").generate("A heron", slipstream.SamplingParams(max_tokens=4)).text
config = transformers.LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                                  num_attention_heads=2, num_key_value_heads=1)
transformers.LlamaForCausalLM(config).save_pretrained({str(tmp_path)!r})
settings = {{"drafter": "ngram", "num_draft_tokens": 2, "reproducible": False}}
with slipstream.SpeculativeDecoder({str(tmp_path)!r}, **settings) as decoder:
    print(len(decoder.generate([1, 2, 3], slipstream.SamplingParams(max_tokens=4, ignore_eos=True)).token_ids))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    process = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, encoding="utf-8", check=False
    )
    assert process.returncode == 0 and process.stdout == "4\n", process.stderr


def test_the_extra_all_names_extras_that_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = (Requirement(text) for text in extras["all"])
    assert everything.name == PROJECT["name"] and everything.extras <= extras.keys()
    assert everything.extras == extras.keys() - {"all", "dev", "docs", "examples", "llama", "ray"}
