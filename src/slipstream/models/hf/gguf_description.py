"""The configuration and the tokenizer of a GGUF file, kept in the cache folder.

For a large vocabulary transformers' reader takes half a minute and a gigabyte, so it runs in a process of its own then.

    python -m slipstream.models.hf.gguf_description FILE FOLDER
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.hf.gguf_conversion import prepared, unreadable_gguf
from slipstream.models.hf.gguf_header import GGUFHeader, read_header
from slipstream.models.hf.gguf_parts import in_one_file
from slipstream.models.hf.gguf_tokenizer import check_split, read_text_side
from slipstream.models.hf.model_files import is_converted
from slipstream.models.hf.weights import READER_ERRORS, quietly

log = logging.getLogger("slipstream")

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


if __name__ == "__main__":
    try:
        describe(read_header(Path(sys.argv[1])), Path(sys.argv[2]))
    except SlipstreamError as error:
        sys.exit(str(error))
