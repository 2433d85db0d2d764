"""What a request may ask for: `SamplingParams`, checked field by field when it is made."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from torch import Tensor

from slipstream.types import UsageError

Processor = Callable[[Tensor, Tensor], Tensor]
T = TypeVar("T")


def _refuse_unknown_fields(cls: type[T]) -> type[T]:
    """Make the constructor answer an unknown option with one line that lists the known ones."""
    construct = cls.__init__

    def __init__(self: T, **options: Any) -> None:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise UsageError(f"unknown option {name!r}; allowed: {', '.join(known)}")
        construct(self, **options)

    __init__.__wrapped__ = construct  # type: ignore[attr-defined]  # keeps the real signature visible to `help`
    cls.__init__ = __init__  # type: ignore[assignment]
    return cls


@_refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. The defaults decode greedily.

    temperature: 0 is greedy; otherwise logits are divided by it.
    top_k, top_p, min_p: truncation, in this order, as in Hugging Face `generate`; 0, 1 and 0 switch them off.
    repetition_penalty: divides (positive) or multiplies (negative) logits of tokens seen in prompt or output; 1 is off.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, from logits of tokens seen in the output.
    logit_bias: token id -> number added to its logit.
    bad_words: token sequences (ids, or text when a tokenizer is at hand) that must not appear in the output.
    min_tokens, max_tokens: bounds on the number of generated tokens; no end token is possible before the minimum.
    stop: strings that end the text (the text is cut before them); stop_token_ids: ids that end it like end-of-sequence.
    ignore_eos: go on after the model's own end-of-sequence tokens.
    seed: of this request's random numbers; None draws a fresh one, which the result reports.
    num_draft_tokens: overrides the decoder's draft length for this request; 0 switches drafting off.
    logits_processors: Hugging Face `LogitsProcessor`s without state, applied before the temperature.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Sequence[str | Sequence[int]] = ()
    min_tokens: int = 0
    max_tokens: int = 200
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    num_draft_tokens: int | None = None
    logits_processors: Sequence[Processor] = ()

    def __post_init__(self) -> None:
        self._number("temperature", 0.0, math.inf)
        self._integer("top_k", 0)
        self._number("top_p", 0.0, 1.0, open_below=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 0.0, math.inf, open_below=True)
        self._number("presence_penalty", -math.inf, math.inf)
        self._number("frequency_penalty", -math.inf, math.inf)
        self._integer("max_tokens", 1)
        self._integer("min_tokens", 0)
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens={self.min_tokens}; allowed: 0 to max_tokens ({self.max_tokens})")
        for name in ("seed", "num_draft_tokens"):
            if getattr(self, name) is not None:
                self._integer(name, 0)
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={self.ignore_eos!r}; allowed: True or False")
        self._check_collections()

    def _check_collections(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _each("stop", self.stop, lambda s: isinstance(s, str) and s != "", "non-empty strings")
        _each("stop_token_ids", self.stop_token_ids, _is_id, "token ids >= 0")
        _each("bad_words", self.bad_words, _is_word, "non-empty strings or lists of token ids")
        _each("logits_processors", self.logits_processors, callable, "callables (input_ids, scores) -> scores")
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias={self.logit_bias!r}; allowed: a mapping from token id to a number")
        for token, bias in self.logit_bias.items():
            if not _is_id(token) or not _is_real(bias) or math.isnan(bias) or bias == math.inf:
                raise UsageError(f"logit_bias={{{token!r}: {bias!r}}}; allowed: token ids >= 0 with finite numbers or -inf")

    def _number(self, name: str, low: float, high: float, *, open_below: bool = False) -> None:
        value = getattr(self, name)
        inside = _is_real(value) and math.isfinite(value) and low <= value <= high and not (open_below and value == low)
        if not inside:
            above = ">" if open_below else ">="
            bounds = [f"{above} {low:g}"] * math.isfinite(low) + [f"<= {high:g}"] * math.isfinite(high)
            raise UsageError(f"{name}={value!r}; allowed: {' and '.join(['a finite number', *bounds])}")

    def _integer(self, name: str, low: int) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < low:
            raise UsageError(f"{name}={value!r}; allowed: a whole number >= {low}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings as a tuple, whichever form they came in."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Refuse token ids the model does not have; the message names the field and the id."""
        words = [token for word in self.bad_words if not isinstance(word, str) for token in word]
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids), ("bad_words", words)):
            for token in ids:
                if token >= vocab_size:
                    raise UsageError(f"{name}: token id {token}; allowed: 0 to {vocab_size - 1}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_word(value: object) -> bool:
    if isinstance(value, str):
        return value != ""
    return isinstance(value, Sequence) and len(value) > 0 and all(map(_is_id, value))


def _each(name: str, values: object, holds: Callable[[Any], bool], allowed: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UsageError(f"{name}={values!r}; allowed: a list of {allowed}")
    for value in values:
        if not holds(value):
            raise UsageError(f"{name}: {value!r}; allowed: {allowed}")
