"""Whether a drafter draws its tokens from a law or looks them up, found out by asking it for drafts."""

from __future__ import annotations

from torch import Tensor

from slipstream.core.acceptance import Distributions, Rule, block
from slipstream.core.types import Draft
from slipstream.decoder import SpeculativeDecoder
from slipstream.sampling.params import SamplingParams

# one text that repeats itself, in which something can be looked up, and one in which nothing can
PROMPTS = ([0, 1, 2, 3] * 4, [0])
PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=0, ignore_eos=True)


def draws(decoder: SpeculativeDecoder) -> bool:
    """Whether any draft of two short sampled texts has a law beside its tokens (`Draft.probs`); else all are one-hot.

    A drafter that only sometimes draws counts as drawing as soon as it does so here. The decoder's memory is empty
    afterwards.
    """
    distributions: list[Tensor | None] = []

    def watched(p: Tensor, scores: Tensor, draft: Draft) -> Distributions:
        distributions.append(draft.probs)
        return block(p, scores, draft)

    decoder.using(acceptance=Rule("block", lossless=True, distributions=watched)).generate(
        list(map(list, PROMPTS)), PARAMS
    )
    decoder.forget()
    return any(distribution is not None for distribution in distributions)
