"""Log-probabilities of a prompt's own tokens are those of the target after each prefix."""

from __future__ import annotations

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row

PROMPT = "a heron, a stone, a fish"


def scored(decoder: SpeculativeDecoder, budget: int, disturb: bool = False) -> tuple[Row, list[float]]:
    (row,), scores = decoder.rows([PROMPT], SamplingParams(max_tokens=4), chat=False), None
    while scores is None or not scores.finished:
        scores = decoder.score_prompt(scores, row, 2, budget)
        if disturb:
            (other,), disturb = decoder.rows(["other words"], chat=False), False
            decoder.score_prompt(None, other, 0, 1)  # in the same slot
    assert all(len(value.top) == 2 for value in scores.values)
    return row, [value.logprob for value in scores.values]


@pytest.mark.parametrize("reproducible", [True, False])
def test_each_token_is_scored_after_those_before_it(reproducible: bool) -> None:
    decoder = SpeculativeDecoder("toy", max_batch_size=2, reproducible=reproducible)
    row, values = scored(decoder, budget=1000)
    expected = [
        float(torch.log_softmax(decoder.next_logits(row.tokens[:count]).float(), -1)[row.tokens[count]])
        for count in range(1, len(row.tokens))
    ]
    assert values == pytest.approx(expected, abs=1e-5)


def test_steps_and_other_rows_in_the_slot_change_nothing() -> None:
    decoder = SpeculativeDecoder("toy", max_batch_size=2)
    _, values = scored(decoder, budget=1000)
    assert scored(decoder, budget=5)[1] == scored(decoder, budget=5, disturb=True)[1] == values
    assert decoder.generate(PROMPT, chat=False, max_tokens=5).token_ids
