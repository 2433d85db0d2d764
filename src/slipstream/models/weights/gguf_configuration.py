"""The configuration and the tokenizer of a GGUF file, kept in the cache folder.

For a large vocabulary transformers' reader takes half a minute and a gigabyte, so it runs in a process of its own then.

    python -m slipstream.models.weights.gguf_configuration FILE FOLDER

That reader leaves out how a file scales rotary positions. Linear and YaRN scaling (Peng et al. 2023, section 3) stand
in the metadata. Files of Llama 3.1 and later hold what every frequency is divided by, as a tensor; the
settings that it was made from are recovered. Any other scaling is refused: the model would be another one at every
position.
"""

from __future__ import annotations

import importlib.util
import json
import logging
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
from slipstream.models.weights.gguf_file import GGUFHeader, in_one_file, read_header
from slipstream.models.weights.gguf_tokenizer import check_split, read_text_side
from slipstream.models.weights.model_files import CONVERSION, VERSION, is_converted
from slipstream.models.weights.transformers_reader import READER_ERRORS, quietly

log = logging.getLogger("slipstream")

FACTORS = "rope_freqs.weight"
OTHERS = ("rope_factors_long.weight", "rope_factors_short.weight")
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
KNOWN = {"type", "factor", "original_context_length", "finetuned"}
NEEDED = ("gguf", "accelerate")
LARGE = 1 << 20  # bytes of a header that is read in a process of its own


def described(header: GGUFHeader) -> Path:
    """A folder with the configuration and the tokenizer of a file, made once."""
    check_split(header)
    folder = cache_folder() / "gguf" / f"{header.stem}-{header.digest}"
    if is_converted(folder):
        return folder
    log.info(f"reading the tokenizer of {header.file.name!r} (once) ...")
    with prepared(header.file.name, folder) as made:
        if header.size < LARGE:
            describe(header, made)
        else:
            _describe_elsewhere(header.file, made)
    return folder


def describe(header: GGUFHeader, folder: Path) -> None:
    """Write the configuration and the tokenizer of a file into a folder."""
    with in_one_file(header, weights=False) as whole:
        try:
            with quietly():
                config, tokenizer = read_text_side(header, whole)
        except READER_ERRORS as error:
            raise unreadable_gguf(header.file, error) from error
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def _describe_elsewhere(file: Path, folder: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, str(file.absolute()), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SlipstreamError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


@contextmanager
def prepared(name: str, folder: Path) -> Iterator[Path]:
    """A folder to write into, whose files are then moved to `folder`: there they are complete or not at all."""
    with writable(name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.TemporaryDirectory(dir=folder.parent)
    with partial as made:
        yield Path(made)
        with writable(name, folder.parent):
            folder.mkdir(exist_ok=True)
            (folder / CONVERSION).unlink(missing_ok=True)
            items = sorted(Path(made).iterdir())
            for item in items:
                item.replace(folder / item.name)
            for item in folder.iterdir():  # of an older version
                if item.is_file() and item.name not in {new.name for new in items}:
                    item.unlink(missing_ok=True)
            # last: its presence marks the folder as complete
            mark = Path(made) / CONVERSION
            mark.write_text(json.dumps({"version": VERSION}))
            mark.replace(folder / CONVERSION)


def unreadable_gguf(file: Path, error: Exception) -> SlipstreamError:
    """What to tell the user if reading this GGUF file raised `error`."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if isinstance(error, ImportError) and absent:
        return SlipstreamError(
            f"reading GGUF files needs {' and '.join(absent)}, not installed here: pip install 'slipstream-lm[gguf]'"
        )
    return SlipstreamError(f"model {str(file)!r} could not be read as GGUF: {one_line(error)}")


def scale_positions(config: Any, header: GGUFHeader) -> None:
    """Write the scaling of a file into the configuration that transformers read from it."""
    settings = getattr(config, "rope_parameters", None)
    if not isinstance(settings, dict):
        if _by_metadata(header) or not header.tensors.keys().isdisjoint((FACTORS, *OTHERS)):
            raise _wrong(header, "scales rotary positions", f"no scaling, {header.architecture} has no settings for it")
        return
    settings = settings.get("full_attention", settings)  # where layers differ, those of windows are not scaled
    if settings.get("rope_type", "default") != "default":
        return  # transformers read it
    settings |= _by_metadata(header) | _by_factors(header, float(settings.get("rope_theta") or 10000.0))


def _by_metadata(header: GGUFHeader) -> dict[str, Any]:
    """Linear and YaRN scaling."""
    told = header.scaling
    kind = told.get("type", "linear" if "factor" in told else "none")
    if kind == "none" or (kind == "linear" and told.get("factor") in (0.0, 1.0)):
        return {}
    if kind not in ("linear", "yarn") or not told.keys() <= KNOWN:
        known = ", ".join(sorted(KNOWN))
        raise _wrong(header, f"rope.scaling is {dict(told)}", f"types none, linear and yarn, with {known}")
    found = {"rope_type": kind, "factor": _number(header, told, "factor")}
    if kind == "yarn":
        found["original_max_position_embeddings"] = int(_number(header, told, "original_context_length"))
    return found


def _by_factors(header: GGUFHeader, theta: float) -> dict[str, Any]:
    """The scaling of Llama 3, from what the file divides each frequency by."""
    if other := next((name for name in OTHERS if name in header.tensors), None):
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
    """[count] what each frequency is divided by; transformers' `rope_type` "llama3" with `LLAMA3`.

    Frequencies that turn often enough within the original context are left alone, those that hardly turn are divided by
    `factor`, and those between by something between.
    """
    lengths = 2 * pi * theta ** (numpy.arange(count) / count)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    turns = LLAMA3["original_max_position_embeddings"] / lengths
    kept = numpy.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - kept) / factor + kept)


def _number(header: GGUFHeader, told: Mapping[str, Any], name: str) -> float:
    value = told.get(name)
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
