"""Trials of faster forwards: a change stays only if the model gives its own logits, at several positions.

A trial compares the logits, or each layer's output, with those of the model's own forward. Models are tried when they
are loaded, which takes a second for a billion weights. Passed trials are saved on this machine, so another process need
not repeat them for the same files and software versions. A failed trial is repeated at every load.
"""

from __future__ import annotations

import hashlib
import math
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import slipstream.models
from slipstream.checks import expanded
from slipstream.core.interfaces import Backend
from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import read_measured, save_measured
from slipstream.models.cpu.block_experts import RecordedChoices, experts_of, same_choices
from slipstream.models.cpu.processor import processor
from slipstream.models.cpu.quantized_linear import arithmetic_of, rounded_activations
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.thresholds import longest_text, thresholds
from slipstream.models.loaded import LoadOptions

START = 6  # tokens in the first of a trial's two forwards
TOKENS = 9  # in both forwards
CLOSE = 1e-3  # largest `difference` of a faster forward in float32
ROUNDINGS = 2.5  # likewise in half precision, in units in the last place: 0.02 for bfloat16
ROUNDED = {"int8": 0.1, "int15": 0.01}  # likewise with rounded activations, some of which may round the other way
RULED_OUT = -1e30  # models give forbidden tokens -inf, or the lowest number of their type
PARTS, PART_BYTES = 16, 1024  # samples that identify a file: number, and size in bytes


class Trial:
    """Runs in place of a layer's forward: returns the result of `expected`, and notes how much that of `tried` differs.

    Both use the same experts, since the last bit decides between experts with nearly equal scores.
    """

    def __init__(self, layer: nn.Module, expected: Callable[..., Any], tried: Callable[..., Tensor]) -> None:
        self.layer, self._expected, self._tried, self._experts = layer, expected, tried, experts_of(layer)
        self.error = 0.0  # see `difference`

    def __call__(self, hidden: Tensor, *inputs: Any, **options: Any) -> Any:
        expected = self._expected(hidden, *inputs, **options)
        with same_choices(self._experts):
            computed = self._tried(hidden, *inputs, **options)
        error = difference(computed, expected, hidden) if isinstance(expected, Tensor) else math.inf
        self.error = max(self.error, error)
        return expected


def difference(computed: Tensor, expected: Tensor, start: Tensor | None = None) -> float:
    """The RMS of the error of numbers [..., N], divided by the RMS variation of the expected numbers.

    start: the input to which a layer added. Then the error is relative to the layer's addition or, if the sum is so
    large that its rounding dominates, to the sum. Infinite if anything is NaN or infinite.
    """
    computed, expected = computed.float(), expected.float()
    if start is None:
        varies = _rms(expected - expected.mean(-1, keepdim=True))
    else:
        varies = max(_rms(expected - start.float()), _rms(expected) / ROUNDINGS)
    error = _rms(computed - expected)
    if not math.isfinite(error) or not math.isfinite(varies):
        return math.inf
    if not varies:
        return math.inf if error else 0.0
    return error / varies


def _rms(numbers: Tensor) -> float:
    return float(numbers.square().mean().sqrt())


class OwnLogits:
    """The logits of a few tokens from the model's own forward, which every faster forward must reproduce.

    They are computed before the first change is tried. passed: changes that passed in an earlier process. Later
    forwards repeat the experts that routers chose here, since a change's rounding might choose others.
    """

    def __init__(self, backend: HFBackend, passed: PassedTrials | None = None) -> None:
        self._backend, self.passed = backend, passed or PassedTrials()
        self._choices = RecordedChoices(backend.model)

    @cached_property
    def logits(self) -> tuple[Tensor, Tensor]:
        """The results of `a_few_logits` and `later_logits`."""
        with self._choices.run():
            first = a_few_logits(self._backend)
            check_logits(first)
            return first, later_logits(self._backend)

    def same_experts(self) -> AbstractContextManager[None]:
        """Inside the block, forwards of these tokens, in this order, use the experts of the model's own forward."""
        _ = self.logits
        return self._choices.run()

    def keep_if_same(self, name: str, change: Callable[[], None]) -> bool:
        """Apply a change of the forward, and undo it if the logits are no longer the model's own; returns whether it
        stays.

        name: of the trial, in `passed`.
        """
        if name in self.passed:
            change()
            return True
        _ = self.logits
        change()
        if self.error() > tolerance(self._backend.model):
            return False
        self.passed.add(name)
        return True

    def error(self) -> float:
        """The largest `difference` of the current logits from the model's own."""
        with self.same_experts():
            computed = a_few_logits(self._backend), later_logits(self._backend)
        return max(difference(*pair) for pair in zip(computed, self.logits, strict=True))


def largest_error(backend: Backend, trials: Sequence[Trial]) -> float:
    """The largest difference of any layer's outputs in a few forwards of the backend."""
    with forwards_replaced([(trial.layer, trial) for trial in trials]):
        check_logits(a_few_logits(backend))
        if isinstance(backend, HFBackend):
            later_logits(backend)
    return max(trial.error for trial in trials)


@contextmanager
def forwards_replaced(forwards: Sequence[tuple[nn.Module, Callable[..., Any]]]) -> Iterator[None]:
    """Inside the block, these modules have these forwards."""
    replaced = [module.__dict__.get("forward") for module, _ in forwards]
    for module, forward in forwards:
        module.forward = forward
    try:
        yield
    finally:
        for (module, _), before in zip(forwards, replaced, strict=True):
            if before is None:
                del module.forward
            else:
                module.forward = before


def tolerance(model: Any) -> float:
    """The largest `difference` of a faster forward that counts as rounding."""
    activations = rounded_activations(model)
    return max(CLOSE, ROUNDINGS * torch.finfo(model.dtype).eps) if activations is None else ROUNDED[activations]


