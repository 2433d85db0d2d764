"""What a round makes the host do, and a reader open, stays small: calls, files, transfers, decoded texts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
import torch

from slipstream import SpeculativeDecoder
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import Planner
from slipstream.models.toy import ToyTokenizer
from slipstream.text.detokenizer import MAX_CONTEXT
from tests.support.round_trace import Work, traced

PROMPT, NUM_TOKENS = "the north wind and the sun were disputing which was the stronger", 40


def with_fixed_costs(decoder: SpeculativeDecoder) -> SpeculativeDecoder:
    """The decoder, whose planner decides by costs and a clock that do not depend on the machine."""
    engine, ticks = decoder._engine, count()
    engine.now = lambda: next(ticks) * 1e-3
    if isinstance(engine.policy, Planner):
        engine.policy.costs = CostModel(measured={1: 1.0, 8: 4.0, 64: 30.0}, steps={1: 0.2, 8: 0.4}, token=0.02)
    return decoder


@pytest.mark.parametrize(
    ("draft", "settings", "most"),
    [
        (None, {"drafter": "none"}, Work(56, 34, 22, 14)),
        (None, {"drafter": "ngram", "num_draft_tokens": 7}, Work(81, 48, 24, 14)),
        # a few rounds read the prompt, and all tokens of the first call's output
        (None, {"drafter": "suffix", "num_draft_tokens": 7}, Work(241, 70, 27, 15)),
        ("toy:2", {"drafter": "model", "num_draft_tokens": 4}, Work(162, 87, 24, 17)),
        # the text of the first call is drafted again in a few rounds; half of the calls are for single tokens of drafts
        (None, {}, Work(248, 113, 28, 15)),
        ("toy:2", {}, Work(188, 100, 30, 17)),
    ],
    ids=["plain", "ngram@7", "suffix@7", "model@4", "auto", "auto with a draft model"],
)
def test_a_round_makes_few_calls_in_few_files(draft: str | None, settings: dict[str, Any], most: Work) -> None:
    decoder = with_fixed_costs(SpeculativeDecoder("toy", draft, **settings))
    decoder.generate(PROMPT, max_tokens=NUM_TOKENS)  # the first call builds what is kept
    work = traced(lambda: decoder.generate(PROMPT, max_tokens=NUM_TOKENS))
    print(work)
    assert work.calls <= most.calls and work.moves <= most.moves
    assert work.files <= most.files and work.depth <= most.depth


def test_a_round_with_a_draft_model_makes_one_transfer_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts tensors that are read outside the models themselves."""
    decoder = SpeculativeDecoder("toy", "toy:2", drafter="model", num_draft_tokens=4)
    decoder.generate(PROMPT, max_tokens=NUM_TOKENS)
    transfers, to_list = list[str](), torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        caller = sys._getframe(1).f_code
        if "/models/" not in caller.co_filename:
            transfers.append(caller.co_qualname)
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    result = decoder.generate(PROMPT, max_tokens=NUM_TOKENS)
    assert transfers == ["RowOutcome.read"] * len(result.rounds)


@pytest.mark.parametrize("stop", [[], ["zzzz"]], ids=["no stop", "stop"])
@pytest.mark.parametrize("streams", [False, True], ids=["generate", "stream"])
@pytest.mark.parametrize("settings", [{"drafter": "none"}, {"drafter": "ngram", "num_draft_tokens": 7}], ids=str)
def test_a_round_is_decoded_once(
    streams: bool, stop: list[str], settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, num_decoded, decode = SpeculativeDecoder("toy", **settings), list[int](), ToyTokenizer.decode

    def counted(tokenizer: ToyTokenizer, ids: Sequence[int]) -> str:
        num_decoded.append(len(ids))
        return decode(tokenizer, ids)

    monkeypatch.setattr(ToyTokenizer, "decode", counted)
    if streams:
        stream = decoder.stream(PROMPT, max_tokens=NUM_TOKENS, stop=stop)
        assert len(list(stream)) == len(stream.result.rounds)
        result = stream.result
    else:
        result = decoder.generate(PROMPT, max_tokens=NUM_TOKENS, stop=stop)
    num_moves = NUM_TOKENS // MAX_CONTEXT  # of the ids that give context
    assert len(num_decoded) <= (len(result.rounds) + num_moves if streams or stop else 1)
