"""Logits processors as callers of the reference implementations pass them, turned into sampling options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.checks import check_whole, is_number
from slipstream.core.acceptance import Distributions, Rule, rejection
from slipstream.core.types import Draft
from slipstream.errors import UsageError
from slipstream.sampling.params import SamplingParams

NEVER = float("-inf")
TOLERANCE = 1e-3  # of the sum of a processor's probabilities; half precision is allowed


class LogitsProcessor(ABC):
    """A distribution, softmax(_process(logits) / temperature), and a way to sample from it.

    Subclasses of your own stay exact as well: see `sampling_of`. temperature: > 0, else UsageError.
    """

    def __init__(self, temperature: float) -> None:
        if not is_number(temperature) or temperature <= 0:
            raise UsageError(f"temperature={temperature!r}; allowed: a finite number > 0 (GreedyProcessor is greedy)")
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        return torch.softmax(self._process(logits) / self.temperature, dim=-1)

    @abstractmethod
    def _process(self, logits: Tensor) -> Tensor:
        """Logits after truncation and the like, before the temperature."""

    @abstractmethod
    def sample(self, probs: Tensor) -> Tensor:
        """A token from each distribution."""


class GreedyProcessor(LogitsProcessor):
    """The most likely token. Its temperature changes the distribution that `__call__` returns, never the choice."""

    def __init__(self, temperature: float = 1) -> None:
        super().__init__(temperature)

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        """The first of the most likely tokens."""
        return probs.argmax(dim=-1, keepdim=True)


class MultinomialProcessor(LogitsProcessor):
    """A token sampled from the whole vocabulary."""

    def _process(self, logits: Tensor) -> Tensor:
        return logits

    def sample(self, probs: Tensor) -> Tensor:
        """A sample from torch's global generator. probs: [V] or [N, V]."""
        return torch.multinomial(probs, num_samples=1)


class TopKProcessor(MultinomialProcessor):
    """A token sampled from the `top_k` most likely ones and those that tie with the last of them."""

    def __init__(self, temperature: float, top_k: int) -> None:
        super().__init__(temperature)
        self.top_k = _count(top_k)

    def _process(self, logits: Tensor) -> Tensor:
        return _keep_top_k(logits, self.top_k)


class NucleusProcessor(MultinomialProcessor):
    """A token sampled from the nucleus: a token is left out if likelier ones alone have more than `top_p`."""

    def __init__(self, temperature: float, top_p: float) -> None:
        super().__init__(temperature)
        self.top_p = _share(top_p)

    def _process(self, logits: Tensor) -> Tensor:
        return _keep_top_p(logits, self.top_p)


class TopKNucleusProcessor(MultinomialProcessor):
    """A token sampled from the nucleus of the `top_k` most likely ones."""

    def __init__(self, temperature: float, top_k: int, top_p: float) -> None:
        super().__init__(temperature)
        self.top_k, self.top_p = _count(top_k), _share(top_p)

    def _process(self, logits: Tensor) -> Tensor:
        return _keep_top_p(_keep_top_k(logits, self.top_k), self.top_p)


def _keep_top_k(logits: Tensor, top_k: int) -> Tensor:
    last = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
    return logits.masked_fill(logits < last, NEVER)


def _keep_top_p(logits: Tensor, top_p: float) -> Tensor:
    descending, order = logits.sort(dim=-1, descending=True)
    reached = descending.softmax(-1).cumsum(-1)
    removed = torch.nn.functional.pad(reached[..., :-1], (1, 0)) > top_p
    return logits.masked_fill(removed.scatter(-1, order, removed), NEVER)


def _count(top_k: int) -> int:
    check_whole("top_k", top_k, 1)
    return top_k


def _share(top_p: float) -> float:
    if not is_number(top_p, 0, 1):
        raise UsageError(f"top_p={top_p!r}; allowed: a number from 0 to 1")
    return top_p


