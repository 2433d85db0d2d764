"""What drafters learn from one caller's requests shows in nobody else's drafts, nor do cached tokens."""

from __future__ import annotations

from typing import Any

import pytest

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.types import Row
from slipstream.drafters._tree_growth import MAX_GROUPS, LearnedByGroup

PROMPT = "zq zq the wind"  # says nothing of what comes


def decoder(drafter: str) -> SpeculativeDecoder:
    return SpeculativeDecoder("toy", drafter=drafter, num_draft_tokens=6)


def drafted(one: SpeculativeDecoder, group: str) -> int:
    """Tokens accepted in a text of this group."""
    row: Row = one.rows([PROMPT], SamplingParams(max_tokens=60), chat=False)[0]
    row.group = group
    return sum(done.num_accepted_tokens for done in one.run([row]))


@pytest.mark.parametrize("drafter", ["suffix", "token_recycling"])
def test_texts_of_another_group_are_not_drafted_from(drafter: str) -> None:
    one = decoder(drafter)
    first = drafted(one, "ann")
    assert drafted(one, "ann") > first  # it has learned
    assert drafted(one, "bob") == first == drafted(one, "") == drafted(decoder(drafter), "bob")
    one.forget_learned()
    assert drafted(one, "ann") == first


def test_only_texts_of_the_default_group_are_saved(tmp_path: Any) -> None:
    one = decoder("suffix")
    drafted(one, "ann")
    drafter: Any = one.drafter
    assert drafter.num_stored_tokens == 0
    drafted(one, "")
    assert drafter.num_stored_tokens > 60


def test_cached_tokens_of_another_group_are_read_anew() -> None:
    one = decoder("none")

    def read(group: str) -> int:
        before = one.num_prefilled_tokens
        row = one.rows([PROMPT * 9], SamplingParams(max_tokens=2), chat=False)[0]
        row.group = group
        list(one.run([row]))
        return one.num_prefilled_tokens - before

    whole = read("ann")
    assert read("ann") < whole // 4 and read("bob") == whole == read("ann")


def test_the_group_that_was_away_longest_is_forgotten_and_the_default_never() -> None:
    stores: LearnedByGroup[list[int]] = LearnedByGroup(list)
    stores.of("").append(1)
    stores.of("first").append(1)
    stores.of("second").append(1)
    stores.of("first")
    for number in range(MAX_GROUPS - 1):
        stores.of(f"other {number}")
    assert stores.of("first") and stores.of("") and not stores.of("second")
