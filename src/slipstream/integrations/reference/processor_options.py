"""From a logits processor to sampling options, and to an acceptance rule where the options do not say it all.

A processor has a distribution, `processor(logits)`, and a way to sample from it, `processor.sample(probs)`. The
distribution becomes `SamplingParams`:
natively for this package's own processors, else as a logits processor that answers with log-probabilities. The draw
is the engine's where the processor inherits it; a processor's own draw is kept exact by sample-and-match.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from types import MethodType
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from slipstream.core.acceptance import Distributions, Rule, rejection
from slipstream.core.types import Draft
from slipstream.errors import UsageError
from slipstream.integrations.reference.logits_processor import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    TopKNucleusProcessor,
    TopKProcessor,
)
from slipstream.sampling.params import SamplingParams

TOLERANCE = 1e-3  # of the sum of a processor's probabilities; half precision is allowed


@runtime_checkable
class Processor(Protocol):
    """What is asked of a logits processor: probabilities [1, V] from logits [1, V], and a token [1, 1] from those."""

    def __call__(self, logits: Tensor) -> Tensor:
        """The distribution."""

    def sample(self, probs: Tensor) -> Tensor:
        """A token sampled in the processor's own way."""


@dataclass(frozen=True)
class Sampling:
    """Sampling options, and the acceptance rule to use where it is not the decoder's own choice."""

    params: SamplingParams
    rule: Rule | None = None

    @property
    def greedy(self) -> bool:
        """Whether every position has one possible token."""
        return self.params.temperature == 0


@dataclass(frozen=True)
class _LogProbs:
    """A processor's distribution as a Hugging Face logits processor."""

    processor: Processor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.processor(scores).log().to(scores.dtype)  # some answer in half precision


def check_processor(processor: Any) -> Processor:
    """The processor, or UsageError if it is none."""
    if isinstance(processor, type) or not isinstance(processor, Processor):
        name = processor.__name__ if isinstance(processor, type) else type(processor).__name__
        what = "the class" if isinstance(processor, type) else "a"
        raise UsageError(
            f"logits_processor is {what} {name}; allowed: an object with processor(logits) -> probs and "
            "sample(probs) -> token, such as GreedyProcessor()"
        )
    return processor


def sampling_of(processor: Processor, vocab_size: int, device: torch.device) -> Sampling:
    """The distribution of a processor and how it samples. vocab_size, device: those of the logits it will see."""
    params = _native(processor)
    if params is not None:
        return Sampling(params)
    _check_answer(processor, vocab_size, device)
    adapted = (_LogProbs(processor),)
    if _draws_like(processor, GreedyProcessor):
        return Sampling(SamplingParams(temperature=0.0, logits_processors=adapted))
    own = None if _draws_like(processor, MultinomialProcessor) else own_draws(processor)
    return Sampling(SamplingParams(temperature=1.0, logits_processors=adapted), own)


def _native(processor: Processor) -> SamplingParams | None:
    """Options with the same distribution, if there are any; exact types only: a subclass may change it."""
    if type(processor) is GreedyProcessor:
        return SamplingParams(temperature=0.0)
    if type(processor) is MultinomialProcessor:
        return SamplingParams(temperature=processor.temperature)
    if type(processor) is TopKProcessor:
        return SamplingParams(temperature=processor.temperature, top_k=processor.top_k)
    # the order of temperature and nucleus does not matter at 1 only
    if type(processor) is NucleusProcessor and processor.temperature == 1 and processor.top_p > 0:
        return SamplingParams(temperature=1.0, top_p=processor.top_p)
    if type(processor) is TopKNucleusProcessor and processor.temperature == 1 and processor.top_p > 0:
        return SamplingParams(temperature=1.0, top_k=processor.top_k, top_p=processor.top_p)
    return None


def _draws_like(processor: Processor, kind: type[GreedyProcessor] | type[MultinomialProcessor]) -> bool:
    return isinstance(processor.sample, MethodType) and processor.sample.__func__ is kind.sample


def _check_answer(processor: Processor, vocab_size: int, device: torch.device) -> None:
    """Refuse a processor that answers with anything but a distribution, or with two of them for the same logits."""
    logits = torch.linspace(-3.0, 3.0, vocab_size, dtype=torch.float32, device=device)[None]
    first, second = processor(logits.clone()), processor(logits.clone())
    found = f"shape {tuple(first.shape)}"
    if first.shape == logits.shape:
        total = float(first.sum())
        if first.min() >= 0 and abs(total - 1) <= TOLERANCE and torch.equal(first, second):
            return
        found = f"two answers to the same logits, or probabilities of sum {total:g}"
    raise UsageError(
        f"logits_processor {type(processor).__name__} gave {found}; "
        f"allowed: probabilities of shape (1, {vocab_size}) that depend on the logits alone"
    )


def own_draws(processor: Processor) -> Rule:
    """Sample and match with the processor's own `sample`: exact whatever that does.

    A draft token is kept iff the processor sampled the same one; the processor's token is committed either way.
    """

    def distributions(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
        followed = [_follow(processor, p[i], draft.tokens[i, :n].tolist()) for i, n in enumerate(draft.lengths)]
        accepted, following = torch.tensor(followed, device=p.device).T
        token = one_hot(following, p.shape[-1]).to(p.dtype)
        return Distributions(one_hot(accepted, draft.width + 1).double(), lambda _: token)

    return Rule(f"draws of {type(processor).__name__}", True, distributions)


def _follow(processor: Processor, p: Tensor, draft: list[int]) -> tuple[int, int]:
    """How many draft tokens the processor samples itself, and what it samples next. p: [K + 1, V]."""
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
    return Distributions(rejection(p, scores, draft).keep, partial(_at, p))


def _at(p: Tensor, accepted: Tensor) -> Tensor:
    return p[torch.arange(len(p), device=p.device), accepted]


UNADJUSTED = Rule("skip-sample-adjustment", False, _unadjusted)
