"""Spelled trees near the end of a text: their chain is as deep as the text allows, so they take no extra round."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.tiny_models import fresh, prompts


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [8, 11, 12, 13])
def test_a_tree_takes_no_more_rounds_than_its_chain(max_tokens: int) -> None:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    models = fresh("llama"), fresh("llama")  # a draft model that is always right
    chain = SpeculativeDecoder(*models, drafter="model", num_draft_tokens=4, fast=True)
    tree = chain.using("model", num_draft_tokens="4x2")
    with_chain, with_tree = (decoder.generate(prompts((9,))[0], params) for decoder in (chain, tree))
    assert with_tree.token_ids == with_chain.token_ids
    assert len(with_tree.rounds) == len(with_chain.rounds)
    assert any(round.parents for round in with_tree.rounds)
    tokens_left = [max_tokens + 9 - round.start for round in with_tree.rounds]
    assert all(
        len(round.draft) <= max(0, max_tokens_left - 1)
        for round, max_tokens_left in zip(with_tree.rounds, tokens_left, strict=True)
    )
