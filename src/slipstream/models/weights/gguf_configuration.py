"""The configuration and the tokenizer of a GGUF file, kept in the cache folder.

For a large vocabulary transformers' reader takes half a minute and a gigabyte, so it runs in a process of its own then.

    python -m slipstream.models.weights.gguf_configuration FILE FOLDER

That reader leaves out how a file scales rotary positions. Linear and YaRN scaling (Peng et al. 2023, section 3) are in
the metadata. Files of Llama 3.1 and later have a tensor of what each frequency is divided by; the settings that it was
made from are recovered. Any other scaling is refused: without it the model would be wrong at every position.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import isfinite, pi
from pathlib import Path
from typing import Any

import numpy

from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.notices import announce
from slipstream.models.weights.gguf_file import GGUFHeader, in_one_file, read_header
from slipstream.models.weights.gguf_tokenizer import check_split, read_text_side
from slipstream.models.weights.model_files import CONVERSION, VERSION, is_converted
from slipstream.models.weights.transformers_reader import READER_ERRORS, quietly

FACTORS = "rope_freqs.weight"
OTHER_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALING_KEYS = {"type", "factor", "original_context_length", "finetuned"}
PACKAGES = ("gguf", "accelerate")  # that transformers' reader of GGUF files needs
LARGE = 1 << 20  # bytes of a header that is read in a process of its own


def described(header: GGUFHeader) -> Path:
    """The folder with the configuration and the tokenizer of a file; written once."""
    check_split(header)
    folder = cache_folder() / "gguf" / f"{header.stem}-{header.digest}"
    if is_converted(folder):
        return folder
    announce(f"reading the tokenizer of {header.file.name!r} (once) ...")
    with prepared(header.file.name, folder) as partial:
        if header.size < LARGE:
            describe(header, partial)
        else:
            _describe_elsewhere(header.file, partial)
    return folder


def describe(header: GGUFHeader, folder: Path) -> None:
    """Write the configuration and the tokenizer of a file into a folder."""
    with in_one_file(header, weights=False) as file:
        try:
            with quietly():
                config, tokenizer = read_text_side(header, file)
        except READER_ERRORS as error:
            raise unreadable_gguf(header.file, error) from error
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def _describe_elsewhere(file: Path, folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, str(file.absolute()), str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, env=environment, encoding="utf-8", errors="replace")
    if run.returncode:
        raise SlipstreamError((run.stderr.strip().splitlines() or [f"exit code {run.returncode}"])[-1])


@contextmanager
def prepared(name: str, folder: Path) -> Iterator[Path]:
    """A folder to write into; its files are moved to `folder` at the end, so that `folder` is complete or absent."""
    with writable(name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.TemporaryDirectory(dir=folder.parent)
    with partial as folder_name:
        yield Path(folder_name)
        with writable(name, folder.parent):
            folder.mkdir(exist_ok=True)
            (folder / CONVERSION).unlink(missing_ok=True)
            items = sorted(Path(folder_name).iterdir())
            for item in items:
                item.replace(folder / item.name)
            for item in folder.iterdir():  # of an older version
                if item.is_file() and item.name not in {new.name for new in items}:
                    item.unlink(missing_ok=True)
            # last: its presence marks the folder as complete
            mark = Path(folder_name) / CONVERSION
            mark.write_text(json.dumps({"version": VERSION}), encoding="utf-8")
            mark.replace(folder / CONVERSION)


def unreadable_gguf(file: Path, error: Exception) -> SlipstreamError:
    """The error to raise where reading this GGUF file raised `error`."""
    if isinstance(error, ImportError) and (missing := missing_packages()) is not None:
        return missing
    return SlipstreamError(f"model {str(file)!r} could not be read as GGUF: {one_line(error)}")


def missing_packages() -> SlipstreamError | None:
    """The error to raise if packages that read GGUF files are not installed."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return None
    names = " ".join(absent)
    return SlipstreamError(f"reading GGUF files needs {names.replace(' ', ' and ')}; run: pip install {names}")


