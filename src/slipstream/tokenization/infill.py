"""Infilling ("fill in the middle", arXiv 2207.14255): a model writes what belongs between a prefix and a suffix.

A model that was trained for it has tokens that begin the prefix, the suffix and the gap, in this order. Mistral's
models read the suffix first and have no token for the gap (mistral-common, `encode_fim`). Another of these tokens ends
the text, and so does one that separates files or repositories (model cards of Qwen2.5-Coder and CodeGemma).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from slipstream.errors import UsageError
from slipstream.tokenization.tokenizer import Tokenizer

# names of the tokens that begin the prefix, the suffix and the gap
NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen2.5-Coder, CodeGemma, Granite
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite Code
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek  # noqa: RUF001
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("[PREFIX]", "[SUFFIX]", None),  # Codestral
)
ENDS = (
    *("<|fim_pad|>", "<fim_pad>", "<fim-pad>", "▁<EOT>"),
    *("<|repo_name|>", "<repo_name>", "<reponame>", "<|reponame|>"),
    *("<|file_sep|>", "<file_sep>", "<|file_separator|>", "<filename>", "<|filename|>"),
)
BEFORE = "☺"  # a character that merges with nothing after it


@dataclass(frozen=True)
class InfillTokens:
    """The tokens of a vocabulary with which a model fills in the middle."""

    prefix: str
    suffix: str
    middle: str | None  # None: the suffix comes first, and no token begins the gap
    ids: Mapping[str, int]  # of these tokens and of those that end the text, by name

    @classmethod
    def of(cls, vocabulary: Mapping[str, int], names: Sequence[str] = ()) -> InfillTokens | None:
        """The tokens that a vocabulary has; None if it has none. names: the three that the model's file declares."""
        for prefix, suffix, middle in (names, *NAMES) if names else NAMES:
            needed = [name for name in (prefix, suffix, middle) if name is not None]
            if vocabulary.keys() >= set(needed):
                ids = {name: vocabulary[name] for name in (*needed, *ENDS) if name in vocabulary}
                return cls(prefix, suffix, middle, ids)
        return None

    @property
    def template(self) -> str:
        """The form of a prompt, in the language of Ollama's templates."""
        before, after = f"{self.prefix}{{{{ .Prompt }}}}", f"{self.suffix}{{{{ .Suffix }}}}"
        return after + before if self.middle is None else before + after + self.middle


@runtime_checkable
class InfillTokenizer(Protocol):
    """Optional capability of a tokenizer: its vocabulary may have tokens for infilling."""

    def infill_tokens(self) -> InfillTokens | None:
        """The tokens for infilling; None if the model has none."""

    def opening(self) -> list[int]:
        """The special tokens with which `encode` begins a text."""

    def bare(self, text: str) -> list[int]:
        """Token ids of a text without special tokens."""


@dataclass(frozen=True)
class Infill:
    """A prompt with a gap at its end."""

    ids: list[int]
    ends: tuple[int, ...]  # the tokens that end its text, besides the model's own


def infill(tokenizer: Tokenizer | None, prefix: str, suffix: str, *, opened: bool = True) -> Infill:
    """The prompt between whose two texts the model is to write. UsageError if it has no tokens for that.

    opened: the prompt begins with the token that begins texts, if the model has one.
    """
    tokens = tokenizer.infill_tokens() if isinstance(tokenizer, InfillTokenizer) else None
    if tokens is None or not isinstance(tokenizer, InfillTokenizer):
        raise UsageError("suffix: this model has no tokens for infilling; allowed: a prompt without suffix")
    before = [tokens.ids[tokens.prefix], *tokenizer.bare(prefix)]
    after = [tokens.ids[tokens.suffix], *_inner_ids(tokenizer, suffix)]
    parts = after + before if tokens.middle is None else [*before, *after, tokens.ids[tokens.middle]]
    return Infill([*(tokenizer.opening() if opened else ()), *parts], tuple(tokens.ids.values()))


def _inner_ids(tokenizer: InfillTokenizer, text: str) -> list[int]:
    """Token ids without the space that some tokenizers put before every text (CodeLlama's `encode_infilling`)."""
    before = tokenizer.bare(BEFORE)
    if tokenizer.bare(BEFORE + "a")[len(before) :] == tokenizer.bare("a"):
        return tokenizer.bare(text)
    return tokenizer.bare(BEFORE + text)[len(before) :]
