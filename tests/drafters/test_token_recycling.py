"""Token recycling: what verified positions teach, which context decides, and what is forgotten."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.interfaces import Learner, Observer
from slipstream.core.rng import Race
from slipstream.core.types import Row, Verdict
from slipstream.drafters import Setup, load, token_recycling
from slipstream.drafters.token_recycling import TokenRecyclingDrafter
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_exhaustive, subcases
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import prompts, shared

CPU = torch.device("cpu")
SIZE = 50
RACE = Race(SIZE, CPU)
PARAMS = SamplingParams(max_tokens=100)


def row_of(*tokens: int) -> Row:
    return Row(0, list(tokens), PARAMS, seed=0)


def draft_of(drafter: TokenRecyclingDrafter, row: Row, length: int = 5) -> list[int]:
    draft = drafter.propose([row], [length], Sampler([row], RACE, SIZE, CPU))
    assert draft.probs is None
    return draft.tokens[0, : draft.lengths[0]].tolist()


def logits_of(*rankings: Sequence[int]) -> Tensor:
    """[1, len(rankings), SIZE] logits that rank tokens in this order, all others below."""
    logits = torch.full((1, len(rankings), SIZE), -9.0)
    for j, ranking in enumerate(rankings):
        for place, token in enumerate(ranking):
            logits[0, j, token] = -float(place)
    return logits


def teach(drafter: TokenRecyclingDrafter, row: Row, draft: list[int], kept: int, *rankings: Sequence[int]) -> None:
    """Shows the drafter a round: the draft, how many tokens are accepted, the target's ranking at each position."""
    verdict = Verdict(torch.tensor([kept]), torch.tensor([rankings[kept][0]]))
    drafter.observe([row], Draft.from_lists([draft], CPU), logits_of(*rankings), verdict)
    row.commit([*draft[:kept], rankings[kept][0]])


def test_the_token_ranked_first_after_a_token_is_drafted_in_any_row() -> None:
    drafter = TokenRecyclingDrafter(SIZE)
    row = row_of(1, 2)
    teach(drafter, row, [], 0, [7, 8])  # 7 after 2
    teach(drafter, row, [], 0, [9, 8])  # 9 after 7
    assert draft_of(drafter, row_of(5, 2)) == [7, 9]
    assert draft_of(drafter, row_of(5, 9)) == []


def test_positions_after_a_rejected_token_teach_too() -> None:
    drafter = TokenRecyclingDrafter(SIZE)
    teach(drafter, row_of(1, 2), [3, 4], 0, [30], [31], [32])  # 31 after the draft 3, 32 after 4
    assert draft_of(drafter, row_of(0, 3), 1) == [31]
    assert draft_of(drafter, row_of(3, 4), 1) == [32]
    assert draft_of(drafter, row_of(9, 2), 1) == [30]


def test_padding_of_a_shorter_draft_teaches_nothing() -> None:
    drafter, rows = TokenRecyclingDrafter(SIZE), [row_of(1), row_of(2)]
    logits = torch.cat([logits_of([11], [12], [13]), logits_of([21], [22], [23])])
    drafter.observe(
        rows, Draft.from_lists([[5, 6], [7]], CPU), logits, Verdict(torch.tensor([2, 1]), torch.tensor([13, 22]))
    )
    assert [draft_of(drafter, row_of(token), 1) for token in (1, 5, 6, 2, 7)] == [[11], [12], [13], [21], [22]]
    assert draft_of(drafter, row_of(0)) == []


def test_the_longest_context_that_is_known_decides() -> None:
    drafter = TokenRecyclingDrafter(SIZE, 1)
    for text, follower in (((9, 2, 3), 11), ((8, 2, 3), 12), ((7, 6, 3), 13)):
        teach(drafter, row_of(*text), [], 0, [follower])
    assert draft_of(drafter, row_of(9, 2, 3), 1) == [11]  # three tokens
    assert draft_of(drafter, row_of(5, 2, 3), 1) == [12]  # two; the later follower was 12
    assert draft_of(drafter, row_of(7, 6, 3), 1) == [13]


def test_a_rows_own_text_teaches_it_and_no_other_row() -> None:
    drafter, row = TokenRecyclingDrafter(SIZE), row_of(4, 5, 6, 7, 4, 5)
    assert draft_of(drafter, row, 6) == [6, 7, 4, 5, 6, 7]
    assert draft_of(drafter, row_of(4, 5)) == []
    teach(drafter, row_of(1, 4, 5), [], 0, [20])
    assert draft_of(drafter, row, 1) == [6]  # a context in its own text goes before one of other rows
    assert draft_of(drafter, row_of(1, 4, 5), 1) == [20]