def scale_positions(config: Any, header: GGUFHeader) -> None:
    """Write how a file scales positions into the configuration that transformers read from it."""
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        if _by_metadata(header) or not header.tensors.keys().isdisjoint((FACTORS, *OTHER_FACTORS)):
            raise _wrong(header, "scales rotary positions", f"no scaling: {header.architecture} has no settings for it")
        return
    settings = settings.get("full_attention", settings)  # where layers differ, those of windows are not scaled
    if settings.get("rope_type", "default") != "default":
        return  # transformers read it
    settings |= _by_metadata(header) | _by_factors(header, float(settings.get("rope_theta") or 10000.0))


def size_experts(config: Any, header: GGUFHeader) -> None:
    """Write how large a file's experts are into the configuration, where transformers' reader leaves its defaults."""
    for name, tensor in (("moe_intermediate_size", "gate_exps"), ("shared_expert_intermediate_size", "gate_shexp")):
        found = (entry for key, entry in header.tensors.items() if key.endswith(f".ffn_{tensor}.weight"))
        if hasattr(config, name) and (entry := next(found, None)) is not None and len(entry.shape) > 1:
            setattr(config, name, entry.shape[-2])


def _by_metadata(header: GGUFHeader) -> dict[str, Any]:
    """The settings of linear and YaRN scaling; empty for none."""
    scaling = header.scaling
    kind = scaling.get("type", "linear" if "factor" in scaling else "none")
    if kind == "none" or (kind == "linear" and scaling.get("factor") in (0.0, 1.0)):
        return {}
    if kind not in ("linear", "yarn") or not scaling.keys() <= SCALING_KEYS:
        keys = ", ".join(sorted(SCALING_KEYS))
        raise _wrong(header, f"rope.scaling is {dict(scaling)}", f"types none, linear and yarn, with {keys}")
    settings = {"rope_type": kind, "factor": _number(header, scaling, "factor")}
    if kind == "yarn":
        settings["original_max_position_embeddings"] = int(_number(header, scaling, "original_context_length"))
    return settings


def _by_factors(header: GGUFHeader, theta: float) -> dict[str, Any]:
    """The settings of Llama 3's scaling, recovered from what the file divides each frequency by; empty for none."""
    if other := next((name for name in OTHER_FACTORS if name in header.tensors), None):
        raise _wrong(header, f"has tensor {other!r}", f"{FACTORS}, as files of Llama 3 have it")
    entry = header.tensors.get(FACTORS)
    if entry is None:
        return {}
    if entry.kind_name != "F32" or len(entry.shape) != 1:
        raise _wrong(header, f"tensor {FACTORS!r} is {list(entry.shape)} in {entry.kind_name}", "a vector in F32")
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        factors = numpy.frombuffer(stream.read(4 * entry.shape[0]), "<f4")
    if (factors == 1).all():
        return {}
    if not (numpy.isfinite(factors).all() and factors.min() >= 1):
        raise _wrong(header, f"tensor {FACTORS!r} holds numbers from {factors.min()}", "finite numbers from 1")
    factor = float(factors.max())
    if not numpy.allclose(factors, llama3_factors(len(factors), theta, factor), rtol=1e-4):
        raise _wrong(header, f"tensor {FACTORS!r} holds other factors than Llama 3's", f"those made with {LLAMA3}")
    return {"rope_type": "llama3", "factor": factor} | LLAMA3


def llama3_factors(count: int, theta: float, factor: float) -> Any:
    """[count] what each frequency is divided by: transformers' `rope_type` "llama3" with `LLAMA3`.

    High frequencies, which turn often within the original context, are divided by 1, low ones by `factor`, and those
    between by values between.
    """
    lengths = 2 * pi * theta ** (numpy.arange(count) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / lengths
    kept = numpy.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / factor + kept)


def _number(header: GGUFHeader, scaling: Mapping[str, Any], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not (isfinite(value) and value >= 1):
        raise _wrong(header, f"rope.scaling.{name} is {value!r}", "a number from 1")
    return float(value)


def _wrong(header: GGUFHeader, what: str, allowed: str) -> SlipstreamError:
    return SlipstreamError(f"model {str(header.file)!r}: {what}; allowed: {allowed}")


if __name__ == "__main__":
    try:
        describe(read_header(Path(sys.argv[1])), Path(sys.argv[2]))
    except SlipstreamError as error:
        sys.exit(str(error))
