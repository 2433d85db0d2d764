"""The options that the reference functions share, checked one by one, and what each means here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError
from slipstream.integrations.reference.processor_options import Processor, check_processor

EndIds = int | Sequence[int] | None


@runtime_checkable
class TokenNames(Protocol):
    """What the functions need of a tokenizer; those of Hugging Face have it."""

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        """Names of tokens, for debug output."""

    def get_vocab(self) -> dict[str, int]:
        """Token text to id."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """One call's options; UsageError names the one that is wrong.

    gamma: draft tokens per round; 0 is plain decoding.
    max_gen_len: tokens to generate at most; fewer (with a line in the log) where the model's context ends before.
    eos_tokens_id: ids that end the text and are its last token; None for no end. Nothing else ends it.
    pad_token_id: accepted because callers pass it. Rows are never padded, so no output depends on it.
    use_cache: likewise. Keys and values are always cached within a call, and the output is the same either way.
    first_target: likewise. The prompt is scored together with the first draft, so there is no pass to leave out.
    skip_sample_adjustment: lossy; see `speculative_generate`.
    debug: print every round to stderr.
    """

    logits_processor: Processor
    max_gen_len: int
    eos_tokens_id: EndIds
    pad_token_id: int | None
    use_cache: bool
    debug: bool
    tokenizer: Any = None
    gamma: int = 0
    first_target: bool = True
    skip_sample_adjustment: bool = False

    def __post_init__(self) -> None:
        check_processor(self.logits_processor)
        if self.tokenizer is not None and not isinstance(self.tokenizer, TokenNames):
            raise UsageError(f"tokenizer={self.tokenizer!r}; allowed: None or a Hugging Face tokenizer")
        if not _is_id(self.gamma) or self.gamma > MAX_DRAFT_TOKENS:
            raise UsageError(f"gamma={self.gamma!r}; allowed: a whole number from 0 to {MAX_DRAFT_TOKENS}")
        if not _is_id(self.max_gen_len) or self.max_gen_len < 1:
            raise UsageError(f"max_gen_len={self.max_gen_len!r}; allowed: a whole number >= 1")
        if self.pad_token_id is not None and not _is_id(self.pad_token_id):
            raise UsageError(f"pad_token_id={self.pad_token_id!r}; allowed: a token id >= 0 or None")
        for name in ("use_cache", "debug", "first_target", "skip_sample_adjustment"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name}={getattr(self, name)!r}; allowed: True or False")

    def end_ids(self, vocab_size: int) -> tuple[int, ...]:
        """The ids that end the text; UsageError for one the model does not have."""
        given = self.eos_tokens_id
        ids = () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)
        if not all(_is_id(token) and token < vocab_size for token in ids):
            raise UsageError(
                f"eos_tokens_id={given!r}; allowed: a token id from 0 to {vocab_size - 1}, a list of them, or None"
            )
        return ids


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
