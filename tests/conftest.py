"""What every test relies on: no network, and one thread for small models."""

import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere
# before torch is: processes, threads and commands that tests start compute with one thread too, beside other tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
# the threads of large models wait without spinning: spinning beside other tests takes their cores for nothing
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from slipstream.models.cache_folder import cache_folder
from slipstream.reproducibility.draft_times import DraftTimes


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads only get in each other's way on small models; the large ones take every core."""
    torch.set_num_threads(1 if request.node.get_closest_marker("models") is None else os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def models_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of all processes of a run, so that each model is calibrated once; kernels are the user's, compiled once."""
    own, kernels = tmp_path_factory.getbasetemp(), cache_folder() / "kernels"
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "models"
    folder.mkdir(exist_ok=True)
    with suppress(OSError):  # another process was first, or the folder cannot be written
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(kernels, target_is_directory=True)
    return str(folder)


@pytest.fixture(autouse=True)
def own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, models_folder: str) -> None:
    """Calibrations of small models are not left in the user's cache; real models are looked for there."""
    if all(request.node.get_closest_marker(name) is None for name in ("models", "smollm2")):
        monkeypatch.setenv("SLIPSTREAM_MODELS", models_folder)


@pytest.fixture(autouse=True)
def no_draft_times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tiny draft model takes is as much as its target, or luck: drafting is decided as if it were not known."""
    real = any(request.node.get_closest_marker(name) for name in ("models", "smollm2", "draft_times"))
    if not real:
        monkeypatch.setattr("slipstream.wiring.model_pair.remembered_draft_times", lambda *given: DraftTimes())


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """The command line, run within a test, sets what the library logs; the next test must not see it."""
    logger = logging.getLogger("slipstream")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def cache_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions compare the ids their slots hold with committed tokens at every use."""
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")
