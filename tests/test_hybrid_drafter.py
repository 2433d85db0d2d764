"""Two drafters in one: which of them is asked, when trust is lost and won, and that the text stays the target's."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.drafters.hybrid import MEMORY, PRIOR, HybridDrafter
from slipstream.noise import Race
from slipstream.sampling import Sampler
from slipstream.types import Row
from tiny import fresh, perturbed, prompts, shared

CPU = torch.device("cpu")
RACE = Race(256, CPU)
PARAMS = SamplingParams(max_tokens=100)


@dataclass
class Says:
    """Proposes what it is told, cut to the length asked for, and notes what it was asked."""

    texts: list[list[int]]
    probs: bool = False
    asked: list[list[int]] = field(default_factory=list)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.asked.append(list(lengths))
        draft = Draft.from_lists([text[:n] for text, n in zip(self.texts, lengths, strict=True)], CPU)
        if not self.probs:
            return draft
        return Draft(draft.tokens, draft.lengths, torch.full((*draft.tokens.shape, 256), 1 / 256))


def rows(count: int) -> list[Row]:
    return [Row(i, [1, 2, 3], PARAMS, seed=i) for i in range(count)]


def propose(drafter: HybridDrafter, of: list[Row], lengths: Sequence[int]) -> Draft:
    return drafter.propose(of, lengths, Sampler(of, RACE, 256, CPU))


def drafts(draft: Draft) -> list[list[int]]:
    return [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def test_a_long_look_up_goes_first_and_the_model_is_not_asked() -> None:
    second = Says([[9] * 4])
    drafter = HybridDrafter(Says([[5, 6, 7]]), second)
    assert drafts(propose(drafter, rows(1), [7])) == [[5, 6, 7]]
    assert second.asked == []


def test_where_too_little_is_known_the_model_drafts_up_to_its_own_limit() -> None:
    second = Says([[9] * 7])
    drafter = HybridDrafter(Says([[5]]), second, steps=4)
    assert drafts(propose(drafter, rows(1), [7])) == [[9, 9, 9, 9]]
    assert second.asked == [[4]]


def test_rows_choose_for_themselves() -> None:
    second = Says([[9] * 7] * 3)
    drafter = HybridDrafter(Says([[5, 6, 7, 8, 4], [], [3]]), second, steps=4)
    assert drafts(propose(drafter, rows(3), [7, 7, 2])) == [[5, 6, 7, 8, 4], [9, 9, 9, 9], [9, 9]]
    assert second.asked == [[0, 4, 2]]


def test_the_last_token_may_be_looked_up() -> None:
    assert drafts(propose(HybridDrafter(Says([[5, 6]]), Says([[9]])), rows(1), [1])) == [[5]]


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    second = Says([[9]])
    assert drafts(propose(HybridDrafter(Says([[5, 6]]), second), rows(1), [0])) == [[]]
    assert second.asked == []


def test_drawn_drafts_keep_their_law_and_looked_up_ones_are_certain() -> None:
    drafter = HybridDrafter(Says([[5, 6, 7, 8, 4], []]), Says([[], [9, 9, 9]], probs=True))
    draft = propose(drafter, rows(2), [7, 3])
    assert draft.probs is not None and draft.probs.shape == (2, 5, 256)
    assert torch.equal(draft.probs[0].argmax(-1), draft.tokens[0]) and bool((draft.probs[0].amax(-1) == 1).all())
    assert bool((draft.probs[1, :3] == 1 / 256).all())


def test_trust_is_lost_by_wrong_look_ups_and_won_back_by_right_ones_that_were_not_used() -> None:
    drafter = HybridDrafter(Says([[5, 6, 7]]), Says([[9] * 4]))
    row = rows(1)[0]
    used = []
    for came in [[8]] * 4 + [[5, 6, 7]] * 4:
        used.append(drafts(propose(drafter, [row], [7])) == [[5, 6, 7]])
        row.tokens.extend(came)
    assert used == [True, True, False, False, False, True, True, True]
    assert drafter._trust[row].share < 1


def test_a_look_up_is_judged_by_as_much_text_as_there_is() -> None:
    drafter = HybridDrafter(Says([[5, 6, 7, 8]]), Says([[9] * 4]))
    row = rows(1)[0]
    for came, right in (([5, 6], 1.0), ([5, 1], 0.25), ([5, 6, 7, 8, 9], 1.0)):
        propose(drafter, [row], [7])
        before = drafter._trust[row].share
        row.tokens.extend(came)
        propose(drafter, [row], [7])
        assert drafter._trust[row].share == pytest.approx(MEMORY * before + (1 - MEMORY) * right)
        drafter._trust[row].share, drafter._trust[row].tokens = PRIOR, []


def test_rows_are_not_kept_alive() -> None:
    drafter = HybridDrafter(Says([[5, 6, 7]]), Says([[9]]))
    propose(drafter, rows(1), [7])
    assert len(drafter._trust) == 0


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_text_is_plain_decodings(temperature: float) -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="hybrid:3", acceptance="match")
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    texts = prompts((4, 20, 9))
    results = decoder.generate([one + one for one in texts], params)
    plain = decoder.using("none").generate([one + one for one in texts], params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.stats.num_accepted_tokens for r in results) > 0


def test_drawn_first_drafts_and_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="hybrid: Says draws its drafts; allowed: one that looks them up"):
        propose(HybridDrafter(Says([[5]], probs=True), Says([[9]])), rows(1), [3])
    for argument in ("0", "x", "3+p", "-1"):
        with pytest.raises(UsageError, match="allowed"):
            SpeculativeDecoder(shared("qwen2"), fresh("qwen2"), drafter=f"hybrid:{argument}")
    with pytest.raises(UsageError, match="drafter='hybrid' needs a draft model"):
        SpeculativeDecoder("toy", drafter="hybrid")


@pytest.mark.usefixtures("ledger")
def test_the_draft_models_memory_is_right_where_it_drafted_for_other_rows_only() -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="hybrid")
    texts = prompts((4, 20, 9, 30))
    results = decoder.generate([text + text for text in texts], SamplingParams(max_tokens=60))
    plain = decoder.using("none").generate([text + text for text in texts], SamplingParams(max_tokens=60))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
