"""From what a user passes in to rows: prompts of every kind become token ids, and every mistake one clear line."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded
from slipstream.sampling.params import SamplingParams
from slipstream.text.detokenizer import VisibleText

Message = dict[str, str]
Prompt = str | list[int] | list[Message]


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one target: its tokenizer, vocabulary and context length."""

    target: Loaded

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """The token ids a prompt stands for."""
        if _is_ids(prompt):
            return list(prompt)  # type: ignore[arg-type]
        if self.target.tokenizer is None:
            raise UsageError(
                f"prompt is text, but model {self.target.name!r} has no tokenizer; allowed: put tokenizer.json into its "
                "folder (the command line needs it), or in Python tokenizer=... or a list of token ids"
            )
        if isinstance(prompt, str):
            if chat and self.target.tokenizer.has_chat_template and prompt:
                return self.target.tokenizer.chat([{"role": "user", "content": prompt}])
            return self.target.tokenizer.encode(prompt)
        return self.target.tokenizer.chat(prompt)  # type: ignore[arg-type]

    def rows(self, prompts: list[Any], params: Any, *, chat: bool = True) -> list[Row]:
        """One row per prompt; params: None, one for all, or one per prompt."""
        one = SamplingParams() if params is None else params
        given = list(params) if isinstance(params, list | tuple) else [one] * len(prompts)
        if len(given) != len(prompts):
            raise UsageError(f"params: {len(given)} given for {len(prompts)} prompts; allowed: one, or one per prompt")
        return [self._row(i, prompt, one, chat) for i, (prompt, one) in enumerate(zip(prompts, given, strict=True))]

    def _row(self, index: int, prompt: Any, params: SamplingParams, chat: bool) -> Row:
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params: {type(params).__name__}; allowed: SamplingParams")
        if not (isinstance(prompt, str) or _is_ids(prompt) or _is_chat(prompt)):
            raise UsageError(f"prompt {prompt!r:.80}; allowed: a text, a list of token ids or a list of chat messages")
        backend, tokens = self.target.backend, self.encode(prompt, chat=chat)
        if not tokens:
            raise UsageError(f"prompt {index} is empty; allowed: at least one token")
        if bad := [token for token in tokens if not 0 <= token < backend.vocab_size]:
            raise UsageError(f"prompt {index}: token id {bad[0]}; allowed: 0 to {backend.vocab_size - 1}")
        room = backend.max_length - len(tokens)
        if room < 1:
            raise UsageError(f"prompt {index} has {len(tokens)} tokens; allowed: at most {backend.max_length - 1}")
        if params.max_tokens > room:
            raise UsageError(
                f"max_tokens={params.max_tokens}; allowed: at most {room} after a prompt of {len(tokens)} tokens "
                f"(the model's context is {backend.max_length})"
            )
        params = self._with_token_ids(params)
        params.check_vocabulary(backend.vocab_size)
        ends = frozenset(() if params.ignore_eos else self.target.end_ids) | frozenset(params.stop_token_ids)
        watch = self._stop_watch(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Row(index, tokens, params, seed, ends, None if watch is None else watch.completes_stop)

    def _with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Bad words given as text, as token ids: at the beginning of a text and after a space."""
        words: list[Sequence[int]] = []
        tokenizer = self.target.tokenizer
        for word in params.bad_words:
            if not isinstance(word, str):
                words.append(word)
            elif tokenizer is None:
                raise UsageError(f"bad_words: {word!r} is text but there is no tokenizer; allowed: lists of token ids")
            else:
                words += [ids for ids in (tokenizer.bare(word), tokenizer.bare(" " + word)) if ids]
        return replace(params, bad_words=tuple(words)) if params.bad_words else params

    def _stop_watch(self, params: SamplingParams) -> VisibleText | None:
        if not params.stop_strings:
            return None
        if self.target.tokenizer is None:
            raise UsageError(f"stop={list(params.stop_strings)!r} needs a tokenizer; allowed: stop_token_ids")
        return VisibleText(self.target.tokenizer, params)


def _is_ids(prompt: Any) -> bool:
    if not isinstance(prompt, list | tuple):
        return False
    return bool(prompt) and all(isinstance(token, int) and not isinstance(token, bool) for token in prompt)


def _is_chat(prompt: Any) -> bool:
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)


def is_single(prompt: Any) -> bool:
    """One prompt rather than a list of them; an empty list counts as one (empty) prompt."""
    if isinstance(prompt, str) or not isinstance(prompt, list | tuple) or not prompt:
        return True
    return _is_ids(prompt) or _is_chat(prompt) or isinstance(prompt[0], int)
