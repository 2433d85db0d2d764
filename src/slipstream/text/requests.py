"""From what a user passes in to rows: prompts of every kind become token ids, and every mistake one clear line."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slipstream.constraints.compiled_grammars import CompiledGrammars
from slipstream.core.rng import key
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded
from slipstream.sampling.params import SamplingParams
from slipstream.text.detokenizer import VisibleText
from slipstream.text.prompt_forms import ALLOWED, is_chat, is_ids, read_prompts
from slipstream.text.prompts import check_text

Message = dict[str, Any]
Ids = list[int] | Tensor | NDArray[np.integer[Any]] | Mapping[str, Any]  # the last: what a tokenizer returns
Prompt = str | Ids | list[Message]


@dataclass(frozen=True)
class RequestReader:
    """Reads requests for one target: its tokenizer, vocabulary and context length.

    no_predictions: why requests cannot have predictions, and what is allowed; empty if they can. compiled: constraints
    that readers share; None for this reader's own.
    """

    target: Loaded
    no_predictions: str = ""
    compiled: CompiledGrammars | None = None

    @cached_property
    def grammars(self) -> CompiledGrammars:
        """Constraints, compiled for the target's vocabulary."""
        return self.compiled or CompiledGrammars(self.target, self.target.backend.vocab_size)

    def encode(self, prompt: Prompt, *, chat: bool = True) -> list[int]:
        """The token ids a prompt stands for."""
        return self._encode(_single(prompt), chat)

    def _encode(self, prompt: Any, chat: bool) -> list[int]:
        if is_ids(prompt):
            return list(prompt)
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise UsageError(
                f"prompt is text, but model {self.target.name!r} has no tokenizer; allowed: put tokenizer.json into "
                "its folder (the command line needs it), or in Python tokenizer=... or a list of token ids"
            )
        if isinstance(prompt, str):
            check_text("prompt", prompt)
            messages = self._messages(prompt, chat)
            return tokenizer.encode(prompt) if messages is None else tokenizer.chat(messages)
        for message in prompt:
            if isinstance(message.get("content"), str):
                check_text("prompt (a chat message)", message["content"])
        return tokenizer.chat(prompt)

    def sample_rows(self, prompts: list[Any], params: Any, *, chat: bool = True) -> list[list[Row]]:
        """`params.n` rows per prompt; the first has the request's seed, the others seeds derived from it."""
        given = _one_each(params, len(prompts))
        groups: list[list[Row]] = []
        for prompt, own in zip(prompts, given, strict=True):
            one = replace(own, n=1) if isinstance(own, SamplingParams) and own.n > 1 else own
            first = self._row(len(groups), _single(prompt), one, chat)
            seeds = further_seeds(first.seed, own.n)
            others = [self._row(len(groups), first.tokens, replace(one, seed=seed), chat) for seed in seeds]
            for other in others:
                other.messages = first.messages
            groups.append([first, *others])
        return groups

    def rows(self, prompts: list[Any], params: Any, *, chat: bool = True) -> list[Row]:
        """One row per prompt, given in any form; params: None, one for all, or one per prompt."""
        pairs = enumerate(zip(prompts, _one_each(params, len(prompts)), strict=True))
        return [self._row(i, _single(prompt), one, chat) for i, (prompt, one) in pairs]

    def _row(self, index: int, prompt: Any, params: SamplingParams, chat: bool) -> Row:
        if not isinstance(params, SamplingParams):
            raise UsageError(f"params: {type(params).__name__}; allowed: SamplingParams")
        if params.n > 1:
            raise UsageError(f"n={params.n}; allowed: 1, except in generate")
        backend, tokens = self.target.backend, self._encode(prompt, chat)
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
        params = self.with_token_ids(params)
        params.check_vocabulary(backend.vocab_size)
        ends = frozenset(() if params.ignore_eos else self.target.end_ids) | frozenset(params.stop_token_ids)
        watch = self._stop_watch(params)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        stop = None if watch is None else watch.completes_stop
        row = Row(index, tokens, params, seed, ends, stop, messages=self._messages(prompt, chat))
        row.prediction = self._prediction(params)
        if params.constraint is not None:
            row.constraint = self.grammars.constraint(params.constraint, ends)
        return row

    def _messages(self, prompt: Any, chat: bool) -> list[Message] | None:
        """The chat that a prompt is rendered as, if it is."""
        tokenizer = self.target.tokenizer
        if isinstance(prompt, str):
            templated = chat and tokenizer is not None and tokenizer.has_chat_template and prompt
            return [{"role": "user", "content": prompt}] if templated else None
        return None if is_ids(prompt) else prompt

    def with_token_ids(self, params: SamplingParams) -> SamplingParams:
        """Texts as token ids: the prediction's, and bad words' at the beginning of a text and after a space."""
        words: list[Sequence[int]] = []
        tokenizer = self.target.tokenizer
        for word in params.bad_words:
            if not isinstance(word, str):
                words.append(word)
            elif tokenizer is None:
                raise UsageError(f"bad_words: {word!r} is text but there is no tokenizer; allowed: lists of token ids")
            else:
                words += [ids for ids in (tokenizer.bare(word), tokenizer.bare(" " + word)) if ids]
        if params.bad_words:
            params = replace(params, bad_words=tuple(words))
        return replace(params, prediction=self._prediction(params)) if isinstance(params.prediction, str) else params

    def _prediction(self, params: SamplingParams) -> Sequence[int]:
        """A request's prediction as token ids without special ones; nothing without one."""
        given, tokenizer = params.prediction, self.target.tokenizer
        if given is None:
            return ()
        if self.no_predictions:
            raise UsageError(f"prediction with {self.no_predictions}, or no prediction")
        if not isinstance(given, str):
            return tuple(given)
        if tokenizer is None:
            raise UsageError(
                f"prediction={given!r:.60} is text but there is no tokenizer; allowed: a list of token ids"
            )
        if not (ids := tokenizer.bare(given)):
            raise UsageError(f"prediction={given!r:.60} has no tokens; allowed: a text that has some")
        return ids

    def _stop_watch(self, params: SamplingParams) -> VisibleText | None:
        if not params.stop_strings:
            return None
        if self.target.tokenizer is None:
            raise UsageError(f"stop={list(params.stop_strings)!r} needs a tokenizer; allowed: stop_token_ids")
        return VisibleText(self.target.tokenizer, params)


def further_seeds(seed: int, n: int) -> list[int]:
    """Of the second to n-th text of a request with this seed."""
    return [key(seed, at) >> 1 for at in range(1, n)]


def _one_each(params: Any, count: int) -> list[Any]:
    one = SamplingParams() if params is None else params
    given = list(params) if isinstance(params, list | tuple) else [one] * count
    if len(given) != count:
        raise UsageError(f"params: {len(given)} given for {count} prompts; allowed: one, or one per prompt")
    return given


def _single(prompt: Any) -> Any:
    """One prompt as a text, a list of token ids or a list of chat messages."""
    found = read_prompts(prompt)
    one = found.items[0]
    if not found.single or not (isinstance(one, str) or is_ids(one) or is_chat(one)):
        raise UsageError(f"prompt {prompt!r:.80}; allowed: {ALLOWED}")
    return one
