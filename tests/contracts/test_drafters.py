"""The contract of every drafter in `slipstream/drafters/`; a new file is tested automatically."""

import copy
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import Draft, Drafter, Round, SamplingParams, drafters
from slipstream.core.rng import Race
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.policies import Fixed
from slipstream.drafters.cross_vocabulary.bridged_session import BridgedSession
from slipstream.models.toy import VOCAB_SIZE, ToyBackend
from slipstream.sampling.sampler import Sampler
from tests.support.engine_parts import InTurn
from tests.support.markers import subcases
from tests.support.tiny_models import HashBackend
from tests.support.vocabularies import bridge

CPU = torch.device("cpu")
RACE = Race(VOCAB_SIZE, CPU)
TEXTS = [b"a heron and a sparrow and a heron and a", b"x", b"the fish, the fish, the fi", b"The sparrow was proud."]
GREEDY = SamplingParams(max_tokens=100)
PARAMS = [
    [GREEDY] * 4,
    [SamplingParams(temperature=t, top_k=k, max_tokens=100) for t, k in ((0.7, 0), (1.5, 3), (0.0, 0), (1.0, 40))],
]

parametrised = [
    pytest.mark.pairwise,
    pytest.mark.parametrize("name", drafters.names()),
    pytest.mark.parametrize("coupled", [False, True], ids=["free", "coupled"]),
    pytest.mark.parametrize("params", PARAMS, ids=["greedy", "sampled"]),
]


def contract(test):
    """Run a test for every drafter, with and without the target's noise, greedy and sampled."""
    for mark in parametrised:
        test = mark(test)
    return test


class ToyWithStates(ToyBackend):
    """A toy for drafters that read hidden states: those of a token are its id, in every layer."""

    def keep_hidden_states(self, layers: Sequence[int]) -> None:
        """Nothing to do: the ids are in the cache."""

    def hidden_states(self, layers: Sequence[int], slot: int, start: int, stop: int) -> Tensor:
        return self._cache.slots[slot, start:stop, None].float().expand(-1, len(layers))


def make(name: str, coupled: bool, read: Sequence[Row] = ()) -> Drafter:
    """A drafter whose target has read the texts of some rows."""
    session = Session(ToyWithStates(2))
    session.reserve(4, 300)
    bridged = BridgedSession(session, bridge("toy", "toy")) if drafters.traits(name).other_vocabulary else None
    setup = drafters.Setup(CPU, VOCAB_SIZE, session, coupled, target=session, bridged=bridged)
    sources = drafters.sources(name, setup)
    session.prefill(read)
    return sources[0].drafter if len(sources) == 1 else InTurn(sources, Fixed(64))


def make_rows(params: Sequence[SamplingParams]) -> list[Row]:
    return [
        Row(i, list(text), options, seed=10 + i) for i, (text, options) in enumerate(zip(TEXTS, params, strict=True))
    ]


def propose(drafter: Drafter, rows: list[Row], lengths: Sequence[int]) -> Draft:
    with torch.inference_mode():
        return drafter.propose(rows, lengths, Sampler(rows, RACE, VOCAB_SIZE, CPU))


def proposed(draft: Draft, row: int) -> list[int]:
    return draft.tokens[row, : draft.lengths[row]].tolist()


@contract
@pytest.mark.parametrize("lengths", [[3, 3, 3, 3], [0, 4, 1, 2], [5, 0, 0, 0]])
def test_a_draft_keeps_to_lengths_vocabulary_and_shapes(
    name: str, coupled: bool, params: list[SamplingParams], lengths: list[int]
) -> None:
    draft = propose(make(name, coupled), make_rows(params), lengths)
    rows, width = draft.tokens.shape
    assert rows == len(lengths) == len(draft.lengths)
    assert all(0 <= length <= min(asked, width) for length, asked in zip(draft.lengths, lengths, strict=True))
    assert draft.tokens.dtype == torch.int64 and draft.tokens.device == CPU
    assert bool(((draft.tokens >= 0) & (draft.tokens < VOCAB_SIZE)).all())


