"""The logits processors of romsto/Speculative-Decoding: from logits to a distribution, and a sample from it.

Truncation comes before the temperature here, as it does there: `NucleusProcessor(0.7, 0.9)` keeps the tokens that
reach 0.9 at temperature 1. (`SamplingParams` and Hugging Face truncate after it.) Shapes: logits and probs
[..., V], samples [..., 1].
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from slipstream.errors import UsageError

NEVER = float("-inf")


class LogitsProcessor(ABC):
    """A distribution, softmax(_process(logits) / temperature), and a way to sample from it.

    Subclasses of your own stay exact too: see `processor_options` in this folder. temperature: > 0, else UsageError.
    """

    def __init__(self, temperature: float) -> None:
        if not _is_number(temperature) or not 0 < temperature < float("inf"):
            raise UsageError(f"temperature={temperature!r}; allowed: a finite number > 0 (GreedyProcessor is greedy)")
        self.temperature = temperature

    def __call__(self, logits: Tensor) -> Tensor:
        """The distribution."""
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
        """A sample by torch's global generator. probs: [V] or [N, V]."""
        return torch.multinomial(probs, num_samples=1)


class TopKProcessor(MultinomialProcessor):
    """A token sampled from the `top_k` most likely ones (and those that tie with the last of them)."""

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


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(top_k: int) -> int:
    if not isinstance(top_k, int) or isinstance(top_k, bool) or top_k < 1:
        raise UsageError(f"top_k={top_k!r}; allowed: a whole number >= 1")
    return top_k


def _share(top_p: float) -> float:
    if not _is_number(top_p) or not 0 <= top_p <= 1:
        raise UsageError(f"top_p={top_p!r}; allowed: a number from 0 to 1")
    return top_p
