"""A model's vocabulary, known with or without its weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import UsageError
from slipstream.models.hf.checkpoint_files import file_of
from slipstream.models.hf.hf_tokenizer import HFTokenizer, load_tokenizer
from slipstream.models.hf.model_files import is_gguf, not_loaded, resolve
from slipstream.models.hf.weights import READER_ERRORS, quietly
from slipstream.models.loaded import Loaded, is_toy
from slipstream.models.toy import load_toy
from slipstream.text.tokenizer import Tokenizer

SPECIAL = ("bos", "eos", "pad")


@dataclass(frozen=True)
class VocabularyInfo:
    """A model's vocabulary, known without its weights. head_size: how many logits it has, padding included."""

    name: str
    head_size: int
    end_ids: tuple[int, ...]
    tokenizer: Tokenizer | None = None

    @staticmethod
    def of(loaded: Loaded) -> VocabularyInfo:
        """That of a loaded model."""
        return VocabularyInfo(loaded.name, loaded.backend.vocab_size, loaded.end_ids, loaded.tokenizer)

    @property
    def special(self) -> dict[str, str]:
        """The tokens and ids of SPECIAL that the tokenizer names."""
        if not isinstance(self.tokenizer, HFTokenizer):
            return {}
        inner = self.tokenizer.inner
        named = {name: (getattr(inner, f"{name}_token"), getattr(inner, f"{name}_token_id")) for name in SPECIAL}
        return {name: f"{token!r} ({number})" for name, (token, number) in named.items() if token is not None}


def inspect_vocabulary(source: str) -> VocabularyInfo:
    """The vocabulary of "toy", the embedded model, a folder, a .gguf file or a hub id; no weights are loaded.

    Only the embedded model is fetched if it is not at hand. End ids are those of a folder's generation config, else
    those of the model's configuration. Raises UsageError for what is no model, SlipstreamError for what is unreadable.
    """
    if is_toy(source):
        return VocabularyInfo.of(load_toy(source))
    from transformers import AutoConfig  # takes seconds

    place = _described(source) if is_gguf(source) else resolve(source)
    try:
        with quietly():
            config = AutoConfig.from_pretrained(place, trust_remote_code=False).get_text_config()
        ends = getattr(config, "eos_token_id", None)
        if (generation := file_of(place, "generation_config.json")) is not None:
            ends = json.loads(generation.read_text()).get("eos_token_id")  # `generate` looks no further
    except READER_ERRORS as error:
        raise not_loaded(source, place, error) from error
    head_size = getattr(config, "vocab_size", None)
    if head_size is None:
        raise UsageError(f"model {source!r} has no vocab_size; allowed: language models")
    ids = [] if ends is None else ends if isinstance(ends, list) else [ends]
    known = tuple(i for i in ids if 0 <= i < head_size)
    return VocabularyInfo(source, head_size, known, load_tokenizer(source, place))


def _described(source: str) -> str:
    """The folder with the configuration and the tokenizer of a GGUF file."""
    from slipstream.models.hf.gguf_description import described
    from slipstream.models.hf.gguf_header import read_header

    return str(described(read_header(Path(source).expanduser())))