@contract
def test_the_distribution_of_a_draft_sums_to_one_and_could_have_drawn_it(
    name: str, coupled: bool, params: list[SamplingParams]
) -> None:
    draft = propose(make(name, coupled), make_rows(params), [4, 2, 3, 4])
    if coupled:
        assert draft.probs is None  # the draw is the target's
    elif all(options.temperature == 0 for options in params):
        assert draft.probs is None or bool((draft.probs.amax(-1) > 1 - 1e-6).all())
    if draft.probs is not None:
        assert draft.probs.shape == (*draft.tokens.shape, VOCAB_SIZE)
        assert draft.probs.device == draft.tokens.device and draft.probs.dtype == torch.float32
        for row, length in enumerate(draft.lengths):
            distribution = draft.probs[row, :length]
            assert bool((distribution >= 0).all())
            torch.testing.assert_close(distribution.sum(-1), torch.ones(length), rtol=0, atol=1e-5)
            assert bool((distribution.gather(-1, draft.tokens[row, :length, None]) > 0).all())


@contract
def test_proposing_changes_no_row(name: str, coupled: bool, params: list[SamplingParams]) -> None:
    rows = make_rows(params)
    before = copy.deepcopy([(row.tokens, row.rounds, row.finish_reason, row.prompt_length) for row in rows])
    propose(make(name, coupled), rows, [3, 1, 4, 2])
    assert [(row.tokens, row.rounds, row.finish_reason, row.prompt_length) for row in rows] == before


@contract
def test_a_drafter_asked_for_no_tokens_proposes_none(name: str, coupled: bool, params: list[SamplingParams]) -> None:
    drafter = make(name, coupled)
    draft = propose(drafter, make_rows(params), [0] * 4)
    assert draft.lengths == (0,) * 4 and draft.tokens.shape == (4, 0) and draft.probs is None


@contract
def test_a_proposal_depends_only_on_its_row(name: str, coupled: bool, params: list[SamplingParams]) -> None:
    together = propose(make(name, coupled), make_rows(params), [4, 3, 4, 2])
    for i, length in enumerate([4, 3, 4, 2]):
        alone = propose(make(name, coupled), [make_rows(params)[i]], [length])
        assert proposed(alone, 0) == proposed(together, i)
        if alone.probs is not None and together.probs is not None:
            drawn = alone.lengths[0]
            torch.testing.assert_close(alone.probs[0, :drawn], together.probs[i, :drawn])


@contract
def test_rows_may_come_and_go_between_calls(name: str, coupled: bool, params: list[SamplingParams]) -> None:
    rows, drafter = make_rows(params), make(name, coupled)
    seatings = [[0, 1], [0, 1, 2, 3], [3, 1], [2], [1, 0, 3]]
    single_row_drafters = [make(name, coupled) for _ in rows]  # one for each row, without access to other rows
    for step, seating in enumerate(seatings):
        seated = [rows[i] for i in seating]
        draft = propose(drafter, seated, [3] * len(seated))
        for place, row in enumerate(seated):
            assert proposed(draft, place) == proposed(propose(single_row_drafters[seating[place]], [row], [3]), 0)
            row.tokens.append(TEXTS[0][step])  # as a round of plain decoding would
            row.rounds.append(Round(row.index, 0, 1, len(row.tokens) - 1, (), (row.tokens[-1],), 0, False))


@subcases("name", drafters.names())
def test_an_argument_the_drafter_does_not_know_is_refused(name: str) -> None:
    with pytest.raises(drafters.UsageError, match="allowed"):
        drafters.load(f"{name}:no such thing", drafters.Setup(CPU, 7, Session(HashBackend())))


def test_only_drafters_with_a_documented_argument_take_one() -> None:
    assert drafters.ARGUMENTS.keys() <= set(drafters.names())
    for name in set(drafters.names()) - drafters.ARGUMENTS.keys():
        with pytest.raises(drafters.UsageError, match="allowed"):
            drafters.load(f"{name}:3", drafters.Setup(CPU, VOCAB_SIZE, Session(ToyBackend())))


def test_a_file_whose_name_begins_with_an_underscore_is_not_a_drafter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = drafters.names()
    for name in ("_shared", "echo"):
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setattr(drafters, "__path__", [*drafters.__path__, str(tmp_path)])
    assert sorted(drafters.names()) == sorted([*before, "echo"])


def test_an_unknown_drafter_is_refused_with_the_known_ones() -> None:
    with pytest.raises(drafters.UsageError, match=", ".join(["auto", *drafters.names()])):
        drafters.load("nonsense", drafters.Setup(CPU, 7))


@pytest.mark.parametrize("name", sorted(set(drafters.names()) - {"none"}))
def test_every_drafter_that_can_draft_from_a_text_does(name: str) -> None:
    """A drafter that never drafts would pass every other test."""
    rows = make_rows(PARAMS[0])
    draft = propose(make(name, coupled=True, read=rows), rows, [4] * 4)
    assert sum(draft.lengths) > 0
