"""The configuration and the tokenizer of a GGUF file, kept in the cache folder."""

from __future__ import annotations

import importlib.util
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.notices import announce
from slipstream.models.weights.gguf_architectures import architecture_of, settings_of
from slipstream.models.weights.gguf_file import GGUFHeader
from slipstream.models.weights.gguf_tokenizer import check_split, read_tokenizer, token_settings
from slipstream.models.weights.model_files import CONVERSION, VERSION, is_converted
from slipstream.models.weights.transformers_reader import reader_errors

PACKAGES = ("gguf",)  # they unpack blocks without kernels
CONFIG = "config.json"


def described(header: GGUFHeader) -> Path:
    """The folder with the configuration and the tokenizer of a file; written once."""
    if header.tensors:
        settings_of(header)  # refuses what is not read
    check_split(header)
    folder = cache_folder() / "gguf" / f"{header.stem}-{header.digest}"
    if is_converted(folder):
        return folder
    announce(f"reading the tokenizer of {header.file.name!r} (once) ...")
    with prepared(header.file.name, folder) as partial, writable(header.file.name, folder.parent):
        describe(header, partial)
        header.check_unchanged()
    return folder


def describe(header: GGUFHeader, folder: Path) -> None:
    """Write the configuration and the tokenizer of a file into a folder."""
    if header.tensors:
        settings = settings_of(header)
    else:  # only a vocabulary
        vocabulary = {"vocab_size": len(header.array("tokenizer.ggml.tokens"))}
        settings = {"model_type": architecture_of(header).model_type} | vocabulary
    try:
        tokenizer = read_tokenizer(header)
    except reader_errors() as error:
        raise unreadable_gguf(header.file, error) from error
    if tokenizer is not None:
        tokenizer.save(folder)
    settings |= token_settings(header, tokenizer)
    (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True), encoding="utf-8")


def described_settings(header: GGUFHeader, folder: Path) -> dict[str, Any]:
    """The configuration fields of a file's model, with the token ids in `folder`, which `described` made.

    Other fields come from the file itself: the header identifies the folder, but tensors determine how positions are
    scaled.
    """
    try:
        saved = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tokens = {name: saved.get(name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    except reader_errors() as error:
        raise SlipstreamError(
            f"{folder / CONFIG} could not be read: {one_line(error)}; delete the folder to create it again"
        ) from error
    return settings_of(header) | tokens


def described_configuration(header: GGUFHeader, folder: Path) -> Any:
    """`described_settings` as transformers' configuration."""
    from transformers import AutoConfig

    settings = described_settings(header, folder)
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except reader_errors() as error:
        raise unreadable_gguf(header.file, error) from error


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
