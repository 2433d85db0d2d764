"""What every test relies on: no network, and a single thread for small models."""

import gc
import logging
import os
import random
import signal
import sys

os.environ["HF_HUB_OFFLINE"] = "1"  # before transformers is imported anywhere
# before torch is imported anywhere: commands that tests start also compute with one thread
os.environ.setdefault("OMP_NUM_THREADS", "1")
# threads of large models wait without spinning, which would take cores from other tests
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
from tests.support.processes import PATIENCE

# PyTorch and the models are imported in functions, so that the process that distributes tests never loads them

OWN_CACHE = "SLIPSTREAM_TESTS_CACHE"
# variables that a command or a library sets at its first use, for good
SET_FOR_GOOD = {"TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS", "HF_HUB_VERBOSITY", "TORCHINDUCTOR_CACHE_DIR"}
USERS_CACHE = os.environ.get("SLIPSTREAM_MODELS")
FEW_TURNS = 3  # how often each forward of a small model is timed
MOST_POSITIONS = 64  # that the trials of forward shapes compare, where the trials themselves are tested

# the same examples in every run, however busy the machine is
settings.register_profile("steady", deadline=None, derandomize=True, database=None)
settings.load_profile("steady")


@pytest.fixture(scope="session", autouse=True)
def compiled_kernels() -> None:
    """Loads the kernels before any test has a cache folder of its own, where they would be compiled again."""
    from slipstream.models.cpu.kernel_libraries import block_kernels, kernels
    from slipstream.models.cpu.processor import NoKernelsError

    with suppress(NoKernelsError):
        block_kernels()
    kernels()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("SLIPSTREAM_MODELS", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _process_state() -> dict[str, Any]:
    """What a test could leave changed for those after it, in whatever order they run."""
    import torch

    handled = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGPIPE)
    return {
        "recursion limit": sys.getrecursionlimit(),
        "folder": os.getcwd(),
        **{name: value for name, value in os.environ.items() if name not in {*SET_FOR_GOOD, "PYTEST_CURRENT_TEST"}},
        **{number.name: signal.getsignal(number) for number in handled},
        "search path": list(sys.path),
        "default dtype": torch.get_default_dtype(),
        "precision of float32": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
    }


@pytest.fixture(autouse=True)
def unchanged_process() -> Iterator[None]:
    """Each test leaves the process as it found it."""
    before = _process_state()
    yield
    after = _process_state()
    changed = [name for name in before | after if before.get(name) != after.get(name)]
    assert not changed, f"the test leaves changed: {', '.join(changed)}"


@pytest.fixture(autouse=True)
def same_seeds(unchanged_process: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds that a test leaves open are the same in every run, whatever runs before it.

    unchanged_process: looks at the process again after everything else is undone.
    """
    monkeypatch.setattr("secrets.randbits", random.Random(request.node.nodeid).getrandbits)


@pytest.fixture(autouse=True)
def one_thread(request: pytest.FixtureRequest) -> Iterator[None]:
    """Small models run fastest on one thread; large models use every core."""
    import torch

    torch.set_num_threads(1 if request.node.get_closest_marker("models") is None else os.cpu_count() or 1)
    yield
    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run every case, with whole products of parameters")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect what only an exhaustive run has, after `-k` and `-m` have been applied."""
    if not config.getoption("exhaustive"):
        without = set(left_out(items))
        config.hook.pytest_deselected(items=[item for item in items if item in without])
        items[:] = [item for item in items if item not in without]


def pytest_configure(config: pytest.Config) -> None:
    """Create the cache folder that all processes of this run share, so that each model is calibrated once.

    The garbage collector is off until the first test: traversing all imported modules took a fifth of the start-up.
    """
    gc.disable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which shells ignore in programs of the background
    if OWN_CACHE in os.environ:
        return  # the process that started this one made it
    folder, kernels = Path(tempfile.mkdtemp(prefix="slipstream-tests-")), cache_folder() / "kernels"
    os.environ[OWN_CACHE] = str(folder)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    with suppress(OSError):  # without the link, kernels are compiled once more
        kernels.mkdir(parents=True, exist_ok=True)
        (folder / "kernels").symlink_to(kernels, target_is_directory=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Exclude imported libraries and tests from garbage collection: they live until the end."""
    gc.collect()
    gc.freeze()
    gc.enable()


@cache
def remembered_draft_times() -> Any:
    """The library's own function, even while a test has replaced it."""
    from slipstream.wiring import model_pair

    return model_pair.remembered_draft_times


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose the cache folder, and what is known of the times of draft models, before any fixture runs.

    Calibrations of small models stay out of the user's cache; real models are looked up there. The times of a tiny
    draft model are noise, so drafting is decided as if they were unknown. Its forwards are timed less often than those
    of real models, as no test depends on these times, and trials of shapes compare fewer positions.
    """
    from slipstream.constraints import grammar_trial
    from slipstream.reproducibility import calibration, calibration_cache, shape_trials
    from slipstream.reproducibility.timing import MOST_TURNS, DraftTimes
    from slipstream.wiring import model_pair

    marks = {mark.name for mark in item.iter_markers()}
    os.environ.pop("SLIPSTREAM_MODELS", None)
    if marks.isdisjoint(("models", "smollm2")):
        os.environ["SLIPSTREAM_MODELS"] = os.environ[OWN_CACHE]
    elif USERS_CACHE is not None:
        os.environ["SLIPSTREAM_MODELS"] = USERS_CACHE
    real = not marks.isdisjoint(("models", "smollm2", "draft_times"))
    remembered = remembered_draft_times()  # cached before it is replaced below
    calibration.MOST_TURNS = MOST_TURNS if real else FEW_TURNS
    calibration_cache.UNDISTURBED = 0.0  # what is measured next to other programs is not measured again
    grammar_trial.WALL_SECONDS = PATIENCE  # trials are ended by their processor time, however busy the machine is
    is_trial_tested = real or "reproducibility" in item.path.parts
    shape_trials.LONGEST = MOST_POSITIONS if is_trial_tested else shape_trials.LENGTH
    model_pair.remembered_draft_times = remembered if real else lambda *arguments: DraftTimes()


@pytest.fixture(scope="module")  # while it runs, no other test of this process can run an event loop
def browser() -> Iterator[Any]:
    from tests.support.page_browser import running_browser

    with running_browser() as chromium:
        yield chromium


@pytest.fixture
def opened(browser: Any) -> Iterator[Any]:
    """Opens pages, see `Opened`."""
    from tests.support.page_browser import Opened

    pages = Opened(browser)
    yield pages
    pages.close()
    assert pages.problems == []


@pytest.fixture(autouse=True)
def quiet_log() -> Iterator[None]:
    """Restore the log level, which a command run within a test changes."""
    logger = logging.getLogger("slipstream")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture
def cache_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sessions compare the ids their slots hold with committed tokens at every use."""
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")