@runtime_checkable
class Processor(Protocol):
    """The part of a logits processor that the functions use: logits -> probs [1, V], and probs -> token [1, 1]."""

    def __call__(self, logits: Tensor) -> Tensor: ...
    def sample(self, probs: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Sampling:
    """Sampling options, and an acceptance rule; None keeps the decoder's own."""

    params: SamplingParams
    rule: Rule | None = None


@dataclass(frozen=True)
class _LogProbs:
    """A processor's distribution as a Hugging Face logits processor."""

    processor: Processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processor(scores).log().to(scores.dtype)  # some processors return half precision


def check_processor(processor: Any) -> None:
    """UsageError for anything but a processor."""
    if isinstance(processor, type) or not isinstance(processor, Processor):
        name = processor.__name__ if isinstance(processor, type) else type(processor).__name__
        what = "the class" if isinstance(processor, type) else "a"
        raise UsageError(
            f"logits_processor is {what} {name}; allowed: an object with processor(logits) -> probs and "
            "sample(probs) -> token, such as GreedyProcessor()"
        )


def sampling_of(processor: Processor, vocab_size: int, device: torch.device) -> Sampling:
    """The distribution of a processor and its way of sampling. vocab_size, device: of the logits it will see."""
    params = _native(processor)
    if params is not None:
        return Sampling(params)
    _check_answer(processor, vocab_size, device)
    adapted = (_LogProbs(processor),)
    if _draws_like(processor, GreedyProcessor):
        return Sampling(SamplingParams(temperature=0.0, logits_processors=adapted))
    rule = None if _draws_like(processor, MultinomialProcessor) else own_draws(processor)
    return Sampling(SamplingParams(temperature=1.0, logits_processors=adapted), rule)


def _native(processor: Processor) -> SamplingParams | None:
    """Options with the same distribution, if there are any; only for exact types, as a subclass may change it."""
    if type(processor) is GreedyProcessor:
        return SamplingParams(temperature=0.0)
    if type(processor) is MultinomialProcessor:
        return SamplingParams(temperature=processor.temperature)
    if type(processor) is TopKProcessor:
        return SamplingParams(temperature=processor.temperature, top_k=processor.top_k)
    # at a temperature other than 1, our order of temperature and nucleus would give another distribution
    if type(processor) is NucleusProcessor and processor.temperature == 1 and processor.top_p > 0:
        return SamplingParams(temperature=1.0, top_p=processor.top_p)
    if type(processor) is TopKNucleusProcessor and processor.temperature == 1 and processor.top_p > 0:
        return SamplingParams(temperature=1.0, top_k=processor.top_k, top_p=processor.top_p)
    return None


def _draws_like(processor: Processor, kind: type[GreedyProcessor] | type[MultinomialProcessor]) -> bool:
    return isinstance(processor.sample, MethodType) and processor.sample.__func__ is kind.sample


def _check_answer(processor: Processor, vocab_size: int, device: torch.device) -> None:
    """Refuse a processor whose result is not a distribution, or differs between two calls with the same logits."""
    logits = torch.linspace(-3.0, 3.0, vocab_size, dtype=torch.float32, device=device)[None]
    first, second = processor(logits.clone()), processor(logits.clone())
    answer = f"shape {tuple(first.shape)}"
    if first.shape == logits.shape:
        total = float(first.sum())
        if first.min() >= 0 and abs(total - 1) <= TOLERANCE and torch.equal(first, second):
            return
        answer = f"two answers to the same logits, or probabilities with sum {total:g}"
    raise UsageError(
        f"logits_processor {type(processor).__name__} gave {answer}; "
        f"allowed: probabilities of shape (1, {vocab_size}) that depend on the logits alone"
    )


def own_draws(processor: Processor) -> Rule:
    """Sample and match with the processor's own `sample`; exact for any such method.

    A draft token is kept iff the processor sampled the same one; the processor's token is committed either way.
    """

    def distributions(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
        followed = [_follow(processor, p[i], draft.tokens[i, :n].tolist()) for i, n in enumerate(draft.lengths)]
        accepted, following = torch.tensor(followed, device=p.device).T
        token = one_hot(following, p.shape[-1]).to(p.dtype)
        return Distributions(one_hot(accepted, draft.width + 1).double(), lambda _: token)

    return Rule(f"draws of {type(processor).__name__}", True, distributions)


def _follow(processor: Processor, p: Tensor, draft: list[int]) -> tuple[int, int]:
    """Number of draft tokens that the processor samples itself, and the token it samples next. p: [K + 1, V]."""
    for accepted, distribution in enumerate(p):
        token = int(processor.sample(distribution[None]))
        if not 0 <= token < p.shape[-1]:
            raise UsageError(
                f"logits_processor {type(processor).__name__} sampled token {token}; allowed: 0 to {p.shape[-1] - 1}"
            )
        if accepted == len(draft) or token != draft[accepted]:
            return accepted, token
    raise AssertionError("a draft has one token fewer than p has positions")


def _unadjusted(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
    """Lossy: keep as rejection sampling does, then sample from p where (p - q)+ is due."""
    rows = torch.arange(len(p), device=p.device)
    return Distributions(rejection(p, scores, draft).keep, lambda accepted: p[rows, accepted])


UNADJUSTED = Rule("skip-sample-adjustment", False, _unadjusted)
