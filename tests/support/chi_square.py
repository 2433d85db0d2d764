"""A target's distribution from its own teacher-forced logits, and a chi-square test of runs against it.

The models are tiny, random and in double precision, so that shapes of forwards do not matter; their vocabulary is so
small that all continuations can be enumerated. The options are applied by transformers, not by the code under test.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rounds import Round
from tests.support.tiny_models import WINDOW, fresh

VOCAB = 7
COUNT = 5  # the first comes from the prompt's forward and is never drafted
# every token occurs, so a lookup always finds something; longer than the sliding window of Gemma-3
PROMPT = [1, 6, 5, 2, 4, 3, 0, 1, 6, 4, 4, 1, 6, 4, 4]
RUNS = 400
FEWEST = 5.0  # expected runs in a cell; smaller cells are pooled with their neighbors
SUSPICIOUS = 1e-4  # the chance that a right loop fails; the seeds are fixed, so a test always passes or always fails

Array = NDArray[np.float64]

# each architecture with its own options; together they cover all kinds of options
OPTIONS = {
    "llama": SamplingParams(temperature=1.5, top_p=0.85, max_tokens=COUNT),
    "gpt2": SamplingParams(temperature=0.9, presence_penalty=1.5, frequency_penalty=0.8, max_tokens=COUNT),
    "gemma3": SamplingParams(temperature=0.7, top_k=4, max_tokens=COUNT),
}
assert len(PROMPT) > WINDOW  # of Gemma-3


@cache
def model(name: str, seed: int = 0) -> Any:
    """A tiny target; with another seed, an unrelated draft model."""
    return fresh(name, seed, torch.float64, vocab_size=VOCAB)


@cache
def close(name: str, scale: float = 0.15) -> Any:
    """A copy of `model(name)` with noise on its weights: a draft model that is right much of the time."""
    noisy = copy.deepcopy(model(name))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in noisy.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=weight.dtype)
            weight += scale * weight.std().nan_to_num() * noise
    return noisy


class _Penalties(LogitsProcessor):
    """Presence and frequency penalty on the tokens after PROMPT, as OpenAI defines them."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        counts = (input_ids[:, len(PROMPT) :, None] == torch.arange(VOCAB)).sum(1)
        return scores - self.presence * (counts > 0) - self.frequency * counts


def _processors(params: SamplingParams) -> LogitsProcessorList:
    processors = LogitsProcessorList([_Penalties(params.presence_penalty, params.frequency_penalty)])
    processors.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    return processors


@cache
def exact_distribution(name: str) -> Array:
    """[VOCAB ** COUNT] the probability of every continuation of PROMPT, the last token varying fastest."""
    contexts = torch.tensor(list(product(range(VOCAB), repeat=COUNT - 1)))
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(contexts), -1), contexts], dim=1)
    with torch.no_grad():
        logits = model(name)(ids, attention_mask=torch.ones_like(ids)).logits
    processors, distribution = _processors(OPTIONS[name]), np.ones(1)
    for j in range(COUNT):
        # contexts that share their first j tokens stand in blocks with equal logits at position j
        first = slice(None, None, VOCAB ** (COUNT - 1 - j))
        n = len(PROMPT) + j
        following = processors(ids[first, :n], logits[first, n - 1]).softmax(-1).numpy()
        distribution = (distribution[:, None] * following).reshape(-1)
    return distribution


def p_value(observed: Array, distribution: Array) -> float:
    """Chi-square test of counts per cell; neighboring cells are pooled until each has FEWEST expected runs.

    Cells are in the order of enumeration, so those pooled mostly share their first tokens. 0 if something impossible
    was observed.
    """
    if observed[distribution == 0].any():
        return 0.0
    cells = [[0.0, 0.0]]
    for expected, count in zip(distribution * observed.sum(), observed, strict=True):
        if cells[-1][0] >= FEWEST:
            cells.append([0.0, 0.0])
        cells[-1][0] += expected
        cells[-1][1] += count
    if cells[-1][0] < FEWEST:
        last = cells.pop()
        cells[-1] = [cells[-1][0] + last[0], cells[-1][1] + last[1]]
    statistic = sum((count - expected) ** 2 / expected for expected, count in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def counts(texts: Sequence[Sequence[int]]) -> Array:
    """How often each continuation was generated, in the order of `exact_distribution`."""
    places = VOCAB ** np.arange(COUNT)[::-1]
    return np.bincount(np.array(texts) @ places, minlength=VOCAB**COUNT).astype(float)


@dataclass(frozen=True)
class Runs:
    """Continuations of PROMPT, one per seed, and the rounds they came from."""

    name: str
    texts: list[list[int]]
    rounds: list[Round]

    @property
    def p_value(self) -> float:
        """The probability of a deviation from the target's distribution that is at least as large."""
        return p_value(counts(self.texts), exact_distribution(self.name))


def observe(decoder: SpeculativeDecoder, name: str, seeds: Sequence[int] = range(RUNS)) -> Runs:
    """One run for every seed."""
    results = decoder.generate([PROMPT] * len(seeds), [replace(OPTIONS[name], seed=seed) for seed in seeds])
    texts = [result.token_ids for result in results]
    return Runs(name, texts, [round for result in results for round in result.rounds])
