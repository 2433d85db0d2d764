"""A group of requests neither sees what drafters learned from other groups nor shares their cached tokens."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.drafters._tree_growth import MAX_GROUPS, LearnedByGroup

PROMPT = "zq zq the wind"  # does not predict the output


def make_decoder(drafter: str) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", drafter=drafter, num_draft_tokens=6)


def drafted(decoder: SpeculativeDecoder, group: str) -> int:
    """Tokens accepted in a text of this group."""
    row: Row = decoder.rows([PROMPT], SamplingParams(max_tokens=60), chat=False)[0]
    row.group = group
    return sum(round.num_accepted_tokens for round in decoder.run([row]))


@pytest.mark.parametrize("drafter", ["suffix", "token_recycling"])
def test_texts_of_another_group_are_not_drafted_from(drafter: str) -> None:
    decoder = make_decoder(drafter)
    first = drafted(decoder, "ann")
    assert drafted(decoder, "ann") > first  # it has learned
    assert drafted(decoder, "bob") == first == drafted(decoder, "") == drafted(make_decoder(drafter), "bob")
    decoder.forget_learned()
    assert drafted(decoder, "ann") == first


def test_only_texts_of_the_default_group_are_saved(tmp_path: Any) -> None:
    decoder = make_decoder("suffix")
    drafted(decoder, "ann")
    drafter: Any = decoder.drafter
    assert drafter.num_stored_tokens == 0
    drafted(decoder, "")
    assert drafter.num_stored_tokens > 60


def test_tokens_cached_for_another_group_are_read_again() -> None:
    decoder = make_decoder("none")

    def read(group: str) -> int:
        before = decoder.num_prefilled_tokens
        row = decoder.rows([PROMPT * 9], SamplingParams(max_tokens=2), chat=False)[0]
        row.group = group
        list(decoder.run([row]))
        return decoder.num_prefilled_tokens - before

    whole = read("ann")
    assert read("ann") < whole // 4 and read("bob") == whole == read("ann")


def test_the_least_recently_used_group_is_forgotten_but_never_the_default() -> None:
    stores: LearnedByGroup[list[int]] = LearnedByGroup(list)
    stores.of("").append(1)
    stores.of("first").append(1)
    stores.of("second").append(1)
    stores.of("first")
    for number in range(MAX_GROUPS - 1):
        stores.of(f"other {number}")
    assert stores.of("first") and stores.of("") and not stores.of("second")
