"""Chooses the forward shapes of a decoder: calibrated once per machine, model and precision, then cached."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from rich.progress import TaskProgressColumn

from slipstream.core.kv_slots import EXACT_FIT, Shapes
from slipstream.errors import UsageError, os_reason
from slipstream.models.cache_folder import cache_folder, read_measured, save_measured
from slipstream.models.cpu.processor import processor
from slipstream.models.exclusive_use import autocast_types
from slipstream.models.layouts import UnpaddedForwards
from slipstream.models.loaded import Loaded
from slipstream.models.notices import TimeLeft, announce, progress_bar, warn_slower
from slipstream.reproducibility.calibration import Calibration, calibrate
from slipstream.reproducibility.expert_reads import ExpertReads
from slipstream.reproducibility.timing import UNDISTURBED, DraftTimes, ProcessorShare, processors_are_free

if TYPE_CHECKING:
    from slipstream.models.heads.head_check import HeadAgreement

log = logging.getLogger("slipstream")

Timed = TypeVar("Timed", Calibration, DraftTimes)

FOLDER = "calibration"  # in the cache folder
VERSION = 27  # of what calibration tries; what an earlier one found is not used
WHOLE_PROMPT = 1 << 20  # tokens of a chunk that is never full
# environment variables by which libraries choose kernels; those of threads are seen in PyTorch's number of threads
SETTINGS = ("ATEN_", "DNNL_", "ONEDNN_", "MKL_", "OPENBLAS_", "CUBLAS_", "CUBLASLT_", "CUDNN_", "NVIDIA_", "TORCH_")
THREAD_SETTINGS = ("MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "TORCH_NUM_THREADS")
# settings in a model's configuration that change no number
NAMES = ("_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "use_cache")
AFFORDABLE = 0.25  # "auto" keeps to agreeing shapes if a plain step takes at most this share longer


def choose_shapes(loaded: Loaded, reproducible: bool | str, max_batch_size: int) -> tuple[Shapes, Calibration | None]:
    """The forward shapes to use, given the `reproducible` setting and what agrees on this machine."""
    if isinstance(loaded.backend, UnpaddedForwards):
        return _shapes_on_own_cache(loaded.name, loaded.backend, reproducible), None
    if reproducible is False:
        return EXACT_FIT, None
    calibration = remembered(loaded, max_batch_size)
    if not calibration.agrees:
        if reproducible is True:
            raise UsageError(
                f"reproducible=True, but no forward shapes agree to the bit for {loaded.name!r} "
                f"{_here(loaded)}; allowed: 'auto' or False{_OR_FEWER_THREADS if _many_threads(loaded) else ''}"
            )
        log.info("no forward shapes agree to the bit %s: outputs may differ at near-ties", _here(loaded))
        return EXACT_FIT, calibration
    if reproducible == "auto" and calibration.cost > AFFORDABLE:
        log.info(
            "outputs may differ from plain decoding's at near-ties; reproducible=True prevents that, "
            "and takes %.1f times as long",
            1 + calibration.cost,
        )
        return EXACT_FIT, calibration
    return calibration.shapes, calibration


_OR_FEWER_THREADS = ", or torch.set_num_threads(2): PyTorch's operators may round at the ends of uneven shares"


def _many_threads(loaded: Loaded) -> bool:
    return loaded.backend.device.type == "cpu" and torch.get_num_threads() > 2


def _here(loaded: Loaded) -> str:
    return f"here with {torch.get_num_threads()} threads" if _many_threads(loaded) else "here"


def _shapes_on_own_cache(name: str, backend: UnpaddedForwards, reproducible: bool | str) -> Shapes:
    """The shapes of a model with its own cache: drafts are read at once if that is right and rounds alike."""
    if reproducible is True:
        raise UsageError(
            f"reproducible=True, but {name!r} runs on its own cache, where no forward shapes agree; "
            "allowed: 'auto' or False"
        )
    if not backend.takes_several_tokens:
        return replace(EXACT_FIT, token_by_token=True, chunk=WHOLE_PROMPT)
    if backend.rounds_like_one_token or reproducible is False:
        return EXACT_FIT
    warn_slower(
        f"{name} verifies drafts token by token, to keep its outputs: in half precision its forward over several "
        "tokens rounds differently; dtype='float32' or reproducible=False verifies them at once"
    )
    return replace(EXACT_FIT, token_by_token=True)


def remembered(loaded: Loaded, max_batch_size: int) -> Calibration:
    """The calibration of this machine, model and precision: cached, or measured and then saved.

    It is not saved if no shapes agree for a model in memory.
    """
    description = f"measuring how {loaded.name!r} runs here (once)"

    def measure() -> Calibration:
        columns = TaskProgressColumn(), TimeLeft()
        # without a total the bar moves before the first report
        with progress_bar(description, f"{description} ...", *columns, total=None) as bar:
            task = bar.task_ids[0]
            return calibrate(loaded.backend, max_batch_size, lambda share: bar.update(task, total=1.0, completed=share))

    identity = f"{_identity(loaded)} batches to {max_batch_size}"
    # weights in memory have no name: others of the same sizes may be sound
    return _timed_once(loaded, identity, measure, _calibration, lambda timed: timed.agrees or bool(loaded.source))


def remembered_draft_times(draft: Loaded, measure: Callable[[], DraftTimes], max_batch_size: int) -> DraftTimes:
    """Times of a draft model's steps: cached, or measured and then saved."""
    scored = draft.backend.vocab_size if draft.restricted is None else draft.restricted.num_first
    identity = f"drafts {_identity(draft)} scores {scored} batches to {max_batch_size}"
    return _timed_once(draft, identity, measure, lambda values: DraftTimes(_times(values["steps"]), values["token"]))


