"""`n` texts of one prompt: each is the text that its seed gives by itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder, UsageError

PARAMS = SamplingParams(temperature=1.0, max_tokens=30, seed=5, n=4)
ALONE = replace(PARAMS, n=1)


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", num_draft_tokens=3, acceptance="match", max_batch_size=3)


def test_each_samples_seed_reproduces_it(decoder: SpeculativeDecoder) -> None:
    result = decoder.generate("The heron", PARAMS)
    samples = [result, *result.alternatives]
    assert result.seed == 5 and len({sample.seed for sample in samples}) == 4 == len(samples)
    assert len({sample.text for sample in samples}) > 1
    for sample in samples:
        again = decoder.generate("The heron", replace(ALONE, seed=sample.seed))
        assert (again.text, again.token_ids, again.seed) == (sample.text, sample.token_ids, sample.seed)
        assert not again.alternatives


def test_samples_of_a_list_of_prompts_stay_with_their_prompt(decoder: SpeculativeDecoder) -> None:
    prompts: list[Any] = ["The heron", "A sparrow", [65, 66]]
    params = [replace(PARAMS, n=2), ALONE, replace(PARAMS, n=3, seed=None)]
    results = decoder.generate(prompts, params)
    assert [len(result.alternatives) for result in results] == [1, 0, 2]
    for prompt, result in zip(prompts, results, strict=True):
        for sample in [result, *result.alternatives]:
            assert sample.prompt_token_ids == decoder.encode(prompt, chat=True)
            assert sample.token_ids == decoder.generate(prompt, replace(ALONE, seed=sample.seed)).token_ids
    assert [alternative["seed"] for alternative in results[0].to_dict()["alternatives"]] == [
        results[0].alternatives[0].seed
    ]


def test_streams_and_rows_refuse_several_texts_per_prompt(decoder: SpeculativeDecoder) -> None:
    for use in (lambda: next(decoder.stream("a", PARAMS)), lambda: decoder.rows(["a"], PARAMS)):
        with pytest.raises(UsageError, match=r"^n=4; allowed: 1"):
            use()
