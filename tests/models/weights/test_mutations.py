"""Damaged GGUF files run, or are refused in one line; check_mutations.py tries as many as one wants."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.models.cpu.kernel_libraries import block_kernels, kernels
from tests.models.weights.check_mutations import faults, readers_refusal, refusal
from tests.models.weights.test_gguf_architectures import has_kernels
from tests.support.gguf_mutations import MUTATIONS

pytestmark = has_kernels


@pytest.fixture(autouse=True, scope="module")
def _compiled_before_the_cache_is_another() -> None:
    block_kernels()
    kernels()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["header", "tensors", "experts"])
def test_the_readers_refuse_damaged_files_in_one_line(kind: str) -> None:
    found, counted = faults(kind, 150, refusal=readers_refusal)
    assert found == [] and counted["refused"] > 20 and counted["runs"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MUTATIONS)
def test_damaged_files_run_or_are_refused_in_one_line(kind: str) -> None:
    found, counted = faults(kind, 100, seed=1, refusal=refusal)
    assert found == [] and sum(counted.values()) == 100
