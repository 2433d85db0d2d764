"""What every test relies on: no network, and one thread for small models."""

import gc
import logging
import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere
# before torch is: processes, threads and commands that tests start compute with one thread too, beside other tests
os.environ.setdefault("OMP_NUM_THREADS", "1")
# the threads of large models wait without spinning: spinning beside other tests takes their cores for nothing
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from slipstream.models.cache_folder import cache_folder
from tests.support.markers import left_out

# PyTorch and the models are imported where they are used: the process that hands out tests waits for neither

OWN_CACHE = "SLIPSTREAM_TESTS_CACHE"
USERS_CACHE = os.environ.get("SLIPSTREAM_MODELS")
FEW_TURNS = 3  # in which each forward of a small model is timed

# the same examples in every run, however busy the machine is
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Threads only get in each other's way on small models; the large ones take every core."""
    import torch

    torch.set_num_threads(1 if request.node.get_closest_marker("models") is None else os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run whole products of parameters, and all other cases")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only an exhaustive run has; after `-k` and `-m` have chosen."""
    if not config.getoption("exhaustive"):
        without = set(left_out(items))
        config.hook.pytest_deselected(items=[item for item in items if item in without])
        items[:] = [item for item in items if item not in without]


def pytest_configure(config: pytest.Config) -> None:
    """Make the cache folder of this run, for all its processes: each model is calibrated once.

    Until the first test nothing is collected: looking through all that is imported took a fifth of the time to there.
    """
    gc.disable()
    if OWN_CACHE in os.environ:
        return  # the process that started this one made it
    folder, kernels = Path(tempfile.mkdtemp(prefix="slipstream-tests-")), cache_folder() / "kernels"
    os.environ[OWN_CACHE] = str(folder)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    with suppress(OSError):  # then kernels are compiled once more
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(kernels, target_is_directory=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Leave libraries, tests and what else there is by now out of garbage collections: it stays to the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


@cache
def remembered_draft_times() -> Any:
    """The library's own function, whatever stands for it while a test runs."""
    from slipstream.wiring import model_pair

    return model_pair.remembered_draft_times


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture: the cache folder, and what is known of the times of draft models.

    Calibrations of small models are not left in the user's cache; real models are looked for there. What a tiny draft
    model takes is as much as its target, or luck: drafting is decided as if it were not known. Their forwards are timed
    less often than those of real models, as no test depends on these times.
    """
    from slipstream.reproducibility import calibration
    from slipstream.reproducibility.timing import MOST_TURNS, DraftTimes
    from slipstream.wiring import model_pair

    marks = {mark.name for mark in item.iter_markers()}
    os.environ.pop("SLIPSTREAM_MODELS", None)
    if marks.isdisjoint(("models", "smollm2")):
        os.environ["SLIPSTREAM_MODELS"] = os.environ[OWN_CACHE]
    elif USERS_CACHE is not None:
        os.environ["SLIPSTREAM_MODELS"] = USERS_CACHE
    real = not marks.isdisjoint(("models", "smollm2", "draft_times"))
    remembered = remembered_draft_times()  # asked for before it is replaced
    calibration.MOST_TURNS = MOST_TURNS if real else FEW_TURNS
    model_pair.remembered_draft_times = remembered if real else lambda *given: DraftTimes()


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
