"""The tokenizer and the vocabulary of a model, read without its weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from slipstream.checks import expanded
from slipstream.errors import SlipstreamError, UsageError, one_line
from slipstream.models.generation_settings import read_end_ids
from slipstream.models.loaded import LoadOptions, is_toy
from slipstream.models.model_size import num_weights_read
from slipstream.models.toy import load_toy
from slipstream.models.weights.adapters import adapter_at
from slipstream.models.weights.hub_files import local_file
from slipstream.models.weights.model_files import code_of_its_own, is_converted, is_gguf, not_loaded, refuse_pointers
from slipstream.models.weights.resolve import resolve
from slipstream.models.weights.safetensors_files import file_of
from slipstream.models.weights.transformers_reader import quietly, reader_errors
from slipstream.tokenization.file_tokenizer import FileTokenizer
from slipstream.tokenization.hf_tokenizer import HFTokenizer
from slipstream.tokenization.vocabulary import VocabularyInfo

PLAIN = LoadOptions()
FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def load_tokenizer(source: str, folder: str, options: LoadOptions = PLAIN) -> HFTokenizer | None:
    """The tokenizer in a model's folder; None if there is none (then prompts must be token ids)."""
    files, place = options.files, Path(folder) / options.files.get("subfolder", "")
    if Path(folder).is_dir() and not place.is_dir():  # an adapter's subfolder, which its base model does not have
        files, place = {name: value for name, value in files.items() if name != "subfolder"}, Path(folder)
    if place.is_dir() and not any((place / name).exists() for name in FILES):
        return None
    try:
        if is_converted(place):  # saved by an earlier start; other classes would split text differently
            return HFTokenizer(FileTokenizer.read(place))
        from transformers import AutoTokenizer  # takes seconds

        return HFTokenizer(AutoTokenizer.from_pretrained(folder, **files))
    except ImportError as error:  # a package that this tokenizer needs
        raise SlipstreamError(f"the tokenizer of model {source!r} needs more packages: {one_line(error)}") from error
    except Exception as error:  # the tokenizers package raises plain Exception on damaged files
        refuse_pointers(place)
        remedy = f"; delete the folder {place} to create it again" if is_converted(place) else ""
        raise code_of_its_own(source, error) or SlipstreamError(
            f"the tokenizer of model {source!r} could not be loaded: {one_line(error)}{remedy}"
        ) from error


def inspect_vocabulary(source: str) -> VocabularyInfo:
    """The vocabulary of "toy", the default model, a folder, a .gguf file or a hub id; no weights are loaded.

    The default model and GGUF files on the hub are downloaded if needed. End ids come from a folder's generation
    config, else from the model's configuration. Raises `UsageError` if this is not a model, `SlipstreamError` if it
    cannot be read.
    """
    if is_toy(source):
        return VocabularyInfo.of(load_toy(source))
    from transformers import AutoConfig  # takes seconds

    file = local_file(source)
    place = _described(file) if is_gguf(file) else resolve(source)
    try:
        if (adapter := adapter_at(source, place, PLAIN.files)) is not None:
            base = inspect_vocabulary(adapter.base)
            return replace(base, name=source, tokenizer=load_tokenizer(source, place) or base.tokenizer)
        with quietly():
            config = AutoConfig.from_pretrained(place, trust_remote_code=False).get_text_config()
        ends = getattr(config, "eos_token_id", None)
        if (generation := file_of(place, "generation_config.json")) is not None:
            # even if it is None, as for `generate`
            ends = json.loads(generation.read_text(encoding="utf-8")).get("eos_token_id")
    except UsageError:
        raise
    except reader_errors() as error:
        raise not_loaded(source, place, error) from error
    head_size = getattr(config, "vocab_size", None)
    if head_size is None:
        raise UsageError(f"model {source!r} has no vocab_size; allowed: language models")
    ends, tokenizer = read_end_ids(source, ends, head_size), load_tokenizer(source, place)
    return VocabularyInfo(source, head_size, ends, tokenizer, num_weights_read(config))


def _described(source: str) -> str:
    """The folder with the configuration and the tokenizer of a GGUF file."""
    from slipstream.models.weights.gguf_configuration import described
    from slipstream.models.weights.gguf_file import read_header

    return str(described(read_header(expanded(source))))
