"""What a round makes the host do, and a reader open, stays small: calls, files, transfers, decoded texts."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from slipstream import SpeculativeDecoder
from tests.support.round_trace import Work, traced

PROMPT, COUNT = "the north wind and the sun were disputing which was the stronger", 40


@pytest.mark.parametrize(
    ("draft", "settings", "most"),
    [
        (None, {"drafter": "none"}, Work(72, 43, 24, 17)),
        (None, {"drafter": "ngram", "num_draft_tokens": 7}, Work(106, 59, 26, 17)),
        ("toy:2", {"drafter": "model", "num_draft_tokens": 4}, Work(230, 130, 27, 21)),
    ],
    ids=["plain", "ngram@7", "model@4"],
)
def test_a_round_makes_few_calls_in_few_files(draft: str | None, settings: dict[str, Any], most: Work) -> None:
    decoder = SpeculativeDecoder("toy", draft, **settings)
    decoder.generate(PROMPT, max_tokens=COUNT)  # the first call builds what is kept
    work = traced(lambda: decoder.generate(PROMPT, max_tokens=COUNT))
    print(work)
    assert work.calls <= most.calls and work.moves <= most.moves
    assert work.files <= most.files and work.depth <= most.depth


def test_a_round_with_a_draft_model_makes_one_transfer_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts tensors that are read outside the models themselves."""
    decoder = SpeculativeDecoder("toy", "toy:2", drafter="model", num_draft_tokens=4)
    decoder.generate(PROMPT, max_tokens=COUNT)
    transfers, to_list = list[str](), torch.Tensor.tolist

    def counted(tensor: torch.Tensor) -> Any:
        caller = sys._getframe(1).f_code
        if "/models/" not in caller.co_filename:
            transfers.append(caller.co_qualname)
        return to_list(tensor)

    monkeypatch.setattr(torch.Tensor, "tolist", counted)
    result = decoder.generate(PROMPT, max_tokens=COUNT)
    assert transfers == ["RowOutcome.read"] * len(result.rounds)
