"""The options of a request: `SamplingParams`, checked field by field when it is made.

Options that a caller leaves out are `Unset`: the model's own settings take their place (`generation_settings.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from slipstream.checks import arguments_named, changed_repr, check_whole, explained_fields, is_number, is_text, is_whole
from slipstream.constraints.constraint import Constraint
from slipstream.core.limits import MAX_DRAFT_TOKENS
from slipstream.errors import UsageError, setting

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 1e30  # leaves room in float32 for products with counts
MAX_TEXTS = 1024  # of a prompt
DEFAULT_MAX_TOKENS = 1024  # of an answer whose length nobody has set
Processor: TypeAlias = "Callable[[Tensor, Tensor], Tensor]"
OTHER_NAMES = {  # of other libraries, and what to write here
    **dict.fromkeys(("max_new_tokens", "max_length", "max_completion_tokens", "max_gen_len"), "max_tokens=..."),
    **dict.fromkeys(("min_new_tokens", "min_length"), "min_tokens=..."),
    **dict.fromkeys(("temp",), "temperature=..."),
    "do_sample": "temperature=1.0 (0 is greedy)",
    **dict.fromkeys(("stop_strings", "stop_sequences"), "stop=[...]"),
    "eos_token_id": "stop_token_ids=[...]",
    **dict.fromkeys(("num_return_sequences", "best_of"), "n=..."),
    "bad_words_ids": "bad_words=[...]",
    "random_seed": "seed=...",
    **dict.fromkeys(("top_logprobs", "output_scores"), "logprobs=..."),
    **dict.fromkeys(("gamma", "num_assistant_tokens", "num_speculative_tokens"), "num_draft_tokens=..."),
    "logits_processor": "logits_processors=[...]",
    **dict.fromkeys(("schema", "json_schema", "response_format"), "constraint=Constraint(json_schema=...)"),
    **dict.fromkeys(("regex", "grammar", "choice"), "constraint=Constraint(...)"),
    "stream": "decoder.stream(prompt)",
    "tools": "decoder.generate(prompt, tools=...)",
    "enable_thinking": "chat_template_kwargs={'enable_thinking': ...}",
    "add_generation_prompt": "continue_final_message=True",
    **dict.fromkeys(("system", "system_prompt"), "a message {'role': 'system', 'content': ...}"),
}


class Unset:
    """Marks the default of an option that the caller has left out, so that the model's own setting may replace it."""


class UnsetNumber(Unset, float):
    """A default that holds only where the model has no setting of its own."""


