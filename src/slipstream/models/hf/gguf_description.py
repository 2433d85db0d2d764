"""The configuration and the tokenizer of a GGUF file, kept in the cache folder.

For a large vocabulary transformers' reader takes half a minute and a gigabyte, so it runs in a process of its own then.

    python -m slipstream.models.hf.gguf_description FILE FOLDER
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.hf.gguf_conversion import unreadable_gguf, writable
from slipstream.models.hf.gguf_header import GGUFHeader
from slipstream.models.hf.weights import READER_ERRORS, quietly

log = logging.getLogger("slipstream")

LARGE = 1 << 20  # bytes of a header that is read in a process of its own


def described(header: GGUFHeader) -> Path:
    """A folder with the configuration and the tokenizer of a file, made once."""
    folder = cache_folder() / "gguf" / f"{header.file.stem}-{header.digest}"
    if (folder / "config.json").exists():
        return folder
    log.info(f"reading the tokenizer of {header.file.name!r} (once) ...")
    with writable(header.file.name, folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = tempfile.TemporaryDirectory(dir=folder.parent)
    with partial as made:
        if header.size < LARGE:
            describe(header.file, Path(made))
        else:
            _describe_elsewhere(header.file, made)
        with writable(header.file.name, folder.parent):
            folder.mkdir(exist_ok=True)
            # config.json last: its presence marks the folder as complete
            for item in sorted(Path(made).iterdir(), key=lambda path: path.name == "config.json"):
                item.replace(folder / item.name)
    return folder


def describe(file: Path, folder: Path) -> None:
    """Write the configuration and the tokenizer of a file into a folder."""
    from transformers import AutoConfig, AutoTokenizer

    place = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        with quietly():
            config, tokenizer = AutoConfig.from_pretrained(**place), AutoTokenizer.from_pretrained(**place)
    except READER_ERRORS as error:
        raise unreadable_gguf(file, error) from error
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)


def _describe_elsewhere(file: Path, folder: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", __name__, str(file.absolute()), folder]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SlipstreamError((done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1])


if __name__ == "__main__":
    try:
        describe(Path(sys.argv[1]), Path(sys.argv[2]))
    except SlipstreamError as error:
        sys.exit(str(error))
