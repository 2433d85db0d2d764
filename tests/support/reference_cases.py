"""A pair of tiny models and a short call, for the tests of the reference signatures."""

from collections.abc import Sequence
from typing import Any

from slipstream.integrations.reference import speculative_generate
from tests.support.tiny_models import perturbed, prompts, shared, tokenizer

WORDS = tokenizer()
PROMPTS = prompts([5, 17, 9, 30])


def pair() -> tuple[Any, Any]:
    """Target and drafter."""
    return shared("qwen2"), perturbed("qwen2")


def greedy(
    prompt: Sequence[Any], gamma: int = 4, models: tuple[Any, Any] | None = None, **options: Any
) -> tuple[list[int], float]:
    """A greedy call. models: drafter and target, in the order of the signature."""
    drafter, target = models or pair()[::-1]
    return speculative_generate(prompt, drafter, target, gamma=gamma, **{"eos_tokens_id": None, **options})
