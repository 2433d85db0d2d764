"""A spelled tree where a text ends: the chain is as deep as it may be, and no round more is needed than for a chain."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.tiny_models import fresh, prompts


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [8, 11, 12, 13])
def test_a_tree_takes_no_more_rounds_than_its_chain(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    own = fresh("llama"), fresh("llama")  # a draft model that is always right
    chain = SpeculativeDecoder(*own, drafter="model", num_draft_tokens=4, fast=True)
    tree = chain.using("model", num_draft_tokens="4x2")
    expected, found = (decoder.generate(prompts((9,))[0], params) for decoder in (chain, tree))
    assert found.token_ids == expected.token_ids
    assert len(found.rounds) == len(expected.rounds)
    assert any(done.parents for done in found.rounds)
    left = [max_tokens + 9 - done.start for done in found.rounds]
    assert all(len(done.draft) <= max(0, most - 1) for done, most in zip(found.rounds, left, strict=True))
