"""The configuration and the tokenizer of a GGUF file, kept in the cache folder.

For a large vocabulary of SentencePiece, transformers' reader takes half a minute and a gigabyte, so it runs in a
process of its own then.

    python -m slipstream.models.weights.gguf_configuration FILE FOLDER
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from slipstream.errors import SlipstreamError, one_line
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.notices import announce
from slipstream.models.weights.gguf_architectures import architecture_of, settings_of
from slipstream.models.weights.gguf_file import GGUFHeader, read_header
from slipstream.models.weights.gguf_tokenizer import check_split, read_tokenizer, with_tokens
from slipstream.models.weights.model_files import CONVERSION, VERSION, is_converted
from slipstream.models.weights.transformers_reader import READER_ERRORS, quietly

PACKAGES = ("gguf",)  # that unpack blocks without kernels, and read SentencePiece vocabularies
LARGE = 1 << 20  # bytes of a header that is read in a process of its own


def configuration(header: GGUFHeader) -> Any:
    """transformers' configuration of a file's model, without the tokens that its tokenizer names."""
    from transformers import AutoConfig

    if header.tensors:
        settings = settings_of(header)
    else:  # a vocabulary alone
        vocabulary = {"vocab_size": len(header.array("tokenizer.ggml.tokens"))}
        settings = {"model_type": architecture_of(header).model_type} | vocabulary
    try:
        return AutoConfig.for_model(settings.pop("model_type"), **settings)
    except READER_ERRORS as error:
        raise unreadable_gguf(header.file, error) from error


def described(header: GGUFHeader) -> Path:
    """The folder with the configuration and the tokenizer of a file; written once."""
    if header.tensors:
        settings_of(header)  # refuses what is not read
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
    config = configuration(header)
    try:
        with quietly():
            tokenizer = read_tokenizer(header)
            config = with_tokens(config, header, tokenizer)
    except READER_ERRORS as error:
        raise unreadable_gguf(header.file, error) from error
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def described_configuration(header: GGUFHeader, folder: Path) -> Any:
    """The configuration of a file's model, with the tokens that are named in `folder`, which `described` made.

    The rest is read from the file: the folder is found by the file's header, and tensors say how positions are scaled.
    """
    config, saved = configuration(header), json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        setattr(config, name, saved.get(name))
    return config


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


if __name__ == "__main__":
    try:
        describe(read_header(Path(sys.argv[1])), Path(sys.argv[2]))
    except SlipstreamError as error:
        sys.exit(str(error))
