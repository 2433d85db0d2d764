"""A retrieval drafter and a draft model in one: which of them drafts for a row, and that no text changes."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.interfaces import Policy, Source
from slipstream.core.rng import Race
from slipstream.core.rounds import MODEL
from slipstream.core.types import Row
from slipstream.draft_length.costs import CostModel
from slipstream.draft_length.planner import Planner
from slipstream.draft_length.policies import Fixed
from slipstream.drafters import Setup, suffix
from slipstream.sampling.sampler import Sampler
from tests.support.engine_parts import InTurn
from tests.support.markers import mostly_exhaustive
from tests.support.plain_texts import drafted_as_plain
from tests.support.rounds import add_round
from tests.support.tiny_models import fresh, perturbed, prompts, shared

CPU = torch.device("cpu")
RACE = Race(256, CPU)
PARAMS = SamplingParams(max_tokens=100)


@dataclass
class Scripted:
    """Proposes `texts`, cut to the lengths asked for, and records those lengths."""

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
            rated = Draft.from_lists(drafts(draft), CPU, acceptance_probs, MODEL if self.steps else "")
            return replace(rated, steps=self.steps and max(draft.lengths))
        return Draft(draft.tokens, draft.lengths, torch.full((*draft.tokens.shape, 256), 1 / 256))


def rows(count: int) -> list[Row]:
    return [Row(i, [1, 2, 3], PARAMS, seed=i) for i in range(count)]


def hybrid(first: Scripted, second: Scripted, policy: Policy | None = None) -> InTurn:
    """Retrieval, then a draft model."""
    return InTurn([Source(first, takes_forwards=False), Source(second)], policy or Fixed(64))


def propose(drafter: InTurn, batch: list[Row], lengths: Sequence[int]) -> Draft:
    return drafter.propose(batch, lengths, Sampler(batch, RACE, 256, CPU))


def drafts(draft: Draft) -> list[list[int]]:
    return [tokens[:length] for tokens, length in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


@pytest.mark.parametrize(
    ("retrieved", "lengths", "drafted", "asked"),
    [
        ([[5, 6, 7]], [7], [[5, 6, 7]], []),  # long enough: the model is not asked
        ([[5]], [7], [[9, 9, 9, 9]], [[7]]),
        ([[5, 6, 7, 8], [], [3]], [7, 7, 2], [[5, 6, 7, 8], [9, 9, 9, 9], [9, 9]], [[0, 7, 2]]),
        ([[5, 6]], [1], [[5]], []),
        ([[5, 6]], [0], [[]], []),
    ],
)
def test_the_model_drafts_for_the_rows_whose_retrieved_draft_is_short(
    retrieved: list[list[int]], lengths: list[int], drafted: list[list[int]], asked: list[list[int]]
) -> None:
    model = Scripted([[9] * 4] * len(retrieved))
    assert drafts(propose(hybrid(Scripted(retrieved), model), rows(len(retrieved)), lengths)) == drafted
    assert model.asked == asked


def test_sampled_drafts_keep_their_distribution_and_retrieved_ones_are_one_hot() -> None:
    drafter = hybrid(Scripted([[5, 6, 7, 8], []]), Scripted([[], [9, 9, 9]], probs=True))
    draft = propose(drafter, rows(2), [7, 3])
    assert draft.probs is not None and draft.probs.shape == (2, 4, 256)
    assert torch.equal(draft.probs[0].argmax(-1), draft.tokens[0]) and bool((draft.probs[0].amax(-1) == 1).all())
    assert bool((draft.probs[1, :3] == 1 / 256).all())


def test_an_unlikely_retrieved_draft_is_not_used() -> None:
    for acceptance_prob, used in ((0.7, True), (0.5, False)):
        drafter = hybrid(Scripted([[5, 6, 7]], acceptance_prob=acceptance_prob), Scripted([[9] * 4]))
        assert (drafts(propose(drafter, rows(1), [7])) == [[5, 6, 7]]) is used


def test_a_retrieved_draft_is_cut_where_it_becomes_unlikely() -> None:
    """Without costs, a chain ends where it is accepted less likely than once in five times."""
    text = [7, 5, 6, 7, 5, 6, 8, 5, 6, 7]
    lengths = {}
    for name, planner in (("costs", Planner(CostModel())), ("none", None)):
        reader = suffix.build(Setup(CPU, 256, planner=planner, acceptance_probs=True), "outputs=0")
        (record,) = reader.propose([Row(0, text, PARAMS, seed=0)], [64], Sampler(rows(1), RACE, 256, CPU)).records
        lengths[name] = list(record.acceptance_probs or ())
    assert min(lengths["none"]) >= 0.2 > min(lengths["costs"])


def controlled(first: Scripted, second: Scripted, verify: float, step: float) -> InTurn:
    """A forward of any width costs `verify`, a step of the draft model `step`."""
    cost_model = CostModel()
    cost_model.verify = lambda rows, longest, drafted=None: verify  # type: ignore[method-assign]
    cost_model.drafting = lambda rows: (step, 0.0)  # type: ignore[method-assign]
    return hybrid(first, second, Planner(cost_model, has_model=True))


@pytest.mark.parametrize(
    ("acceptance_prob", "step", "looked_up"), [(0.9, 0.3, True), (0.3, 0.3, False), (0.3, 10.0, True)]
)
def test_costs_decide_between_retrieval_and_model(acceptance_prob: float, step: float, looked_up: bool) -> None:
    drafter = controlled(
        Scripted([[5, 6, 7]], acceptance_prob=acceptance_prob),
        Scripted([[9] * 4], acceptance_prob=0.8, steps=1),
        1.0,
        step,
    )
    assert (drafts(propose(drafter, rows(1), [7])) == [[5, 6, 7]]) is looked_up


def test_a_draft_model_that_never_pays_is_tried_at_growing_intervals() -> None:
    second = Scripted([[9] * 4], steps=1)
    drafter = controlled(Scripted([[]]), second, 1.0, 5.0)
    row = rows(1)[0]
    planner = drafter.policy
    assert isinstance(planner, Planner)
    planner._read.add(row)  # without this it would have to read the text first
    tried = []
    for number in range(100):
        before = len(second.asked)
        proposal = propose(drafter, [row], [7])
        add_round(row, proposal.lengths[0], origin=proposal.records[0])
        planner.observe([row])
        if len(second.asked) > before:
            tried.append(number)
    assert [b - a for a, b in pairwise(tried)] == [8, 16, 32]


def test_an_unused_retrieved_draft_does_not_widen_the_batch() -> None:
    drafter = hybrid(Scripted([[5] * 7], acceptance_prob=0.3), Scripted([[9] * 2]))
    assert propose(drafter, rows(1), [7]).width == 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", mostly_exhaustive([0.0, 0.8], 0.8))
def test_the_text_is_that_of_plain_decoding(temperature: float) -> None:
    drafting = {"drafter": "hybrid:3", "acceptance": "match", "num_draft_tokens": 4}
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), **drafting)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    results = drafted_as_plain(decoder, [text + text for text in prompts((4, 20, 9))], params)
    assert sum(r.stats.num_accepted_tokens for r in results) > 0


def test_bad_arguments_are_refused() -> None:
    for argument in ("0", "x", "3+p", "-1", "+p=30", "3+2+p=30"):
        with pytest.raises(UsageError, match="allowed"):
            SpeculativeDecoder(shared("qwen2"), fresh("qwen2"), drafter=f"hybrid:{argument}")
    with pytest.raises(UsageError, match="drafter='hybrid' needs a draft model"):
        SpeculativeDecoder("toy", drafter="hybrid")


@pytest.mark.slow
@pytest.mark.usefixtures("cache_audit")
def test_the_draft_models_cache_is_right_after_rounds_it_sat_out() -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="hybrid")
    texts = [text + text for text in prompts((4, 20, 9, 30))]
    drafted_as_plain(decoder, texts, SamplingParams(max_tokens=60))
