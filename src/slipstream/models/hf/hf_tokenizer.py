"""Hugging Face tokenizers behind Slipstream's tokenizer protocol, and whether two of them agree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from slipstream.errors import SlipstreamError, UsageError, first_line


class HFTokenizer:
    """A `PreTrainedTokenizer` as Slipstream uses it."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer

    @property
    def has_chat_template(self) -> bool:
        """Whether the tokenizer has a chat template."""
        return bool(self.inner.chat_template)

    def encode(self, text: str) -> list[int]:
        """Token ids, special tokens added."""
        return list(self.inner(text)["input_ids"])

    def bare(self, text: str) -> list[int]:
        """Token ids, no special tokens."""
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int]) -> str:
        """Text without special tokens, spaces left alone."""
        return str(self.inner.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))

    def chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of a conversation with the opening of the answer."""
        if not self.has_chat_template:
            raise UsageError(
                "prompt is a list of chat messages but the tokenizer has no chat template; allowed: a text"
            )
        try:
            text = self.inner.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False)
        except TemplateError as error:  # a template's own rules, for example about system messages
            raise UsageError(f"the chat template refuses these messages: {error}") from error
        return list(self.inner(text, add_special_tokens=False)["input_ids"])

    def vocabulary(self) -> dict[str, int]:
        """Token text to id, added tokens included."""
        return dict(self.inner.get_vocab())


def load_tokenizer(source: str, folder: str) -> HFTokenizer | None:
    """The tokenizer beside a model, or None where there is none (prompts must then be token ids)."""
    from pathlib import Path

    from transformers import AutoTokenizer

    names = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
    if Path(folder).is_dir() and not any((Path(folder) / name).exists() for name in names):
        return None
    try:
        return HFTokenizer(AutoTokenizer.from_pretrained(folder))
    except Exception as error:  # the readers raise many kinds on a damaged file
        first = first_line(error)
        raise SlipstreamError(f"the tokenizer of model {source!r} could not be loaded: {first}") from error