class UnsetCount(Unset, int):
    """A whole number of this kind."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Options of one request. Sampling options that are left out are the model's own; without any, it is greedy.

    Penalties see prompt and output (repetition) or the output only (presence, frequency). Truncation and the order of
    operations are those of Hugging Face `generate`. `UsageError` names the field, its value and what is allowed.
    """

    temperature: float = setting(UnsetNumber(0), "0 is greedy; otherwise logits are divided by it")
    top_k: int = setting(UnsetCount(0), "keep the K most likely tokens; 0 keeps all")
    top_p: float = setting(
        UnsetNumber(1), "keep the most likely tokens that together reach this probability; 1 keeps all"
    )
    min_p: float = setting(
        UnsetNumber(0), "keep tokens at least this likely relative to the most likely one; 0 keeps all"
    )
    repetition_penalty: float = setting(
        UnsetNumber(1), "divide logits of tokens seen in prompt or output (multiply negative ones)"
    )
    presence_penalty: float = setting(0.0, "subtract this from logits of tokens seen in the output")
    frequency_penalty: float = setting(0.0, "subtract this per occurrence from logits of tokens seen in the output")
    logit_bias: Mapping[int, float] = setting({}, "add numbers to logits: token id -> bias")
    bad_words: Sequence[str | Sequence[int]] = setting((), "texts or token id lists that must not appear")
    min_tokens: int = setting(0, "no end before this many tokens")
    max_tokens: int = setting(
        UnsetCount(DEFAULT_MAX_TOKENS), "generate at most this many tokens; if left out, no more than the context holds"
    )
    stop: str | Sequence[str] = setting((), "strings that end the text, which is cut before them")
    stop_token_ids: Sequence[int] = setting((), "token ids that end the text like end-of-sequence")
    ignore_eos: bool = setting(False, "go on after end-of-sequence")
    seed: int | None = setting(None, "random seed; if left out, a fresh one, which the result names")
    logprobs: int | None = setting(
        None, "report each token's log-probability and the K highest, of the target's raw logits; nothing if left out"
    )
    n: int = setting(1, "texts per prompt, each with a seed of its own")
    num_draft_tokens: int | None = setting(
        None, "this request's draft length instead of the decoder's; 0 drafts nothing"
    )
    prediction: str | Sequence[int] | None = setting(
        None, "your best guess of the output, used as the first draft; never changes the result"
    )
    suffix: str | None = setting(None, "text after the gap at the prompt's end, which the model fills in")
    logits_processors: Sequence[Processor] = setting((), "stateless Hugging Face LogitsProcessors")
    constraint: Constraint | None = setting(None, "what the text must be: JSON by a schema, a regular expression, ...")
    thinking_token_budget: int | None = setting(None, "end the model's thought after this many tokens")

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name != "logits_processors":
                object.__setattr__(self, name, _as_python(value))
        self._number("temperature", 0.0, math.inf)
        check_whole("top_k", self.top_k, 0)
        self._number("top_p", 0.0, 1.0, open_below=True)
        self._number("min_p", 0.0, 1.0)
        self._number("repetition_penalty", 1 / LARGEST, math.inf)
        self._number("presence_penalty", -math.inf, math.inf)
        self._number("frequency_penalty", -math.inf, math.inf)
        check_whole("max_tokens", self.max_tokens, 1)
        check_whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens={self.min_tokens}; allowed: 0 to max_tokens ({self.max_tokens})")
        if self.seed is not None:
            check_whole("seed", self.seed, 0)
        if self.logprobs is not None:
            check_whole("logprobs", self.logprobs, 0)
        check_whole("n", self.n, 1, MAX_TEXTS)
        if self.n > 1 and self.temperature == 0 and not isinstance(self.temperature, Unset):
            raise UsageError(f"n={self.n}; allowed: 1 with temperature=0, where all texts would be equal")
        if self.num_draft_tokens is not None:
            check_whole("num_draft_tokens", self.num_draft_tokens, 0, MAX_DRAFT_TOKENS)
        if self.thinking_token_budget is not None:
            check_whole("thinking_token_budget", self.thinking_token_budget, 0)
        self._check_prediction()
        if not (self.suffix is None or is_text(self.suffix)):
            raise UsageError(f"suffix={self.suffix!r:.60}; allowed: None, or a non-empty text of valid Unicode")
        if not isinstance(self.ignore_eos, bool):
            raise UsageError(f"ignore_eos={self.ignore_eos!r}; allowed: True or False")
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise UsageError(f"constraint={self.constraint!r:.80}; allowed: None or a Constraint")
        if self.constraint is not None and self.ignore_eos:
            raise UsageError("ignore_eos=True with a constraint, which decides where the text ends; allowed: False")
        self._check_collections()

    def _check_prediction(self) -> None:
        prediction = self.prediction
        if prediction is None:
            return
        ids = (
            isinstance(prediction, Sequence)
            and not isinstance(prediction, str | bytes)
            and len(prediction) > 0
            and all(map(is_whole, prediction))
        )
        if not (ids or is_text(prediction)):
            raise UsageError(
                f"prediction={prediction!r:.60}; allowed: None, a non-empty text of valid Unicode, or a list of token "
                "ids"
            )
        if self.num_draft_tokens == 0:
            raise UsageError("prediction with num_draft_tokens=0, which drafts nothing; allowed: None or at least 1")

    def _check_collections(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        _check_each("stop", self.stop, is_text, "non-empty strings of valid Unicode")
        _check_each("stop_token_ids", self.stop_token_ids, is_whole, "token ids >= 0")
        _check_each("bad_words", self.bad_words, _is_word, "non-empty strings of valid Unicode or lists of token ids")
        _check_each("logits_processors", self.logits_processors, callable, "callables (input_ids, scores) -> scores")
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias={self.logit_bias!r}; allowed: a mapping from token id to a number")
        for token, bias in self.logit_bias.items():
            forbids = isinstance(bias, float) and bias == -math.inf
            if not is_whole(token) or not (forbids or is_number(bias, -LARGEST, LARGEST)):
                raise UsageError(
                    f"logit_bias={{{token!r}: {bias!r}}}; allowed: token ids >= 0 with finite numbers or -inf"
                )

    def _number(self, name: str, low: float, high: float, *, open_below: bool = False) -> None:
        value = getattr(self, name)
        is_inside = is_number(value, max(low, -LARGEST), min(high, LARGEST)) and not (open_below and value == low)
        if not is_inside:
            raise UsageError(f"{name}={value!r}; allowed: {_range(low, high, open_below)}")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """The stop strings; a single one was made a tuple."""
        return tuple(self.stop)

    @property
    def unset(self) -> dict[str, Any]:
        """The options that were left out, with their plain defaults."""
        return {
            name: float(value) if isinstance(value, UnsetNumber) else int(value)
            for name, value in vars(self).items()
            if isinstance(value, UnsetNumber | UnsetCount)
        }

    @property
    def explicit(self) -> SamplingParams:
        """The same options, where those that were left out have their plain defaults, whatever the model's own are."""
        return replace(self, **self.unset)

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON values, None for those left out; processors, which are code, are not among them."""
        options = {name: value for name, value in vars(self).items() if name != "logits_processors"}
        options |= dict.fromkeys(self.unset)
        return options | {"constraint": None if self.constraint is None else self.constraint.to_dict()}

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise UsageError, which names field and id, for token ids that the model does not have."""
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise UsageError(f"logprobs={self.logprobs}; allowed: at most {vocab_size}, the size of the vocabulary")
        words = [token for word in self.bad_words if not isinstance(word, str) for token in word]
        for name, ids in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("bad_words", words),
            ("prediction", () if isinstance(self.prediction, str) else self.prediction or ()),
        ):
            for token in ids:
                if token >= vocab_size:
                    raise UsageError(f"{name}: token id {token}; allowed: 0 to {vocab_size - 1}")

    def __repr__(self) -> str:
        return changed_repr(self)


