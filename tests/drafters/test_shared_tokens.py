"""Drafts of shared tokens carry the distribution they were sampled from, so the text keeps the target's."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Draft
from slipstream.drafters.cross_vocabulary.cross_vocabulary_drafter import SharedTokenDrafter
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_slow
from tests.support.vocabularies import decoder_of, fable_model

PROMPT, RUNS, HOT = "The heron", 1600, 1.6


def make_decoder(rule: str) -> SpeculativeDecoder:
    pair = fable_model("bytes", 1), fable_model("digits", 2)
    options = {"num_draft_tokens": 2, "max_batch_size": 64, "reproducible": False}
    return decoder_of(*pair, drafter="model", acceptance=rule, **options)


def distance(decoder: SpeculativeDecoder) -> float:
    """Total variation between the frequencies of first tokens and the target's own distribution."""
    params = [SamplingParams(max_tokens=3, temperature=HOT, seed=seed) for seed in range(RUNS)]
    results = decoder.generate([PROMPT] * RUNS, params, chat=False)
    counts = Counter(result.token_ids[0] for result in results)
    probs = (decoder.next_logits(decoder.encode(PROMPT, chat=False)).float() / HOT).softmax(-1)
    return float(sum(abs(counts[token] / RUNS - p) for token, p in enumerate(probs.tolist()))) / 2


@pytest.mark.parametrize("rule", mostly_slow(["block", "rejection"], "rejection"))
def test_a_draft_carries_the_renormalised_distribution_over_the_shared_tokens(rule: str) -> None:
    decoder = make_decoder(rule)
    row = decoder.rows([PROMPT], SamplingParams(max_tokens=9, temperature=HOT, seed=5), chat=False)[0]
    bridged = decoder._models.bridged
    assert bridged is not None and isinstance(decoder.drafter, SharedTokenDrafter)
    sampler = Sampler([row], decoder._engine._race, decoder.target.backend.vocab_size, torch.device("cpu"))
    with torch.inference_mode():
        draft = decoder.drafter.propose([row], [2], sampler)
        draft_rows = bridged.draft_rows([row], 2)
        logits = bridged.session.score(draft_rows, torch.empty(1, 0, dtype=torch.int64), [0])[0, 0]
    assert draft.probs is not None and draft.lengths == (2,)
    shared = bridged.bridge.shared
    expected = torch.zeros(decoder.target.backend.vocab_size)
    expected[list(shared)] = (logits[list(shared.values())].float() / HOT).softmax(-1)
    torch.testing.assert_close(draft.probs[0, 0], expected)
    assert len(shared) < decoder.target.backend.vocab_size - 7  # or the test would restrict nothing
    torch.testing.assert_close(draft.probs.sum(-1), torch.ones(1, 2))


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_the_distribution_of_the_text_is_the_targets(rule: str) -> None:
    assert distance(make_decoder(rule)) < 0.12


@pytest.mark.slow
def test_a_distribution_that_is_not_renormalised_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder, real = make_decoder("rejection"), SharedTokenDrafter.propose

    def halved(self: SharedTokenDrafter, rows: object, lengths: object, sampler: object) -> Draft:
        draft = real(self, rows, lengths, sampler)  # type: ignore[arg-type]
        return draft if draft.probs is None else replace(draft, probs=draft.probs * 0.3)

    monkeypatch.setattr(SharedTokenDrafter, "propose", halved)
    assert distance(decoder) > 0.2


def test_nothing_is_drafted_where_the_options_leave_no_shared_token() -> None:
    decoder = make_decoder("block")
    bridged = decoder._models.bridged
    assert bridged is not None
    bias = {token: float("-inf") for token in bridged.bridge.shared}
    params = SamplingParams(max_tokens=6, temperature=1.0, seed=1, logit_bias=bias)
    result = decoder.generate(PROMPT, params, chat=False)
    assert result.stats.num_draft_tokens == 0 and len(result.token_ids) == 6
    assert not set(result.token_ids) & bridged.bridge.shared.keys()
