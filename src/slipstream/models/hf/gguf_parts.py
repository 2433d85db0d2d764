"""A GGUF model that is split into several files as one file, for readers that take one only."""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.hf.gguf_header import VERSIONS, GGUFHeader, TensorEntry, ends_within
from slipstream.models.hf.model_files import MAGIC

ALIGNMENT, PIECE = 32, 1 << 24  # in bytes; the first is what files have that do not say another
LEFT_OUT = ("split.", "general.alignment")


@contextmanager
def in_one_file(header: GGUFHeader, weights: bool) -> Iterator[Path]:
    """The file of a model; of a split one, a file of all its tensors that is there inside the block.

    weights: whether the tensors' numbers are wanted; else they are holes in that file, which take no space.
    """
    if len(header.parts) == 1:
        yield header.file
        return
    folder = cache_folder()
    with writable(header.file.name, folder):
        folder.mkdir(parents=True, exist_ok=True)
        made = tempfile.TemporaryDirectory(dir=folder)
    with made as place:
        whole = Path(place) / f"{header.stem}.gguf"
        with writable(header.file.name, folder):
            _write(header, whole, weights)
        yield whole


def _write(header: GGUFHeader, whole: Path, weights: bool) -> None:
    kept = [span for name, span in header.spans.items() if not name.startswith(LEFT_OUT)]
    offsets, end = dict[str, int](), 0
    for name, entry in header.tensors.items():
        offsets[name], end = end, _aligned(end + entry.num_bytes)
    with header.file.open("rb") as stream, whole.open("wb") as target:
        target.write(MAGIC + struct.pack("<IQQ", VERSIONS[-1], len(header.tensors), len(kept)))
        for first, last in kept:
            stream.seek(first)
            target.write(stream.read(last - first))
        for name, entry in header.tensors.items():
            target.write(_text(name) + struct.pack("<I", len(entry.shape)))
            target.write(struct.pack(f"<{len(entry.shape)}Q", *reversed(entry.shape)))
            target.write(struct.pack("<IQ", entry.kind, offsets[name]))
        data = _aligned(target.tell())
        target.truncate(data + end)
        for name, entry in header.tensors.items() if weights else ():
            target.seek(data + offsets[name])
            _copy(entry, target)


def _copy(entry: TensorEntry, target: BinaryIO) -> None:
    left = entry.num_bytes
    with entry.file.open("rb") as stream:
        stream.seek(entry.start)
        while left:
            piece = stream.read(min(left, PIECE))
            if not piece:
                raise ends_within(entry)
            target.write(piece)
            left -= len(piece)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
