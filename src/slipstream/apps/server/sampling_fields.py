"""The one place where a request's fields become `SamplingParams`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.apps.server.error_objects import refused
from slipstream.apps.server.prompt_rendering import content_text
from slipstream.apps.server.request_fields import (
    ChatFields,
    CompletionFields,
    Fields,
    SamplingFields,
    nested,
    says_something,
)
from slipstream.constraints.constraint import Constraint
from slipstream.sampling.params import SamplingParams

# fields whose name and meaning are those of SamplingParams; None leaves its default
SAME = (
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop",
    "num_draft_tokens",
)


class AllowedTokens:
    """A logits processor that leaves the given tokens only."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = torch.tensor(sorted(set(ids)))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Scores [1, V] with -inf everywhere else."""
        ids = self._ids.to(scores.device)
        kept = torch.full_like(scores, float("-inf"))
        kept[:, ids] = scores[:, ids]
        return kept


def sampling_params(
    fields: SamplingFields, max_tokens: int, vocab_size: int, constraint: Constraint | None = None
) -> SamplingParams:
    """The options of a request's rows, but for `n`. ApiError or UsageError naming the field that cannot be met."""
    check_supported(fields)
    given: dict[str, Any] = {name: getattr(fields, name) for name in SAME if getattr(fields, name) is not None}
    given["temperature"] = 1.0 if fields.temperature is None else fields.temperature
    given["top_k"] = max(0, fields.top_k or 0)
    given["logit_bias"] = _biases(fields.logit_bias or {})
    given["stop_token_ids"] = tuple(fields.stop_token_ids or ())
    given["bad_words"] = tuple(fields.bad_words or ())
    given["seed"] = None if fields.seed == -1 else fields.seed
    given["max_tokens"] = max(1, max_tokens)
    given["logprobs"] = wanted_logprobs(fields)
    given["prediction"], given["constraint"] = predicted_text(fields), constraint
    if fields.allowed_token_ids is not None:
        if max(fields.allowed_token_ids) >= vocab_size:
            raise refused(
                f"allowed_token_ids: token id {max(fields.allowed_token_ids)}; allowed: 0 to {vocab_size - 1}",
                "allowed_token_ids",
            )
        given["logits_processors"] = (AllowedTokens(fields.allowed_token_ids),)
    return SamplingParams(**given)


def wanted_logprobs(fields: SamplingFields) -> int | None:
    """How many of the likeliest tokens to report besides each; None for no log-probabilities."""
    if isinstance(fields, CompletionFields):
        return fields.logprobs
    if isinstance(fields, ChatFields) and fields.logprobs:
        return fields.top_logprobs or 0
    return None


def check_supported(fields: SamplingFields) -> None:
    """Refuse what would change the answer and is not there, rather than leave it out."""
    check_extra(fields)
    extra = fields.extra
    other, address = (
        (CompletionFields, "completions") if isinstance(fields, ChatFields) else (ChatFields, "chat/completions")
    )
    for name in sorted(other.model_fields.keys() & extra.keys()):
        if says_something(extra[name]):
            here = ", here it is max_tokens" if name == "max_completion_tokens" else ""
            raise refused(f"{name} is no field of this address; allowed: on /v1/{address}{here}", name)
    best_of = extra.get("best_of")
    if best_of not in (None, fields.n or 1):
        raise refused(f"best_of={best_of!s:.40}; allowed: the same as n", "best_of")
    if isinstance(fields, CompletionFields) and fields.suffix:
        raise refused("suffix: filling in the middle is not supported", "suffix")
    if isinstance(fields, ChatFields) and fields.top_logprobs is not None and not fields.logprobs:
        raise refused("top_logprobs needs logprobs=true", "top_logprobs")


def check_extra(fields: Fields) -> None:
    """Refuse fields that are known and not supported, at whatever depth."""
    for place, part in nested(fields):
        for name, why in part.REFUSED.items():
            if says_something(part.extra.get(name)):
                raise refused(f"{place}{name}: {why}", place + name)


def predicted_text(fields: SamplingFields) -> str | None:
    """The text that the answer is expected to resemble, its parts one after the other."""
    if fields.prediction is None:
        return None
    name = "prediction.content"
    if not (text := content_text(fields.prediction.content, name, between="")):
        raise refused(f"{name} is empty; allowed: a text, or no prediction", name)
    return text


def _biases(given: dict[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdigit() and len(name) < 12):
            raise refused(f"logit_bias: {name!r:.40}; allowed: token ids", "logit_bias")
    return {int(name): bias for name, bias in given.items()}
