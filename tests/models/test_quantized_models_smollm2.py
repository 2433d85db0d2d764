"""SmolLM2 quantized at load: no draft changes its texts."""

from __future__ import annotations

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.markers import needs_avx2

pytestmark = [
    pytest.mark.smollm2,
    pytest.mark.slow,
    needs_avx2,
]
QUESTIONS = ["List the days of the week, twice.", "Why is the sky blue?"]


def test_drafts_change_no_text_of_the_quantized_model() -> None:
    decoder = SpeculativeDecoder("smollm2", quantize="int4")
    assert decoder.target.name == "smollm2 quantized to int4, group 32"
    assert decoder.target.arithmetic == "Q8_0+int4 group 32 blocks, int8 activations"
    params = SamplingParams(max_tokens=16)
    plain = [decoder.using("none").generate(prompt, params) for prompt in QUESTIONS]
    drafted = decoder.using("ngram", num_draft_tokens=6).generate(QUESTIONS, params)
    assert [result.token_ids for result in drafted] == [result.token_ids for result in plain]
    assert plain[0].text != plain[1].text and drafted[0].stats.num_accepted_tokens > 0
