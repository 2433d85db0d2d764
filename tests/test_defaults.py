"""What "auto" means: which drafter, how many tokens, and who stops early."""

import pytest

from slipstream import SpeculativeDecoder
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.drafters.model import THRESHOLD, ModelDrafter
from slipstream.drafters.suffix import SuffixDrafter


def test_without_a_draft_model_drafts_are_looked_up() -> None:
    decoder = SpeculativeDecoder("toy")
    assert decoder.drafter_name == "suffix" and isinstance(decoder.drafter, SuffixDrafter)
    assert decoder.drafter.outputs > 0


def test_with_one_the_draft_model_drafts() -> None:
    decoder = SpeculativeDecoder("toy", "toy:2")
    assert decoder.drafter_name == "model" and isinstance(decoder.drafter, ModelDrafter)
    assert decoder.drafter.threshold == THRESHOLD


def test_hybrid_looks_up_in_the_rows_own_text_and_stops_the_draft_model_early() -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", drafter="hybrid")
    assert isinstance(decoder.drafter, HybridDrafter)
    assert isinstance(decoder.drafter.first, SuffixDrafter) and decoder.drafter.first.outputs == 0
    assert isinstance(decoder.drafter.second, ModelDrafter) and decoder.drafter.second.threshold == THRESHOLD


@pytest.mark.parametrize(("count", "threshold"), [("auto", THRESHOLD), (4, 0.0)])
def test_the_draft_model_stops_early_unless_told_how_many_tokens(count: int | str, threshold: float) -> None:
    decoder = SpeculativeDecoder("toy", "toy:2", drafter="model", num_draft_tokens=count)
    assert isinstance(decoder.drafter, ModelDrafter) and decoder.drafter.threshold == threshold


def test_a_threshold_of_ones_own_holds_with_any_number() -> None:
    for count in ("auto", 4):
        decoder = SpeculativeDecoder("toy", "toy:2", drafter="model:p=25", num_draft_tokens=count)
        assert isinstance(decoder.drafter, ModelDrafter) and decoder.drafter.threshold == 0.25
