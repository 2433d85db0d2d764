"""The draft model as a drafter: where drafts stop, and that stopping changes neither tokens nor texts."""

import pytest
import torch

from slipstream import Constraint, SamplingParams, SpeculativeDecoder, UsageError, drafters
from slipstream.core.rng import Race, Stream, key
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row
from slipstream.drafters.model import ModelDrafter
from slipstream.models.toy import VOCAB_SIZE, ToyBackend
from slipstream.sampling.sampler import Sampler
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import perturbed, prompts, shared

CPU = torch.device("cpu")
RACE = Race(VOCAB_SIZE, CPU)
TEXTS = [b"a heron and a sparrow and a heron and a", b"The fish", b"x", b"The sparrow was proud."]


def session() -> Session:
    new_session = Session(ToyBackend(2))
    new_session.reserve(len(TEXTS), 300)
    return new_session


def rows(temperature: float) -> list[Row]:
    params = SamplingParams(temperature=temperature, max_tokens=100)
    return [Row(i, list(text), params, seed=i) for i, text in enumerate(TEXTS)]


def propose(batch: list[Row], lengths: list[int], percent: int, coupled: bool = False) -> Draft:
    drafter = drafters.load(f"model:p={percent}", drafters.Setup(CPU, VOCAB_SIZE, session(), coupled))
    return drafter.propose(batch, lengths, Sampler(batch, RACE, VOCAB_SIZE, CPU))


def path_certainties(row: Row, tokens: list[int], coupled: bool) -> list[float]:
    """The toy model's certainty of the first 1, 2, ... tokens: their probability, or their share of the race."""
    scorer = session()
    with torch.inference_mode():
        logits = scorer.score([row], torch.tensor([tokens]), [len(tokens)])[0, :-1].float()
    speeds = (logits / (row.params.temperature or 1.0)).softmax(-1)
    if coupled and row.params.temperature:
        noise = [RACE.noise(key(row.seed, Stream.TOKEN, len(row.tokens) + j)) for j in range(len(tokens))]
        speeds = speeds / torch.stack(noise)
    shares = speeds / speeds.sum(-1, keepdim=True)
    certainties: list[float] = shares[torch.arange(len(tokens)), torch.tensor(tokens)].cumprod(0).tolist()
    return certainties


@pytest.mark.pairwise
@pytest.mark.parametrize("percent", [30, 70, 99])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_draft_ends_with_the_token_that_makes_it_unlikely(temperature: float, percent: int, coupled: bool) -> None:
    batch, lengths, shorter = rows(temperature), [6, 6, 6, 3], 0
    with torch.inference_mode():
        full, draft = propose(batch, lengths, 0, coupled), propose(batch, lengths, percent, coupled)
    assert full.lengths == tuple(lengths)
    for i, row in enumerate(batch):
        tokens = draft.tokens[i, : draft.lengths[i]].tolist()
        assert tokens == full.tokens[i, : len(tokens)].tolist()  # stopping changes no token
        certainties = path_certainties(row, tokens, coupled)
        assert all(certainty >= percent / 100 for certainty in certainties[:-1])
        assert certainties[-1] < percent / 100 or len(tokens) == lengths[i]
        shorter += len(tokens) < lengths[i]
    assert shorter or percent == 30
    if draft.probs is not None:
        assert draft.probs.shape == (*draft.tokens.shape, VOCAB_SIZE)


def test_no_forward_is_made_after_a_draft_has_stopped() -> None:
    class Counting(ToyBackend):
        forwards = 0

        def forward(self, *args, **options):
            self.forwards += 1
            return super().forward(*args, **options)

    backend = Counting(2)
    counting = Session(backend)
    counting.reserve(1, 300)
    drafter = drafters.load("model:p=99", drafters.Setup(CPU, VOCAB_SIZE, counting))
    row = rows(1.0)[1]
    with torch.inference_mode():
        counting.prefill([row])
        backend.forwards = 0
        draft = drafter.propose([row], [6], Sampler([row], RACE, VOCAB_SIZE, CPU))
    assert backend.forwards == draft.lengths[0] < 6


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_stopping_early_changes_no_text(temperature: float) -> None:
    settings = {"drafter": "model:p=50", "acceptance": "match", "num_draft_tokens": 6}
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), **settings)
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=40)
    results = drafted_as_plain(decoder, prompts((4, 20, 9)), params)
    lengths = {len(round.draft) for result in results for round in result.rounds}
    assert len(lengths) > 1


def test_a_request_gets_the_draft_length_it_asks_for() -> None:
    decoder = SpeculativeDecoder(shared("qwen2"), perturbed("qwen2"), drafter="model")
    params = SamplingParams(max_tokens=20, num_draft_tokens=4)
    results = decoder.generate(prompts((9, 9)), [params, SamplingParams(max_tokens=20)])
    lengths = [{len(round.draft) for round in result.rounds if result.rounds[-1] is not round} for result in results]
    assert 4 in lengths[0] and len(lengths[1]) > 1
    uncut_lengths = [
        len(round.draft) for round in results[0].rounds[1:] if round.start + 5 < len(prompts((9,))[0]) + 20
    ]
    assert set(uncut_lengths) == {4}
    stopped_early = decoder.using("model:p=99").generate(prompts((9,)), params)[0]
    assert {1} <= {len(round.draft) for round in stopped_early.rounds}


def test_bad_arguments_are_refused() -> None:
    for argument in ("x", "p=", "p=100", "p=-1", "4"):
        with pytest.raises(UsageError, match=f"drafter='model:{argument}'; allowed: 'model', or 'model:p=PERCENT'"):
            SpeculativeDecoder("toy", "toy:2", drafter=f"model:{argument}")


@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_draft_ends_where_a_constraint_leaves_no_token_of_the_draft_model(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit, lacking = ModelDrafter._fit, torch.tensor([ord("Q")])
    monkeypatch.setattr(
        ModelDrafter, "_fit", lambda self, logits: fit(self, logits).index_fill(-1, lacking, float("-inf"))
    )
    params = SamplingParams(max_tokens=30, temperature=temperature, seed=1, constraint=Constraint(regex="([a-z]{2}Q)+"))
    plain = SpeculativeDecoder("toy", drafter="none").generate("The heron", params)
    drafted = SpeculativeDecoder("toy", "toy:3", drafter="model", num_draft_tokens=5).generate("The heron", params)
    assert drafted.token_ids == plain.token_ids and ord("Q") in plain.token_ids[:3]
    assert drafted.stats.num_accepted_tokens > 0
    assert all(round.draft[2:3] != (0,) for round in drafted.rounds)
