"""Look-ups from two sources: which is asked, that one goes on behind the other, and whose text it stays."""

import pytest
import torch

from slipstream import Draft, SamplingParams, SpeculativeDecoder, UsageError, Verdict, drafters
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.drafters.retrieval import RetrievalDrafter
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_slow
from tests.support.tiny_models import prompts, shared

CPU = torch.device("cpu")
VOCAB = 256
RACE = Race(VOCAB, CPU)


def made(argument: str = "", acceptance_probs: bool = True) -> RetrievalDrafter:
    drafter = drafters.load(
        f"retrieval:{argument}" if argument else "retrieval",
        drafters.Setup(CPU, VOCAB, acceptance_probs=acceptance_probs),
    )
    assert isinstance(drafter, RetrievalDrafter)
    return drafter


def row(tokens: list[int]) -> Row:
    return Row(0, tokens, SamplingParams(max_tokens=100), seed=0)


def propose(drafter: RetrievalDrafter, of: Row, length: int = 7) -> tuple[list[int], list[float]]:
    draft = drafter.propose([of], [length], Sampler([of], RACE, VOCAB, CPU))
    acceptance_probs = [] if draft.acceptance_probs is None else list(draft.acceptance_probs[0] or ())
    return draft.tokens[0, : draft.lengths[0]].tolist(), acceptance_probs


def rank(drafter: RetrievalDrafter, of: Row, follower: int) -> None:
    """Let the target rank one token highest behind the row's text."""
    logits = torch.zeros(1, 1, VOCAB)
    logits[0, 0, follower] = 9
    nothing = Draft.empty(1, CPU)
    drafter.observe([of], nothing, logits, Verdict(torch.zeros(1, dtype=torch.int64), torch.tensor([follower])))


@pytest.mark.parametrize("acceptance_probs", [True, False])
def test_text_that_is_known_is_followed(acceptance_probs: bool) -> None:
    tokens, told = propose(made(acceptance_probs=acceptance_probs), row([*range(40), 7, *range(12)]))
    assert tokens == list(range(12, 19))
    assert len(told) == (7 if acceptance_probs else 0) and told == sorted(told, reverse=True)


@pytest.mark.parametrize("acceptance_probs", [True, False])
def test_where_nothing_is_known_the_targets_ranking_is_followed(acceptance_probs: bool) -> None:
    drafter, of = made(acceptance_probs=acceptance_probs), row([1, 2, 3])
    assert propose(drafter, of)[0] == []
    rank(drafter, of, 9)
    tokens, told = propose(drafter, of)
    assert tokens[0] == 9 and (not acceptance_probs or 0 < told[0] < 1)


def test_the_ranking_goes_on_behind_what_is_known() -> None:
    drafter = made()
    other = row([5, 6, 12])
    drafter.propose([other], [1], Sampler([other], RACE, VOCAB, CPU))
    rank(drafter, other, 77)  # known of another row only
    tokens, told = propose(drafter, row([1, 2, 3, 4, 5, 6, 12, 1, 2, 3, 4, 5]), 4)
    assert tokens[:2] == [6, 12] and len(tokens) == len(told) == 4
    assert propose(drafter, row([9, 8, 5, 6]), 2)[0] == []
    assert propose(drafter, row([9, 8, 5, 6, 12]), 2)[0][0] == 77


def test_the_likelier_first_token_decides() -> None:
    drafter, of = made(), row([1, 1, 2, 5, 3, 2, 6, 4, 2])  # 2 was followed by 5, then by 6
    assert propose(drafter, of)[0][0] == 6
    for _ in range(3):
        rank(drafter, of, 9)
    assert propose(drafter, of)[0][0] == 9


def test_what_was_learned_is_forgotten() -> None:
    drafter, of = made(), row([1, 2, 3])
    propose(drafter, of)
    rank(drafter, of, 9)
    drafter.forget()
    assert propose(drafter, row([1, 2, 3]))[0] == []


@pytest.mark.parametrize("count", mostly_slow(["auto", 6], 6))
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_text_is_plain_decodings(temperature: float, count: int | str) -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), drafter="retrieval", num_draft_tokens=count)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=60)
    texts = [text + text for text in prompts((4, 20, 9))]
    results = decoder.generate(texts, params)
    plain = decoder.using("none").generate(texts, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.stats.num_draft_tokens for r in results) > 0


def test_arguments_are_those_of_suffix_without_a_threshold() -> None:
    assert made("2").known.shortest == 2 and made("outputs=0").known.outputs == 0
    for argument in ("p=30", "2+p=30", "x"):
        with pytest.raises(UsageError, match="allowed"):
            made(argument)
