"""The weights of a GGUF file unpacked: in memory, or once to a safetensors folder in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from rich.progress import Progress

from slipstream.errors import SlipstreamError
from slipstream.models.cache_folder import cache_folder, writable
from slipstream.models.notices import TimeLeft, progress_bar
from slipstream.models.weights.gguf_configuration import FACTORS, prepared, scale_positions, unreadable_gguf
from slipstream.models.weights.gguf_file import GGUFHeader, in_one_file, read_header
from slipstream.models.weights.gguf_tensors import tensor_names
from slipstream.models.weights.gguf_tokenizer import check_split, read_text_side
from slipstream.models.weights.model_files import is_converted
from slipstream.models.weights.transformers_reader import READER_ERRORS, check_weights, quietly
from slipstream.models.weights.unused_tensors import refuse_unused

READING = Lock()  # held while functions of other packages are replaced


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
    with _bar(file.name) as progress, prepared(file.name, folder) as partial:
        plain, tokenizer = _read(file, progress, torch.bfloat16)
        with writable(file.name, folder.parent):
            plain.save_pretrained(partial)
            if tokenizer is not None:
                tokenizer.save_pretrained(partial)


def dequantised(file: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file with its weights unpacked to this precision."""
    with _bar(file.name) as progress:
        return _read(file, progress, dtype)[0]


def _read(file: Path, progress: Progress, dtype: torch.dtype) -> tuple[Any, Any]:
    """The dequantised model and its tokenizer."""
    from transformers import AutoModelForCausalLM

    header = read_header(file)
    header.check_model()
    with in_one_file(header, weights=True) as joined, _parsed_once():
        try:
            config, tokenizer = read_text_side(header, joined)
            scale_positions(config, header)
            _check_tensors(config, header)
            with _tensors_shown_by(progress):
                model, report = AutoModelForCausalLM.from_pretrained(
                    joined.parent,
                    gguf_file=joined.name,
                    config=config,
                    dtype=dtype,
                    ignore_mismatched_sizes=True,
                    output_loading_info=True,
                )
            check_weights(str(file), report)
            return _plain_copy(model, dtype), tokenizer
        except READER_ERRORS as error:
            raise unreadable_gguf(file, error) from error


def _check_tensors(config: Any, header: GGUFHeader) -> None:
    """Refuse a file that has tensors too many for its configuration, or, before they ask for memory, too few."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    described, available = sum(weight.numel() for weight in model.parameters()), header.num_weights
    if described > 2 * available:  # a tied output layer may be counted as well as the embedding
        raise SlipstreamError(
            f"model {str(header.file)!r}: its metadata describe {described:,} weights; allowed: up to those of its "
            f"tensors, {available:,}"
        )
    refuse_unused(str(header.file), header.tensors.keys() - {FACTORS, *tensor_names(header, model)[1].values()})


@contextmanager
def _parsed_once() -> Iterator[None]:
    """Inside the block, which one thread at a time enters, the reader parses a file and maps its names only once.

    Otherwise it parses it for the configuration and for the weights, and maps all names for every module, which takes
    half of the time for a small model.
    """
    import gguf

    with READING:
        originals = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = map(cache, originals)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = originals


@contextmanager
def _tensors_shown_by(progress: Progress) -> Iterator[None]:
    """Replace the reader's own progress bar, which it always draws, by `progress`."""
    from transformers import modeling_gguf_pytorch_utils as reader

    def track(items: Iterable[Any], **_: Any) -> Iterator[Any]:
        return iter(progress.track(items, task_id=progress.task_ids[0]))

    original, reader.tqdm = reader.tqdm, track
    try:
        yield
    finally:
        reader.tqdm = original


@contextmanager
def _bar(name: str) -> Iterator[Progress]:
    """A progress bar of the tensors read, and none of transformers' own."""
    message = f"converting {name!r} to safetensors (once) ..."
    with quietly(), progress_bar(f"converting {name!r} (once)", message, TimeLeft()) as progress:
        yield progress


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
