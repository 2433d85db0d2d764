"""Text sampled through the reference signatures follows the processor's distribution as the references define it."""

import logging
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, Stats
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.integrations.reference import (
    LogitsProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    SpeculativeDecoder,
    TopKNucleusProcessor,
    TopKProcessor,
    speculative_generate,
    speculative_generate_batch,
)
from slipstream.integrations.reference import logits_processor as distribution
from slipstream.sampling.sampler import Sampler
from tests.support.chi_square import COUNT, PROMPT, SUSPICIOUS, VOCAB, Array, close, counts, model, p_value

pytestmark = pytest.mark.slow

RUNS = 400

# the user's own processors


class Sharpened(LogitsProcessor):
    """A user's processor that edits its input in place and draws its own samples."""

    def _process(self, logits: Tensor) -> Tensor:
        logits[..., 2] = -1e20
        return logits.mul_(2)

    def sample(self, probs: Tensor) -> Tensor:
        return (probs.cumsum(-1) < torch.rand(1)).sum(-1, keepdim=True).clamp(max=VOCAB - 1)


class Peaked(MultinomialProcessor):
    """A user's processor that samples like a known one."""

    def _process(self, logits: Tensor) -> Tensor:
        return logits * logits.abs()


class Inherited(NucleusProcessor):
    """A user's processor derived from a known one, with another distribution only."""

    def __call__(self, logits: Tensor) -> Tensor:
        return 0.5 * super().__call__(logits) + 0.5 / logits.shape[-1]


# the references' formulas, transcribed token by token


def truncated(logits: Array, temperature: float, top_k: int = VOCAB, top_p: float = 1.0) -> Array:
    order = np.argsort(-logits)[:top_k]
    kept, weights = [], np.exp(logits[order])
    for token, before in zip(order, np.cumsum(weights / weights.sum()) - weights / weights.sum(), strict=True):
        if before <= top_p:
            kept.append(token)
    probs = np.zeros_like(logits)
    probs[kept] = np.exp(logits[kept] / temperature)
    return probs / probs.sum()


def sharpened(logits: Array) -> Array:
    probs = np.exp(logits * 4 / 3) * (np.arange(VOCAB) != 2)
    return probs / probs.sum()


def peaked(logits: Array) -> Array:
    probs = np.exp(logits * np.abs(logits) / 2.0)
    return probs / probs.sum()


Formula = Callable[[Array], Array]
PROCESSORS: dict[str, tuple[Any, Formula]] = {
    "multinomial": (MultinomialProcessor(1.3), lambda x: truncated(x, 1.3)),
    "top-k": (TopKProcessor(1.5, 4), lambda x: truncated(x, 1.5, 4)),
    "nucleus": (NucleusProcessor(1.0, 0.85), lambda x: truncated(x, 1.0, top_p=0.85)),
    "warm nucleus": (NucleusProcessor(1.8, 0.7), lambda x: truncated(x, 1.8, top_p=0.7)),
    "both": (TopKNucleusProcessor(1.0, 5, 0.9), lambda x: truncated(x, 1.0, 5, 0.9)),
    "warm both": (TopKNucleusProcessor(1.8, 4, 0.8), lambda x: truncated(x, 1.8, 4, 0.8)),
    "plain": (MultinomialProcessor(1.0), lambda x: truncated(x, 1.0)),
    "hot": (MultinomialProcessor(2.5), lambda x: truncated(x, 2.5)),
    "own draws": (Sharpened(1.5), sharpened),
    "own process": (Peaked(2.0), peaked),
    "own distribution": (Inherited(1.0, 0.6), lambda x: 0.5 * truncated(x, 1.0, top_p=0.6) + 0.5 / VOCAB),
}


@cache
def target_logits() -> Array:
    """[VOCAB ** (COUNT - 1), positions, VOCAB] after PROMPT and every context."""
    contexts = torch.tensor(list(product(range(VOCAB), repeat=COUNT - 1)))
    ids = torch.cat([torch.tensor([PROMPT]).expand(len(contexts), -1), contexts], dim=1)
    with torch.no_grad():
        logits: Array = model("llama")(ids, attention_mask=torch.ones_like(ids)).logits.numpy()
    return logits


@cache
def exact_distribution(name: str) -> Array:
    """[VOCAB ** COUNT] the probability of every continuation of PROMPT under a formula."""
    probs = np.ones(1)
    for j in range(COUNT):
        rows = target_logits()[:: VOCAB ** (COUNT - 1 - j), len(PROMPT) - 1 + j]
        following = np.stack([PROCESSORS[name][1](row) for row in rows])
        probs = (probs[:, None] * following).reshape(-1)
    return probs


