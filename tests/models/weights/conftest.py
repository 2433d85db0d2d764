"""A cache folder of its own for a test, with kernels that are compiled already."""

from __future__ import annotations

from pathlib import Path

import pytest

from slipstream.models.cpu.kernel_libraries import block_kernels, kernels


@pytest.fixture(scope="session")
def compiled_kernels() -> None:
    """Kernels in this process, from the usual cache folder."""
    block_kernels()
    kernels()


@pytest.fixture
def own_cache(compiled_kernels: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache folder."""
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