def _timed_once(
    loaded: Loaded,
    identity: str,
    measure: Callable[[], Timed],
    parse: Callable[[dict[str, Any]], Timed],
    worth_saving: Callable[[Timed], bool] = lambda timed: True,
) -> Timed:
    """Return what is saved under this identity, or measure and save it.

    What was measured next to other programs is measured again, once, at a start when the processors are free.
    """
    saved = read_measured(FOLDER, identity, lambda values: (parse(values["timed"]), float(values["share"])))
    if saved is not None:
        timed, share = saved
        if share >= UNDISTURBED or not processors_are_free():
            return timed
        announce(f"{loaded.name!r} was measured while other programs were running: measuring it again ...")
    clock = ProcessorShare()
    timed = measure()
    # not a third time: a slow disk also keeps this thread waiting, at every start
    share = clock.share if saved is None and loaded.backend.device.type == "cpu" else 1.0
    if worth_saving(timed):
        _save(identity, {"timed": asdict(timed), "share": share})
    return timed


def remembered_agreement(draft: Loaded, target: Loaded) -> HeadAgreement | None:
    """Agreement of a draft head with its target: cached, or measured and then saved."""
    from slipstream.models.heads.head_check import HeadAgreement, agreement  # transformers takes seconds

    if not target.source:  # models in memory, whose weights have no name
        return agreement(draft, target)
    identity = f"{draft.fingerprint} of {target.source} {_identity(target)}"
    cached = read_measured(
        FOLDER,
        identity,
        lambda values: HeadAgreement(**values),
    )
    if cached is None and (cached := agreement(draft, target)) is not None:
        _save(identity, asdict(cached))
    return cached


def _identity(loaded: Loaded) -> str:
    """Everything that decides how forwards round and how long they take: machine, libraries, settings, model."""
    flags = sorted(processor().flags)
    names = [name for name in sorted(os.environ) if name.startswith(SETTINGS) and name not in THREAD_SETTINGS]
    settings = {name: os.environ[name] for name in names}
    mkldnn: Any = torch.backends.mkldnn
    machine = [
        f"{platform.machine()} {processor().model_name} flags {_digest(flags)}",
        f"torch {torch.__version__} {torch.backends.cpu.get_cpu_capability()} threads {torch.get_num_threads()}",
        f"transformers {_installed('transformers')} float32 products {torch.get_float32_matmul_precision()}",
        f"oneDNN {mkldnn.is_available() and mkldnn.enabled} settings {_digest(settings)}",
    ]
    if loaded.backend.device.type == "cuda":
        machine.append(f"{torch.cuda.get_device_name(loaded.backend.device)} {_cuda_libraries()}")
    if types := autocast_types():
        machine.append(f"autocast {types}")
    return f"v{VERSION} {' '.join(machine)} {loaded.fingerprint} configuration {_digest(_configuration(loaded.model))}"


def _cuda_libraries() -> str:
    """Versions of CUDA's libraries, and which of their kernels are allowed."""
    backends: Any = torch.backends  # partly without types
    cuda, matmul = backends.cuda, backends.cuda.matmul
    allowed = [
        matmul.allow_tf32,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
        *(cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()),
        torch.are_deterministic_algorithms_enabled(),
    ]
    versions = f"CUDA {torch.version.cuda} cuDNN {backends.cudnn.version()} Triton {_installed('triton')}"
    return f"{versions} {_digest(allowed)}"


def _configuration(model: Any) -> dict[str, Any]:
    """A model's configuration without the settings that change no number."""
    config = getattr(model, "config", None)
    if config is None:
        return {}
    values: dict[str, Any] = config.get_text_config(decoder=True).to_dict()
    return {name: value for name, value in values.items() if name not in NAMES and not name.endswith("token_id")}


@cache  # reading it takes a millisecond
def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _calibration(values: dict[str, Any]) -> Calibration:
    sizes = {name: tuple(values[name]) for name in ("widths", "together", "attended_lengths")}
    times = {name: _times(values[name]) for name in ("milliseconds", "totals")}
    experts = None if values["experts"] is None else ExpertReads(**values["experts"])
    return Calibration(**{**values, **sizes, **times, "experts": experts})


def _times(values: dict[str, float]) -> dict[int, float]:
    """Times by size; the keys of JSON are texts."""
    return {int(size): ms for size, ms in values.items()}


def _save(identity: str, values: dict[str, Any]) -> None:
    """Save a measurement; a cache folder that cannot be written is no reason to stop."""
    try:
        save_measured(FOLDER, identity, values)
    except OSError as error:
        log.warning(
            "the calibration is not saved and will be measured at every start: %s: %s; "
            "set SLIPSTREAM_MODELS to a folder that can be written",
            cache_folder() / FOLDER,
            os_reason(error),
        )