def observe(name: str, runs: int = RUNS, **options: Any) -> tuple[list[list[int]], list[Stats]]:
    """Continuations of PROMPT and their statistics."""
    torch.manual_seed(11)
    texts, _, stats = speculative_generate_batch(
        [PROMPT] * runs,
        close("llama"),
        model("llama"),
        gamma=2,
        logits_processor=PROCESSORS[name][0],
        max_gen_len=COUNT,
        eos_tokens_id=None,
        **options,
    )
    return texts, stats


observed = cache(observe)


def matches(texts: list[list[int]], name: str) -> bool:
    """Whether a chi-square test accepts that the texts follow a formula's distribution."""
    return p_value(counts(texts), exact_distribution(name)) > SUSPICIOUS


# processors with native options are compared digit by digit below
SAMPLED = ("own draws", "own distribution")


@pytest.mark.parametrize(
    "name",
    [
        name if name in SAMPLED else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in PROCESSORS
        if name != "hot"
    ],
)
def test_sampled_text_follows_the_processors_distribution(name: str) -> None:
    texts, stats = observed(name)
    assert matches(texts, name)
    assert all(stat.lossless for stat in stats)
    assert sum(s.num_accepted_tokens for s in stats) > RUNS / 6 < sum(s.num_rejected_rounds for s in stats)


@pytest.mark.parametrize("name", [pytest.param("multinomial", marks=pytest.mark.exhaustive), "warm nucleus"])
def test_skipping_the_adjustment_is_caught_and_announced_as_lossy(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "slipstream"):
        texts, stats = observe(name, RUNS, skip_sample_adjustment=True)
    assert not matches(texts, name) and not any(stat.lossless for stat in stats)
    assert [record.getMessage()[:39] for record in caplog.records] == ["skip_sample_adjustment=True is lossy: t"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "other"), [("top-k", "hot"), ("own draws", "hot"), ("own distribution", "nucleus")])
def test_another_distribution_is_caught(name: str, other: str) -> None:
    assert not matches(observed(name)[0], other)


@pytest.mark.exhaustive
def test_a_second_draw_after_a_mismatch_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def redraw(processor: Any, p: Tensor, draft: list[int]) -> tuple[int, int]:
        kept = right(processor, p, draft)[0]
        return kept, int(processor.sample(p[kept][None]))

    right = distribution._follow
    monkeypatch.setattr(distribution, "_follow", redraw)
    assert not matches(observe("own draws", 2 * RUNS)[0], "own draws")


@pytest.mark.exhaustive
def test_decode_samples_from_the_full_softmax() -> None:
    torch.manual_seed(3)
    decoder = SpeculativeDecoder(model("llama"), close("llama"), draft_tokens=2)
    texts = [decoder.decode(torch.tensor([PROMPT]), COUNT)[0, len(PROMPT) :].tolist() for _ in range(RUNS // 4)]
    assert matches(texts, "plain")
    assert not matches(texts, "hot")


@pytest.mark.parametrize("name", ["multinomial", "top-k", "nucleus", "both"])
def test_a_processor_run_as_native_options_has_the_same_distribution(name: str) -> None:
    """The fast path is compared with the slow one directly, as frequencies could not show small differences."""
    processor = PROCESSORS[name][0]
    assert distribution._native(processor) is not None
    kind = type(processor)
    slow = type(f"Own{kind.__name__}", (kind,), {})(**vars(processor))
    assert distribution._native(slow) is None
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0)) * 3
    distributions = [
        _distribution(distribution.sampling_of(p, VOCAB, torch.device("cpu")).params, logits) for p in (processor, slow)
    ]
    expected = np.stack([PROCESSORS[name][1](row) for row in logits.double().numpy()])
    assert np.abs(distributions[0] - expected).max() < 1e-6 and np.abs(distributions[1] - expected).max() < 1e-6


def _distribution(params: SamplingParams, logits: Tensor) -> Array:
    rows = [Row(i, [0], params, 0) for i in range(len(logits))]
    cpu = torch.device("cpu")
    sampler = Sampler(rows, Race(VOCAB, cpu), VOCAB, cpu)
    nothing = torch.empty(len(rows), 0, dtype=torch.int64)
    return sampler.probs(sampler.scores(logits[:, None], nothing))[:, 0].numpy()


def test_a_single_prompt_gives_the_result_of_a_batch_of_one() -> None:
    for name in ("plain", "warm nucleus", "own draws"):
        outcomes = []
        for is_single in (True, False):
            torch.manual_seed(4)
            options: dict[str, Any] = {
                "logits_processor": PROCESSORS[name][0],
                "eos_tokens_id": None,
                "max_gen_len": 12,
            }
            models = close("llama"), model("llama")
            if is_single:
                outcomes.append(speculative_generate(PROMPT, *models, **options))
            else:
                ids, rates, _ = speculative_generate_batch([PROMPT], *models, **options)
                outcomes.append((ids[0], rates[0]))
        assert outcomes[0] == outcomes[1] and len(outcomes[0][0]) == 12
