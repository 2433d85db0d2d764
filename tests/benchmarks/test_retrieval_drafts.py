"""The benchmark of retrieval drafters on a tiny transformer: who learned what, and what is counted."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import policy_change
import pytest
import retrieval_drafts

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.rounds import Round, Seconds
from slipstream.text.prompt_sets import read_prompts
from tests.support.tiny_models import shared, tokenizer

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)
SERIES = [[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [9, 10, 11, 12]]


@pytest.fixture(scope="module")
def compared() -> retrieval_drafts.Comparison:
    base = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(), reproducible=False)
    made = retrieval_drafts.Comparison(base, PARAMS, 4)
    made.run("similar requests", SERIES, 1)
    made.run("edit", [[5, 6, 7, 5, 6, 7]], 0)
    return made


def test_every_arm_counts_the_requests_that_are_measured(compared: retrieval_drafts.Comparison) -> None:
    names = ["none", "ngram", "suffix", retrieval_drafts.WARM, "HF prompt lookup"]
    assert {name for _, name in compared.totals} == set(names)
    assert {compared.totals["similar requests", name].texts for name in names} == {3}
    assert {compared.totals["edit", name].texts for name in names} == {1}
    assert all(one.tokens == 16 * one.texts and one.same == one.texts for one in compared.totals.values())
    plain = compared.totals["similar requests", "none"]
    assert plain.forwards == plain.tokens


def test_a_warmed_store_knows_the_answers_before(compared: retrieval_drafts.Comparison) -> None:
    found = {name: one for (kind, name), one in compared.totals.items() if kind == "similar requests"}
    assert found[retrieval_drafts.WARM].forwards < 0.7 * found["suffix"].forwards
    assert found["suffix"].forwards <= found["none"].forwards


def test_kinds_cover_edits_second_turns_and_series() -> None:
    base = SpeculativeDecoder(shared("llama"), tokenizer=tokenizer(), reproducible=False)
    found = list(retrieval_drafts.kinds(base, SamplingParams(max_tokens=4), 1))
    assert [kind for kind, _, _ in found] == ["code edit", "summary", *["second turn"] * 2, *["similar requests"] * 3]
    assert {(kind, len(series), skipped) for kind, series, skipped in found} == {
        ("code edit", 1, 0),
        ("summary", 1, 0),
        ("second turn", 1, 0),
        ("similar requests", 3, 2),
    }
    sizes = Counter(one.category for one in read_prompts(retrieval_drafts.SIMILAR))
    assert min(sizes.values()) > retrieval_drafts.LEARNED_FROM


def test_rounds_are_shown_by_the_part_of_the_text_they_begin_in(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    seconds = Seconds(0.0, 0.0, 0.0, 0.0, 0.0)
    rounds = [
        Round(0, step, 0, start, tuple(range(drafted)), (1,) * kept, kept - 1, False, None, seconds)
        for step, (start, drafted, kept) in enumerate([(10, 0, 1), (11, 2, 1), (12, 6, 7), (19, 1, 1)])
    ]
    policy_change.show(rounds, 10, (2, 9), tmp_path / "lengths.png")
    out = capsys.readouterr().out
    assert "prose: 2 tokens in 2 rounds; drafted 0 2" in out
    assert "quotation: 7 tokens in 1 rounds; drafted 6" in out
    assert "prose again: 1 tokens in 1 rounds; drafted 1" in out
    assert (tmp_path / "lengths.png").stat().st_size > 1000