def a_few_tokens(vocab_size: int, device: torch.device, count: int = TOKENS) -> Tensor:
    """[1, count] random token ids for trials; random, because models may treat special tokens differently."""
    return torch.randint(0, vocab_size, (1, count), generator=torch.Generator().manual_seed(11)).to(device)


def a_few_logits(backend: Backend) -> Tensor:
    """Logits of a few tokens in two forwards, float32: the second forward's tokens attend to the first's."""
    backend.reserve(1, 2 * backend.attended_unit)
    tokens = a_few_tokens(backend.vocab_size, backend.device)
    first = backend.forward(tokens[:, :START], [0], first_slot=0, logits=True)
    return torch.cat([first, backend.forward(tokens[:, START:], [START], first_slot=0, logits=True)], 1).float()


def check_logits(logits: Tensor) -> None:
    """Refuse a model whose own logits [..., V] are infinite, NaN, or too large to compare."""
    if not math.isfinite(_rms(logits.float().masked_fill(logits <= RULED_OUT, 0))):
        raise SlipstreamError(
            "the model gives logits that are not finite: its weights or its configuration are damaged, or its dtype is "
            "too small for them; allowed: finite logits"
        )


def later_logits(backend: HFBackend) -> Tensor:
    """Logits [T, TOKENS, V] of the same tokens at the positions from each of `later_starts` on, float32.

    Each row attends only to itself: the model sees other positions than those at which its tokens are cached.
    """
    starts = later_starts(backend.model)
    backend.reserve(len(starts), 2 * backend.attended_unit)
    tokens = a_few_tokens(backend.vocab_size, backend.device).expand(len(starts), -1)
    backend.position_offsets = torch.tensor(starts, device=backend.device)[:, None]
    short = backend.longest_short
    for slot, start in enumerate(starts):
        backend.read_as(slot, is_long=short is not None and start + TOKENS > short)
    try:
        return backend.forward(tokens, [0] * len(starts), first_slot=0, logits=True).float()
    finally:
        backend.position_offsets = None
        for slot in range(len(starts)):
            backend.read_as(slot, is_long=False)


def later_starts(model: Any) -> list[int]:
    """Start positions for TOKENS tokens: 0, and one before each position at which the computation may change."""
    config = model.config.get_text_config()
    end = longest_text(config) or 0
    starts = {min(position - START, end - TOKENS) for position in thresholds(config, end)}
    return [0, *sorted(start for start in starts if start > 0)]


class PassedTrials:
    """The trials that a model has passed, by name.

    identity: covers everything on which their results depend; None if that is unknown, so nothing is saved.
    """

    def __init__(self, identity: str | None = None) -> None:
        self._identity = identity
        saved = None if identity is None else read_measured("trials", identity, lambda values: set(values["passed"]))
        self._passed: set[str] = saved or set()

    def __contains__(self, name: str) -> bool:
        """True if a model has passed this trial before."""
        return name in self._passed

    def add(self, name: str) -> None:
        """Note that a model passes a trial."""
        if name not in self._passed:
            self._passed.add(name)
            if self._identity is not None:
                with suppress(OSError):  # if it cannot be saved, the next process repeats the trial
                    save_measured("trials", self._identity, {"passed": sorted(self._passed)})


def passed_trials(source: str, folder: str, model: Any, options: LoadOptions, layer_kind: str) -> PassedTrials:
    """The trials that a model read from files has passed. folder: where its configuration is.

    layer_kind: the type of its layers' replacements. Nothing is saved for models with third-party code, or loaded with
    the caller's own arguments.
    """
    files = identity_of_files(source) or identity_of_files(folder)
    is_adapter = (expanded(source) / "adapter_config.json").is_file()  # its base model's files are not identified
    is_known = type(model).__module__.startswith(("transformers.models.", "slipstream.models."))
    if files is None or is_adapter or options.extra or not is_known:
        return PassedTrials()
    versions = f"torch {torch.__version__} transformers {version('transformers')} slipstream {code_digest()}"
    device = torch.cuda.get_device_name(model.device) if model.device.type == "cuda" else str(model.device)
    machine = f"{platform.machine()} {processor().model_name} threads {torch.get_num_threads()} {device}"
    switches = {name: value for name, value in sorted(os.environ.items()) if name.startswith("SLIPSTREAM_")}
    what = f"{type(model).__name__} {model.dtype} {arithmetic_of(model)} {layer_kind} fast {options.fast} {switches}"
    return PassedTrials(f"{machine} {versions} {what} {model.config.to_json_string()} {files}")


def identity_of_files(source: str) -> str | None:
    """The identities of the files from which a model was read; None if `source` is neither a file nor a folder."""
    path = expanded(source)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file())
    else:
        return None
    return " ".join(map(_identity, files))


def _identity(file: Path) -> str:
    """A file's name, size, times and some of its bytes, since copied files of the same size may keep their times.

    Weight files begin with a header that does not depend on the weights, so bytes come from all over the file.
    """
    about, digest = file.stat(), hashlib.sha256()
    with file.open("rb") as opened:
        for part in range(PARTS):
            opened.seek(max(0, about.st_size - PART_BYTES) * part // (PARTS - 1))
            digest.update(opened.read(PART_BYTES))
    return f"{file.absolute()} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {digest.hexdigest()[:20]}"


@cache
def code_digest() -> str:
    """A digest of all code that loads and computes; the version number does not change during development."""
    folder = Path(slipstream.models.__path__[0])
    files = sorted(file for kind in ("*.py", "*.c", "*.h") for file in folder.rglob(kind))
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()[:20]
