"""By default every token is the target's own draw, so that a seed gives the same text with every drafter."""

from collections.abc import Sequence

import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder
from slipstream.core.interfaces import Sampler
from slipstream.core.rng import Stream
from slipstream.core.types import Row, Traits
from tests.support.tiny_models import VOCAB, perturbed, prompts, shared

pytestmark = pytest.mark.slow

PARAMS = [SamplingParams(temperature=0.9, seed=i, max_tokens=24) for i in range(3)]
PLAIN = {"draft": None, "drafter": "none"}


class OwnDraws:
    """Drafts one token from a uniform distribution with random numbers of its own, and declares that it does."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        probs = torch.full((len(rows), 1, VOCAB), 1 / VOCAB)
        tokens = sampler.draw(probs, 0, Stream.DRAFT)
        return Draft(tokens, tuple(min(1, n) for n in lengths), probs)


def texts(**settings: object) -> list[list[int]]:
    decoder = SpeculativeDecoder(shared("llama"), max_batch_size=3, **settings)
    return [result.token_ids for result in decoder.generate(prompts([9, 20, 14]), PARAMS)]


@pytest.mark.each_value
@pytest.mark.parametrize("length", ["auto", "chain", 1, 4])
@pytest.mark.parametrize("drafter", ["model", "hybrid", "layer_skip:1"])
def test_a_seed_gives_the_text_of_plain_decoding_with_every_drafter(drafter: str, length: int | str) -> None:
    draft = None if drafter == "layer_skip:1" else perturbed("llama")
    assert texts(draft=draft, drafter=drafter, num_draft_tokens=length) == texts(**PLAIN)


def test_the_block_rule_is_used_only_on_request() -> None:
    by_block = texts(draft=perturbed("llama"), drafter="model", num_draft_tokens=4, acceptance="block")
    assert by_block != texts(**PLAIN)


def test_a_drafter_that_samples_by_itself_is_not_coupled_to_the_targets_draws() -> None:
    assert not SpeculativeDecoder(shared("llama"), drafter=OwnDraws(), num_draft_tokens=1).coupled
    sampled = texts(drafter=OwnDraws(), num_draft_tokens=1)
    assert sampled == texts(drafter=OwnDraws(), num_draft_tokens=1, acceptance="block")
    assert sampled != texts(**PLAIN) == texts(drafter=OwnDraws(), num_draft_tokens=1, acceptance="match")


def test_a_drafter_object_that_declares_not_to_sample_gives_the_text_of_plain_decoding() -> None:
    class Echo:
        traits = Traits(samples=False, needs_forwards=False)

        def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
            return Draft.from_lists([row.tokens[:n] for row, n in zip(rows, lengths, strict=True)], sampler.device)

    assert SpeculativeDecoder(shared("llama"), drafter=Echo(), num_draft_tokens=3).coupled
    assert texts(drafter=Echo(), num_draft_tokens=3) == texts(**PLAIN)
