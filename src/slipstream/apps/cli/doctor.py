"""`slipstream doctor`: what this installation has, what it lacks, and the command that mends it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from slipstream.apps.cli.application import command, quiet_libraries, write_json
from slipstream.apps.cli.consoles import err, out
from slipstream.apps.cli.flags import Json
from slipstream.errors import SlipstreamError, one_line
from slipstream.version import __version__

if TYPE_CHECKING:
    from slipstream.models.cpu.kernel_libraries import Recipe

DISTRIBUTION = "slipstream-lm"
SHOWN = ("torch", "transformers", "numpy", "safetensors", "tokenizers", "huggingface_hub")
# module, what it is for, the packages to install for it
OPTIONAL = (
    ("matplotlib", "plots in reports", "matplotlib jinja2"),
    ("peft", "LoRA adapters", "peft"),
    ("ray", "many machines", "'ray[data,serve]'"),
    ("llama_cpp", "comparison with llama.cpp", "llama-cpp-python"),
)
PROMPT, TOKENS = "The heron stands in the shallows", 8  # of the self-test


@dataclass(frozen=True)
class Fact:
    """Something about this installation. problem: why it is not as it should be; remedy: the command that mends it."""

    subject: str
    value: str
    problem: str = ""
    remedy: str = ""


@command(
    "doctor",
    "slipstream doctor",
    "slipstream doctor --json report.json   # for a bug report",
    "slipstream doctor --json -             # the same on standard output",
)
def doctor_command(json_file: Json = None) -> None:
    """Versions, kernels, processor, devices and caches; what is missing, and the command that mends it.

    Exit code 1 if the self-test fails, which runs the built-in toy model.
    """
    quiet_libraries()
    facts = []
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    with err.status("looking ...") if err.is_terminal else nullcontext():
        for subject, check in CHECKS.items():
            facts += list(_checked(subject, check))
    for fact in facts:
        table.add_row(Text(fact.subject, "bold"), fact.value)
    out.print(table)
    problems = [fact for fact in facts if fact.problem]
    for fact in problems:
        out.print(Text.assemble(("problem: ", "yellow"), fact.problem), soft_wrap=True)
        if fact.remedy:
            out.print(f"  mend it: {fact.remedy}", soft_wrap=True)
    if not problems:
        out.print("No problem found.")
    write_json(
        json_file, {"version": __version__, "facts": [asdict(fact) for fact in facts], "problems": len(problems)}
    )
    if any(fact.subject == "self-test" and fact.problem for fact in facts):
        raise SlipstreamError("the self-test failed")


def _checked(subject: str, check: Callable[[], Iterable[Fact]]) -> Iterator[Fact]:
    """The facts that a check finds. Whatever it raises is a fact, too: this command runs where things are broken."""
    try:
        yield from check()
    except Exception as error:
        reason = f"{type(error).__name__}: {one_line(error)}"
        yield Fact(subject, "unknown", f"{subject} could not be checked: {reason}")


def _install(names: str) -> str:
    """The command that installs packages into this environment."""
    program = "uv pip install" if find_spec("pip") is None else "pip install"
    return f"{program} {names}"


def _package() -> Iterator[Fact]:
    from slipstream.models.cpu.kernel_libraries import PREBUILT

    libraries = len(list(PREBUILT.glob("*"))) if PREBUILT.is_dir() else 0
    kernels = f"{libraries} prebuilt libraries" if libraries else "kernels as sources, compiled when first used"
    yield Fact("slipstream", f"{__version__}, {kernels}, in {Path(__file__).parents[2]}")


def _python() -> Iterator[Fact]:
    yield Fact("python", f"{platform.python_version()}, {sys.executable}")
    libc = " ".join(part for part in platform.libc_ver() if part)
    parts = (f"{platform.system()} {platform.release()}", platform.machine(), libc)
    yield Fact("system", ", ".join(part for part in parts if part))


def _packages() -> Iterator[Fact]:
    yield Fact("packages", ", ".join(f"{name} {_version(name) or 'missing'}" for name in SHOWN))
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires(DISTRIBUTION) or []]
    except PackageNotFoundError:
        return  # run from its sources, without being installed
    for requirement in needed:
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            text = f"{requirement.name}{requirement.specifier}"
            problem = f"{text} is needed, {'not installed' if installed is None else f'{installed} is installed'}"
            yield Fact(requirement.name, installed or "missing", problem, _install(f"'{text}'"))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _optional() -> Iterator[Fact]:
    for module, use, packages in OPTIONAL:
        if find_spec(module) is None:
            yield Fact("optional", f"{module}, for {use}: not installed; {_install(packages)}")
        else:
            yield Fact("optional", f"{module}, for {use}: installed")


def _processor() -> Iterator[Fact]:
    from slipstream.models.cpu.processor import ISA, NoKernelsError, isas_of, memory_bytes, processor

    described, forced = processor(), os.environ.get(ISA)
    try:
        best = isas_of(described, forced)[0] + (f", chosen by {ISA}" if forced else "")
    except NoKernelsError as error:
        best = f"none that the kernels are written for: {error}"
    yield Fact("processor", f"{described.model_name or platform.machine()}; instructions: {best}")
    memory = memory_bytes()
    yield Fact("memory", "unknown" if memory is None else f"{memory / 1e9:.0f} GB")


def _kernels() -> Iterator[Fact]:
    from slipstream.models.cpu import kernel_libraries as libraries
    from slipstream.models.cpu.processor import ISA

    if not libraries.switched_on():
        yield Fact("kernels", f"switched off by {libraries.SWITCH}=off: PyTorch's are used")
        return
    forced = os.environ.get(ISA)
    for subject, best in (
        ("bfloat16 kernels", libraries.best_bfloat16_recipe),
        ("quantised kernels", libraries.best_block_recipe),
    ):
        yield _kernel(subject, best, forced, libraries.prebuilt_file)


def _kernel(
    subject: str, best: Callable[[str | None], Recipe], forced: str | None, prebuilt: Callable[[Recipe], Path | None]
) -> Fact:
    from slipstream.models.cpu.kernel_libraries import COMPILERS
    from slipstream.models.cpu.processor import NoCompilerError, NoKernelsError

    try:
        recipe = best(forced)
    except NoKernelsError as error:
        remedy = COMPILERS.get(sys.platform, "") if isinstance(error, NoCompilerError) else ""
        return Fact(subject, "PyTorch's", f"{subject} are not available, which is slower: {error}", remedy)
    return Fact(
        subject, f"Slipstream's, {recipe.name.partition('-')[2]}, {'prebuilt' if prebuilt(recipe) else 'compiled'}"
    )


def _threads() -> Iterator[Fact]:
    import torch

    from slipstream.apps.cli import CORES

    usable = len(CORES) or os.cpu_count() or 1
    limit = os.environ.get("OMP_NUM_THREADS")
    setting = "" if limit is None else f", OMP_NUM_THREADS={limit}"
    yield Fact("threads", f"{torch.get_num_threads()} of PyTorch, {usable} processors{setting}")


def _devices() -> Iterator[Fact]:
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            name, memory = torch.cuda.get_device_name(number), torch.cuda.get_device_properties(number).total_memory
            yield Fact("device", f"cuda:{number}, {name}, {memory / 1e9:.0f} GB (used by default)")
    elif shutil.which("nvidia-smi"):
        built = torch.version.cuda
        why = f"is built for CUDA {built}, which the driver does not run" if built else "is built without CUDA"
        remedy = "the command that https://pytorch.org/get-started/locally gives for this driver"
        yield Fact("device", "cpu", f"an NVIDIA driver is here, but this PyTorch {why}", remedy)
    else:
        yield Fact("device", "cpu")


def _caches() -> Iterator[Fact]:
    from slipstream.models.cache_folder import cache_folder

    folder = cache_folder()
    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    free = f"{shutil.disk_usage(nearest).free / 1e9:.0f} GB free"
    problem = "" if os.access(nearest, os.W_OK) else f"the cache folder {folder} cannot be written"
    yield Fact(
        "cache", f"{folder}: {_size(folder)}, {free}", problem, "export SLIPSTREAM_MODELS=FOLDER" if problem else ""
    )
    from huggingface_hub.constants import HF_HUB_CACHE

    yield Fact("hub cache", f"{HF_HUB_CACHE}: {_size(Path(HF_HUB_CACHE))}")


def _size(folder: Path) -> str:
    if not folder.is_dir():
        return "not there yet"
    files = {path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()}
    return f"{sum(path.stat().st_size for path in files) / 1e9:.2f} GB in {len(files)} files"


def _models() -> Iterator[Fact]:
    from slipstream.models.cache_folder import cache_folder
    from slipstream.models.weights.model_files import EMBEDDED, is_converted

    if is_converted(cache_folder() / EMBEDDED):
        yield Fact("default model", f"{EMBEDDED} is there")
    else:
        yield Fact(
            "default model", f"{EMBEDDED} is downloaded when first used (93 MB): slipstream models pull {EMBEDDED}"
        )


def _self_test() -> Iterator[Fact]:
    from slipstream.decoder import SpeculativeDecoder
    from slipstream.sampling.params import SamplingParams

    texts = []
    for drafter in ("none", "ngram"):
        with SpeculativeDecoder("toy", drafter=drafter) as decoder:
            texts.append(decoder.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0.0)).token_ids)
    if texts[0] != texts[1]:
        yield Fact("self-test", "failed", "the toy model writes another text with drafts than without")
    else:
        yield Fact("self-test", f"passed: the toy model writes the same {TOKENS} tokens with drafts and without")


CHECKS: dict[str, Callable[[], Iterable[Fact]]] = {
    "slipstream": _package,
    "python": _python,
    "packages": _packages,
    "processor": _processor,
    "kernels": _kernels,
    "threads": _threads,
    "device": _devices,
    "cache": _caches,
    "default model": _models,
    "optional": _optional,
    "self-test": _self_test,
}