def test_rankings_add_up_and_fade() -> None:
    drafter = TokenRecyclingDrafter(SIZE, 3)
    teach(drafter, row_of(2), [], 0, [10, 11, 12])  # weights 3, 2, 1
    teach(drafter, row_of(2), [], 0, [13, 11, 12])  # 11 has 2 + 0.9 * 2, more than 13 with 3 and 10 with 2.7
    assert draft_of(drafter, row_of(2), 1) == [11]
    for _ in range(3):
        teach(drafter, row_of(2), [], 0, [13, 14, 15])
    assert draft_of(drafter, row_of(2), 1) == [13]
    last = TokenRecyclingDrafter(SIZE, 1)
    for best in (10, 11):
        teach(last, row_of(2), [], 0, [best])
    assert draft_of(last, row_of(2), 1) == [11]  # with one alternative, the latest of equals


def test_accepted_positions_outweigh_rejected_ones() -> None:
    drafter = TokenRecyclingDrafter(SIZE, 1)
    teach(drafter, row_of(1, 2), [3, 2, 1, 2], 0, [30], [31], [32], [33], [34])  # 2 stands at three positions
    assert draft_of(drafter, row_of(9, 2), 1) == [30]


def test_memory_is_bounded_and_keeps_the_most_recent_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_recycling, "SPAN", 60)
    drafter = TokenRecyclingDrafter(SIZE, 1)
    for token in range(45):
        teach(drafter, row_of(token), [], 0, [token + 1])
        teach(drafter, row_of(40, 41, token), [], 0, [token + 2])
        assert len(drafter._commons.default) < 2 * 60 + 3
    assert draft_of(drafter, row_of(40, 41, 44), 1) == [46]
    assert draft_of(drafter, row_of(0), 1) == []
    fresh = TokenRecyclingDrafter(SIZE, 1)
    assert draft_of(fresh, row_of(*range(49), *range(49)), 3) == []  # what followed 48 lies beyond the span
    assert draft_of(fresh, row_of(*range(49), *range(44, 47)), 3) == [47, 48, 44]


def test_forgetting_drops_shared_rankings_but_not_a_rows_own_text() -> None:
    drafter, row = TokenRecyclingDrafter(SIZE), row_of(1, 2, 3, 1, 2)
    assert isinstance(drafter, Learner) and isinstance(drafter, Observer)
    teach(drafter, row_of(8), [], 0, [9])
    assert draft_of(drafter, row) == [3, 1, 2, 3, 1] and draft_of(drafter, row_of(8), 1) == [9]
    drafter.forget()
    assert len(drafter._commons.default) == 0
    assert draft_of(drafter, row_of(8)) == [] and draft_of(drafter, row) == [3, 1, 2, 3, 1]


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("name", mostly_exhaustive(["toy", "qwen2"], "toy"))
def test_the_text_is_that_of_plain_decoding_whatever_was_learned(name: str, temperature: float) -> None:
    target = "toy" if name == "toy" else shared(name)
    decoder = SpeculativeDecoder(target, drafter="none", max_batch_size=2, reproducible=False)
    params, texts = SamplingParams(max_tokens=40, temperature=temperature, seed=3), prompts((14, 1, 20, 9))
    recycling = decoder.using("token_recycling", num_draft_tokens=7)
    for _ in range(2):
        results = drafted_as_plain(recycling, texts, params)
    num_accepted = sum(r.stats.num_accepted_tokens for r in results)
    recycling.forget_learned()
    assert 0 < sum(r.stats.num_accepted_tokens for r in recycling.generate(texts, params)) < num_accepted


@subcases("argument", ["0", "65", "x", "-1", "2+fill", "²"])
def test_bad_arguments_are_refused(argument: str) -> None:
    with pytest.raises(
        UsageError, match=f"drafter='token_recycling:{argument.replace('+', '.')}'; allowed: token_recycling, or"
    ):
        load(f"token_recycling:{argument}", Setup(CPU, SIZE))


def test_the_argument_is_the_number_of_alternatives() -> None:
    assert load("token_recycling:64", Setup(CPU, SIZE)) == TokenRecyclingDrafter(SIZE, 64)
    assert load("token_recycling", Setup(CPU, SIZE)) == TokenRecyclingDrafter(SIZE, 4)
    with pytest.raises(UsageError, match="token_recycling width=True; allowed: a whole number from 1 to 64"):
        TokenRecyclingDrafter(SIZE, True)
    wide = TokenRecyclingDrafter(3, 8)  # more alternatives than tokens
    row = Row(0, [1], PARAMS, seed=0)
    wide.observe(
        [row], Draft.empty(1, CPU), torch.tensor([[[0.0, 1.0, 2.0]]]), Verdict(torch.tensor([0]), torch.tensor([2]))
    )
    draft = wide.propose([row], [2], Sampler([row], Race(3, CPU), 3, CPU))
    assert draft.tokens.tolist() == [[2]]
