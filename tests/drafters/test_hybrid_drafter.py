"""Two drafters in one: which of them is asked, when trust is lost and won, and that the text stays the target's."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.rng import Race
from slipstream.core.rounds import MODEL, Round
from slipstream.core.types import Row
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import Planner
from slipstream.drafters.hybrid import HybridDrafter
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_slow
from tests.support.tiny_models import fresh, perturbed, prompts, shared

CPU = torch.device("cpu")
RACE = Race(256, CPU)
PARAMS = SamplingParams(max_tokens=100)


@dataclass
class Says:
    """Proposes what it is told, cut to the length asked for, and notes what it was asked."""

    texts: list[list[int]]
    probs: bool = False
    acceptance_prob: float = 0.7  # of each token
    steps: int = 0
    asked: list[list[int]] = field(default_factory=list)

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        self.asked.append(list(lengths))
        draft = Draft.from_lists([text[:n] for text, n in zip(self.texts, lengths, strict=True)], CPU)
        if not self.probs:
            acceptance_probs = tuple(
                [self.acceptance_prob ** (j + 1) for j in range(length)] for length in draft.lengths
            )
            made = Draft.from_lists(drafts(draft), CPU, acceptance_probs, MODEL if self.steps else "")
            return replace(made, steps=self.steps and max(draft.lengths))
        return Draft(draft.tokens, draft.lengths, torch.full((*draft.tokens.shape, 256), 1 / 256))


class Untold(Says):
    """Does not say how likely its drafts are."""

    def propose(self, rows: Sequence[Row], lengths: Sequence[int], sampler: Sampler) -> Draft:
        draft = super().propose(rows, lengths, sampler)
        return Draft(draft.tokens, draft.lengths)


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
    second = Says([[9] * 4])
    drafter = HybridDrafter(Says([[5]]), second)
    assert drafts(propose(drafter, rows(1), [7])) == [[9, 9, 9, 9]]
    assert second.asked == [[7]]


def test_rows_choose_for_themselves() -> None:
    second = Says([[9] * 4] * 3)
    drafter = HybridDrafter(Says([[5, 6, 7, 8], [], [3]]), second)
    assert drafts(propose(drafter, rows(3), [7, 7, 2])) == [[5, 6, 7, 8], [9, 9, 9, 9], [9, 9]]
    assert second.asked == [[0, 7, 2]]


def test_the_last_token_may_be_looked_up() -> None:
    assert drafts(propose(HybridDrafter(Says([[5, 6]]), Says([[9]])), rows(1), [1])) == [[5]]


def test_nothing_is_asked_where_nothing_is_wanted() -> None:
    second = Says([[9]])
    assert drafts(propose(HybridDrafter(Says([[5, 6]]), second), rows(1), [0])) == [[]]
    assert second.asked == []


def test_sampled_drafts_keep_their_distribution_and_retrieved_ones_are_certain() -> None:
    drafter = HybridDrafter(Says([[5, 6, 7, 8], []]), Says([[], [9, 9, 9]], probs=True))
    draft = propose(drafter, rows(2), [7, 3])
    assert draft.probs is not None and draft.probs.shape == (2, 4, 256)
    assert torch.equal(draft.probs[0].argmax(-1), draft.tokens[0]) and bool((draft.probs[0].amax(-1) == 1).all())
    assert bool((draft.probs[1, :3] == 1 / 256).all())


def test_a_look_up_that_is_not_likely_enough_is_not_used() -> None:
    for acceptance_prob, used in ((0.7, True), (0.5, False)):
        drafter = HybridDrafter(Says([[5, 6, 7]], acceptance_prob=acceptance_prob), Says([[9] * 4]))
        assert (drafts(propose(drafter, rows(1), [7])) == [[5, 6, 7]]) is used


def test_a_look_up_ends_where_it_becomes_unlikely() -> None:
    drafter = HybridDrafter(Says([[5] * 7]), Says([[9]]))
    assert drafts(propose(drafter, rows(1), [7])) == [[5] * 4]  # 0.7 to the fifth is less than a fifth


def controlled(first: Says, second: Says, verify: float, step: float) -> HybridDrafter:
    """Costs as given: a forward, whatever its width, and a step of the draft model."""
    cost_model = CostModel()
    cost_model.verify = lambda rows, longest, drafted=None: verify  # type: ignore[method-assign]
    cost_model.step = lambda rows: step  # type: ignore[method-assign]
    return HybridDrafter(first, second, planner=Planner(cost_model, has_model=True))


@pytest.mark.parametrize(
    ("acceptance_prob", "step", "looked_up"),
    [(0.9, 0.3, True), (0.3, 0.3, False), (0.3, 10.0, True)],
)
def test_costs_decide_between_the_two(acceptance_prob: float, step: float, looked_up: bool) -> None:
    drafter = controlled(
        Says([[5, 6, 7]], acceptance_prob=acceptance_prob), Says([[9] * 4], acceptance_prob=0.8, steps=1), 1.0, step
    )
    assert (drafts(propose(drafter, rows(1), [7])) == [[5, 6, 7]]) is looked_up


def test_a_draft_model_that_never_pays_is_tried_ever_more_rarely() -> None:
    second = Says([[9] * 4], steps=1)
    drafter = controlled(Says([[]]), second, 1.0, 5.0)
    row = rows(1)[0]
    assert drafter.planner is not None
    drafter.planner._read.add(row)  # otherwise it would have to read the text first
    tried = []
    for number in range(100):
        before = len(second.asked)
        made = propose(drafter, [row], [7])
        row.tokens.append(5)
        draft = tuple(drafts(made)[0])
        row.rounds.append(Round(0, number, 1, len(row.tokens) - 1, draft, (5,), 0, bool(draft), origin=made.records[0]))
        drafter.planner.observe([row])
        if len(second.asked) > before:
            tried.append(number)
    assert [b - a for a, b in pairwise(tried)] == [8, 16, 32]


def test_no_column_is_verified_for_a_look_up_that_is_not_used() -> None:
    drafter = HybridDrafter(Says([[5] * 7], acceptance_prob=0.3), Says([[9] * 2]))
    assert propose(drafter, rows(1), [7]).width == 2


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 0.8], 0.8))
def test_the_text_is_plain_decodings(temperature: float) -> None:
    drafting = {"drafter": "hybrid:3", "acceptance": "match", "num_draft_tokens": 4}
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), **drafting)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    texts = prompts((4, 20, 9))
    results = decoder.generate([one + one for one in texts], params)
    plain = decoder.using("none").generate([one + one for one in texts], params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.stats.num_accepted_tokens for r in results) > 0


def test_drawn_first_drafts_and_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="hybrid: Says samples its drafts; allowed: a drafter of one-hot drafts"):
        propose(HybridDrafter(Says([[5]], probs=True), Says([[9]])), rows(1), [3])
    with pytest.raises(UsageError, match="hybrid: Untold reports no acceptance probabilities; allowed: a drafter of"):
        propose(HybridDrafter(Untold([[5]]), Says([[9]])), rows(1), [3])
    for argument in ("0", "x", "3+p", "-1", "+p=30", "3+2+p=30"):
        with pytest.raises(UsageError, match="allowed"):
            SpeculativeDecoder(shared("qwen2"), fresh("qwen2"), drafter=f"hybrid:{argument}")
    with pytest.raises(UsageError, match="drafter='hybrid' needs a draft model"):
        SpeculativeDecoder("toy", drafter="hybrid")


@pytest.mark.usefixtures("cache_audit")
def test_the_draft_models_memory_is_right_where_it_drafted_for_other_rows_only() -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="hybrid")
    texts = prompts((4, 20, 9, 30))
    results = decoder.generate([text + text for text in texts], SamplingParams(max_tokens=60))
    plain = decoder.using("none").generate([text + text for text in texts], SamplingParams(max_tokens=60))
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
