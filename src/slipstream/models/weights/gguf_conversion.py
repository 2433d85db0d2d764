"""Unpacks the weights of a GGUF file, in memory or once to a safetensors folder in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.cpu.processor import memory_bytes
from slipstream.models.notices import TimeLeft, progress_bar
from slipstream.models.weights.gguf_configuration import describe, described_configuration, prepared, unreadable_gguf
from slipstream.models.weights.gguf_file import GGUFHeader, read_header
from slipstream.models.weights.gguf_tensors import GGUFTensors
from slipstream.models.weights.gguf_tokenizer import check_split
from slipstream.models.weights.model_files import NO_OPTIONS, is_converted
from slipstream.models.weights.transformers_reader import check_weights, from_config, quietly, reader_errors


def convert_gguf(file: Path) -> Path:
    """Convert a GGUF file to a safetensors folder in the cache, once per content; return the folder."""
    header = read_header(file)
    check_split(header)
    digest = hashlib.sha256()
    for part in header.parts:
        with part.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    folder = cache_folder() / f"{header.stem}-{digest.hexdigest()[:16]}"
    if not is_converted(folder):
        convert(file, folder)
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write the model of a GGUF file into a folder, replacing what an older version wrote there."""
    header = read_header(file)
    header.check_model()
    check_memory(header, torch.bfloat16)
    with prepared(file.name, folder) as partial:
        with writable(file.name, folder.parent):
            describe(header, partial)
        model = dequantized(header, partial, torch.bfloat16)
        header.check_unchanged()
        with writable(file.name, folder.parent):
            model.save_pretrained(partial)


def check_memory(header: GGUFHeader, dtype: torch.dtype, reason: str = "") -> None:
    """Refuse to unpack a file that would not fit in memory. reason: why it must be unpacked."""
    needed, available = header.num_weights * dtype.itemsize, memory_bytes()
    if available is not None and needed > available:
        raise header.wrong(
            f"unpacked to {str(dtype).removeprefix('torch.')} it takes {needed / 1e9:.1f} GB of memory"
            f"{reason and f', and it must be unpacked: {reason}'}",
            f"{available / 1e9:.1f} GB, as this machine has (a smaller model, or a file that need not be unpacked)",
        )


def dequantized(header: GGUFHeader, folder: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file with its weights unpacked to this precision. folder: where it is described."""
    check_memory(header, dtype)
    try:
        config = described_configuration(header, folder)
        with quietly(), torch.device("meta"):
            empty = from_config(config, NO_OPTIONS)
        tensors, weights = GGUFTensors(header), dict[str, torch.Tensor]()
        with _bar(header.file.name) as progress:
            for name, tensor in progress.track(list(empty.state_dict().items()), task_id=progress.task_ids[0]):
                if name != "lm_head.weight" or not config.tie_word_embeddings:
                    # vectors are small, and some stay in float32 whatever the precision
                    kept = dtype if tensor.dim() > 1 else torch.float32
                    weights[name] = tensors.values(name, tuple(tensor.shape), kept)
            tensors.check_unused()
            model, report = type(empty).from_pretrained(
                None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
            )
    except SlipstreamError:
        raise
    except reader_errors() as error:
        raise unreadable_gguf(header.file, error) from error
    check_weights(str(header.file), report)
    return model


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """A progress bar of the tensors read, without transformers' own bars."""
    message = f"converting {name!r} to safetensors (once) ..."
    with quietly(), progress_bar(f"converting {name!r} (once)", message, TimeLeft()) as progress:
        yield progress
