"""`slipstream doctor`: what this installation has, what is missing, and how to fix it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

from slipstream.apps.cli.application import command, write_json
from slipstream.apps.cli.consoles import out
from slipstream.apps.cli.flags import Json
from slipstream.checks import counted
from slipstream.errors import SlipstreamError, one_line
from slipstream.models.weights.model_files import quiet
from slipstream.version import __version__

DISTRIBUTION = "slipstream-lm"
SHOWN = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub")


@dataclass(frozen=True)
class Fact:
    """A fact about this installation."""

    subject: str
    value: str
    problem: str = ""  # why it is not as it should be
    remedy: str = ""  # what to do about it


@command(
    "doctor",
    "slipstream doctor",
    "slipstream doctor --json report.json   # for a bug report",
    "slipstream doctor --json -             # the same on standard output",
)
def doctor_command(json_file: Json = None) -> None:
    """Versions, kernels, processor, devices and caches; what is missing, and how to fix it.

    Runs a self-test on the built-in toy model; exit code 1 if it fails.
    """
    quiet()
    facts = [fact for check in CHECKS for fact in _checked(check)]
    for fact in facts:
        out.print(f"{fact.subject:18}{fact.value}", soft_wrap=True, markup=False)
    problems = [fact for fact in facts if fact.problem]
    for fact in problems:
        out.sentence(f"problem: {fact.problem}" + (f"; {fact.remedy}" if fact.remedy else ""), style="yellow")
    if not problems:
        out.print("No problem found.")
    report = {"version": __version__, "facts": [asdict(fact) for fact in facts], "problems": len(problems)}
    write_json(json_file, report)
    if any(fact.subject == "self-test" for fact in problems):
        raise SlipstreamError("the self-test failed")


def _checked(check: Callable[[], Iterator[Fact]]) -> Iterator[Fact]:
    try:
        yield from check()
    except Exception as error:  # this command runs where things are broken
        subject = check.__name__.strip("_").replace("_", "-")
        yield Fact(subject, "unknown", f"{subject}: {type(error).__name__}: {one_line(error)}")


def _packages() -> Iterator[Fact]:
    from packaging.requirements import Requirement

    install = "uv pip install" if find_spec("pip") is None else "pip install"
    yield Fact("slipstream", f"{__version__}, in {Path(__file__).parents[2]}")
    yield Fact("python", f"{platform.python_version()}, {sys.executable}, {platform.platform()}")
    yield Fact("packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in SHOWN))
    try:
        needed = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:  # run from its sources, without being installed
        needed = []
    for requirement in needed:
        installed, text = _version(requirement.name), f"{requirement.name}{requirement.specifier}"
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and (installed is None or not requirement.specifier.contains(installed, prereleases=True)):
            problem = f"{text} is needed, {'not installed' if installed is None else f'{installed} is installed'}"
            yield Fact(requirement.name, installed or "missing", problem, f"run: {install} '{text}'")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> Iterator[Fact]:
    import torch

    from slipstream.models.cpu import kernel_libraries as libraries
    from slipstream.models.cpu.processor import ISA, NoCompilerError, NoKernelsError, memory_bytes, processor

    memory = f"{size / 1e9:.0f} GB" if (size := memory_bytes()) else "memory unknown"
    name = processor().model_name or platform.machine()
    yield Fact("processor", f"{name}, {counted(torch.get_num_threads(), 'thread')}, {memory}")
    if not libraries.switched_on():
        yield Fact("kernels", f"switched off by {libraries.SWITCH}=off: PyTorch's are used")
        return
    for kind, best in (("bfloat16", libraries.best_bfloat16_recipe), ("quantized", libraries.best_block_recipe)):
        try:
            recipe = best(os.environ.get(ISA))
        except NoKernelsError as error:
            remedy = libraries.COMPILERS.get(sys.platform, "") if isinstance(error, NoCompilerError) else ""
            problem = f"{kind} kernels are not available, which is slower: {error}"
            yield Fact(f"{kind} kernels", "PyTorch's", problem, remedy)
        else:
            origin = "prebuilt" if libraries.prebuilt_file(recipe) else "compiled"
            yield Fact(f"{kind} kernels", f"Slipstream's, {recipe.name.partition('-')[2]}, {origin}")


def _device() -> Iterator[Fact]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(number)
            yield Fact("device", f"cuda:{number}, {device.name}, {device.total_memory / 1e9:.0f} GB (used by default)")
    elif shutil.which("nvidia-smi"):
        built = torch.version.cuda
        why = f"is built for CUDA {built}, which the driver does not run" if built else "is built without CUDA"
        remedy = "use the command that https://pytorch.org/get-started/locally gives for this driver"
        yield Fact("device", "cpu", f"an NVIDIA driver is installed, but this PyTorch {why}", remedy)
    else:
        yield Fact("device", "cpu")


def _cache() -> Iterator[Fact]:
    from slipstream.models.cache_folder import cache_folder

    folder = cache_folder()
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    problem = "" if os.access(nearest, os.W_OK) else f"the cache folder {folder} cannot be written"
    value = f"{folder}, {shutil.disk_usage(nearest).free / 1e9:.0f} GB free"
    yield Fact("cache", value, problem, problem and "run: export SLIPSTREAM_MODELS=FOLDER")


def _self_test() -> Iterator[Fact]:
    from slipstream.decoder import SpeculativeDecoder

    outputs = []
    for drafter in ("none", "ngram"):
        with SpeculativeDecoder("toy", drafter=drafter) as decoder:
            outputs.append(
                decoder.generate("The heron stands in the shallows", temperature=0.0, max_tokens=8).token_ids
            )
    problem = "" if outputs[0] == outputs[1] else "the toy model generates different tokens with drafts"
    passed = "passed: the toy model generates the same tokens with and without drafts"
    yield Fact("self-test", problem or passed, problem)


CHECKS = [_packages, _processor, _device, _cache, _self_test]
