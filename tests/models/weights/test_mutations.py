"""Damaged GGUF files run, or are refused in one line; check_mutations.py tries as many as one wants."""

from __future__ import annotations

import pytest

from tests.models.weights.check_mutations import faults, readers_refusal, refusal
from tests.models.weights.test_gguf_architectures import has_kernels
from tests.support.gguf_mutations import MUTATIONS

pytestmark = [has_kernels, pytest.mark.usefixtures("own_cache")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["header", "tensors", "experts"])
def test_the_readers_refuse_damaged_files_in_one_line(kind: str) -> None:
    found, counted = faults(kind, 60, refusal=readers_refusal)
    assert found == [] and counted["refused"] > 12 and counted["runs"] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", MUTATIONS)
def test_damaged_files_run_or_are_refused_in_one_line(kind: str) -> None:
    found, counted = faults(kind, 9, seed=1, refusal=refusal)
    assert found == [] and sum(counted.values()) == 9