explained_fields(SamplingParams)
SamplingParams.__init__ = arguments_named("SamplingParams", OTHER_NAMES)(  # type: ignore[method-assign]
    SamplingParams.__init__
)
# options that models may bring; all but the penalty have an effect only where tokens are sampled
OWN_OPTIONS = tuple(f.name for f in fields(SamplingParams) if isinstance(f.default, Unset) and f.name != "max_tokens")
SAMPLED = tuple(name for name in OWN_OPTIONS if name != "repetition_penalty")


class SamplingOptions(TypedDict, total=False):
    """The fields of `SamplingParams` as keywords of `generate`, for type checkers."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    bad_words: Sequence[str | Sequence[int]]
    min_tokens: int
    max_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    seed: int | None
    logprobs: int | None
    n: int
    num_draft_tokens: int | None
    prediction: str | Sequence[int] | None
    suffix: str | None
    logits_processors: Sequence[Processor]
    constraint: Constraint | None
    thinking_token_budget: int | None


def params_from(params: Any, options: SamplingOptions) -> Any:
    """The options of a call: `params` as it was given, or made of keywords. UsageError if both are given."""
    if not options:
        return params
    if params is not None:
        raise UsageError(f"params and {next(iter(options))}= are both given; allowed: one of them")
    return SamplingParams(**options)


def _range(low: float, high: float, open_below: bool) -> str:
    """The numbers between two bounds, in words."""
    if not math.isfinite(low):
        return f"a number from {-LARGEST:.3g} to {LARGEST:.3g}"
    if not math.isfinite(high):
        return f"a number, {low:g} or more" if low == 0 else "a number above 0"
    return f"a number above {low:g}, up to {high:g}" if open_below else f"a number from {low:g} to {high:g}"


def _as_python(value: Any) -> Any:
    """Numbers and arrays of NumPy and PyTorch as Python numbers and lists, inside lists and dicts, too."""
    if callable(getattr(value, "tolist", None)):
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(_as_python, value))
    if type(value) is dict:
        return {_as_python(key): _as_python(item) for key, item in value.items()}
    return value


def _is_word(value: object) -> bool:
    if isinstance(value, str):
        return is_text(value)
    return isinstance(value, Sequence) and len(value) > 0 and all(map(is_whole, value))


def _check_each(name: str, values: object, holds: Callable[[Any], bool], allowed: str) -> None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise UsageError(f"{name}={values!r}; allowed: a list of {allowed}")
    for value in values:
        if not holds(value):
            raise UsageError(f"{name}: {value!r}; allowed: {allowed}")
