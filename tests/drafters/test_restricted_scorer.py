"""Draft models that score part of their vocabulary: which part, and that texts and distributions stay right."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.acceptance import accept, load_rule
from slipstream.core.rng import Race
from slipstream.core.session import Session
from slipstream.core.types import Draft, Row
from slipstream.drafters.model import ModelDrafter
from slipstream.drafters.model.restricted_scorer import STRAYS, WINDOW, RestrictedScorer
from slipstream.models import draft_vocabulary
from slipstream.models.draft_vocabulary import Restriction, restricted_head
from slipstream.models.heads.network import all_scores
from slipstream.models.hf.backend import HFBackend
from slipstream.sampling.sampler import Sampler
from tests.support.markers import mostly_exhaustive, subcases
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import VOCAB, fresh, perturbed, prompts, shared, tokenizer

CPU, FIRST, END = torch.device("cpu"), 32, 60
HOT = SamplingParams(temperature=1.5, max_tokens=500)


def scorer(name: str = "llama", rows: int = 4) -> RestrictedScorer:
    """A draft model whose first FIRST tokens are always scored."""
    model: Any = fresh(name, seed=1)
    linear = model.get_output_embeddings()
    head = restricted_head(linear, linear, FIRST, None)
    model.set_output_embeddings(head)
    session = Session(HFBackend(model))
    session.reserve(rows, 400)
    return RestrictedScorer(session, head)


def row(tokens: list[int], index: int = 0, params: SamplingParams = HOT) -> Row:
    return Row(index, list(tokens), params, seed=index, end_ids=frozenset({END}))


def logits_of(restricted: RestrictedScorer, rows: list[Row]) -> Tensor:
    """[B, V] the logits of all tokens after these rows."""
    no_draft = torch.empty(len(rows), 0, dtype=torch.int64)
    logits = restricted.score(rows, no_draft, [0] * len(rows))[:, 0]
    return all_scores(logits, restricted.token_ids, VOCAB)


def scored(logits: Tensor) -> set[int]:
    return set(torch.isfinite(logits).nonzero().flatten().tolist())


@torch.inference_mode()
def test_a_row_is_scored_over_frequent_tokens_its_end_tokens_and_those_of_its_text() -> None:
    restricted, unrestricted = scorer(), Session(HFBackend(fresh("llama", seed=1)))
    unrestricted.reserve(2, 400)
    rows = [row([3, 40, 50, 4]), row([5, 59, 45, 45, 6, 40, 7], 1)]
    logits, no_draft = logits_of(restricted, rows), torch.empty(2, 0, dtype=torch.int64)
    expected = unrestricted.score(rows, no_draft, [0, 0])
    frequent = {*range(FIRST), END}
    scored_tokens = [frequent | {40, 50}, frequent | {59, 45, 40}]
    for i in range(2):
        assert scored(logits[i]) == scored_tokens[i]
        places = sorted(scored_tokens[i])
        torch.testing.assert_close(logits[i, places], expected[i, 0, places])
    rows[0].commit([33])
    assert scored(logits_of(restricted, rows[:1])[0]) == scored_tokens[0] | {33}


@torch.inference_mode()
def test_scores_of_a_text_with_all_tokens_are_those_of_each_token() -> None:
    restricted, unrestricted = scorer(), Session(HFBackend(fresh("llama", seed=1)))
    unrestricted.reserve(1, 400)
    rows = [row(list(range(VOCAB))[::-1])]
    expected = unrestricted.score(rows, torch.empty(1, 0, dtype=torch.int64), [0])[:, 0]
    torch.testing.assert_close(logits_of(restricted, rows), expected)


@torch.inference_mode()
def test_a_row_that_often_leaves_its_part_is_scored_over_the_whole_vocabulary() -> None:
    restricted, rows = scorer(), [row([3, 4]), row([3, 5], 1)]
    rows[0].commit(range(40, 40 + STRAYS - 1))
    assert len(scored(logits_of(restricted, rows)[0])) < VOCAB
    rows[0].commit([55])
    logits = logits_of(restricted, rows)
    assert scored(logits[0]) == set(range(VOCAB)) and scored(logits[1]) == {*range(FIRST), END}
    assert scored(logits_of(restricted, rows[:1])[0]) == set(range(VOCAB))
    rows[0].commit([3] * WINDOW)
    assert scored(logits_of(restricted, rows[:1])[0]) == {*range(FIRST), END, *range(40, 43), 55}


@torch.inference_mode()
def test_a_draft_carries_the_renormalized_distribution_over_the_scored_tokens() -> None:
    restricted, hot_row = scorer(), row([3, 40, 50, 4])
    draft = ModelDrafter(restricted, VOCAB).propose([hot_row], [3], Sampler([hot_row], Race(VOCAB, CPU), VOCAB, CPU))
    unrestricted = Session(HFBackend(fresh("llama", seed=1)))
    unrestricted.reserve(1, 400)
    scored_tokens = sorted({*range(FIRST), END, 40, 50})
    expected = torch.zeros(4, VOCAB)
    expected[:, scored_tokens] = (
        unrestricted.score([hot_row], draft.tokens, [3])[0].float()[:, scored_tokens] / HOT.temperature
    ).softmax(-1)
    assert draft.probs is not None
    torch.testing.assert_close(draft.probs[0], expected[:3])


ROWS, RUNS = 80, 1600


def distance(rule: str, change: Any = lambda draft: draft) -> float:
    """Total variation between the target's distribution and the first tokens that rounds of equal rows commit."""
    drafting, target = scorer(rows=ROWS), Session(HFBackend(shared("llama")))
    target.reserve(ROWS, 16)
    counts: Counter[int] = Counter()
    for first_seed in range(0, RUNS, ROWS):
        rows = [row([3, 40, 50, 4], seed) for seed in range(first_seed, first_seed + ROWS)]
        sampler = Sampler(rows, Race(VOCAB, CPU), VOCAB, CPU)
        with torch.inference_mode():
            draft = change(ModelDrafter(drafting, VOCAB).propose(rows, [1] * ROWS, sampler))
            logits = target.score(rows, draft.tokens, draft.lengths)
            verdict = accept(load_rule(rule), logits, draft, sampler)
        counts.update(torch.where(verdict.accepted > 0, draft.tokens[:, 0], verdict.next_token).tolist())
    probs = (logits[0, 0].float() / HOT.temperature).softmax(-1).tolist()
    return sum(abs(counts[token] / RUNS - p) for token, p in enumerate(probs)) / 2


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly_exhaustive(["block", "rejection", "match"], "block"))
def test_the_distribution_of_the_text_is_the_targets(rule: str) -> None:
    assert distance(rule) < 0.1


@pytest.mark.exhaustive
def test_a_distribution_over_all_tokens_is_noticed() -> None:
    def over_all(draft: Draft) -> Draft:
        assert draft.probs is not None
        return replace(draft, probs=0.2 * draft.probs + 0.8 / VOCAB)  # as if unscored tokens had been possible

    assert distance("block", over_all) > 0.2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights with noise, as files."""
    path = tmp_path_factory.mktemp("draft")
    perturbed("llama").save_pretrained(path)
    return path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acceptance", "temperature"), mostly_exhaustive([("auto", 0.0), ("match", 0.0), ("match", 0.9)], ("match", 0.9))
)
def test_the_text_is_that_of_plain_decoding(folder: Path, acceptance: str, temperature: float) -> None:
    options: dict[str, Any] = {"num_draft_tokens": 3, "acceptance": acceptance}
    decoder = SpeculativeDecoder(
        shared("llama"), str(folder), drafter="model", draft_vocabulary=20, dtype="auto", **options
    )
    assert decoder.draft is not None and decoder.draft.restricted is not None
    assert decoder.draft.restricted.num_first == FIRST  # a multiple of what the kernels take
    texts = prompts([5, 17, 30])
    params = [SamplingParams(temperature=temperature, max_tokens=30, seed=seed) for seed in range(3)]
    results = drafted_as_plain(decoder, texts, params)
    assert sum(r.stats.num_accepted_tokens for r in results) > 10


def test_a_part_beyond_the_targets_vocabulary_is_the_whole_vocabulary(tmp_path: Path) -> None:
    """Models of one family pad their vocabularies to different sizes."""
    fresh("llama", seed=1, vocab_size=2 * VOCAB).save_pretrained(tmp_path)
    options: dict[str, Any] = {"drafter": "model", "draft_vocabulary": VOCAB + 1, "num_draft_tokens": 3}
    texts: dict[str, Any] = {"tokenizer": tokenizer(), "draft_tokenizer": tokenizer()}
    decoder = SpeculativeDecoder(shared("llama"), str(tmp_path), dtype="auto", **options, **texts)
    assert decoder.draft is not None and decoder.draft.restricted is not None
    assert decoder.draft.restricted.num_first > VOCAB
    drafted_as_plain(decoder, prompts([5]), [SamplingParams(temperature=0.0, max_tokens=10, logit_bias={5: 0.5})])


def test_auto_restricts_large_vocabularies_whose_weights_are_tied(monkeypatch: pytest.MonkeyPatch) -> None:
    def num_first(*, tied: bool, size: int, wanted: int | str = "auto") -> int | None:
        monkeypatch.setattr(draft_vocabulary, "COMMON", size)
        model = fresh("llama", tie_word_embeddings=tied)
        head = Restriction(model, wanted, lambda linear: linear).apply(by_position=True)
        assert (model.get_output_embeddings() is head) == (head is not None)
        return None if head is None else head.num_first

    assert num_first(tied=True, size=4) == 4
    assert num_first(tied=False, size=4) is None  # it would need a copy of the weights
    assert num_first(tied=True, size=40) is None  # little is left out
    assert num_first(tied=True, size=4, wanted="full") is None
    assert num_first(tied=False, size=4, wanted=40) is None  # rounded up to 64 of 61 tokens
    assert num_first(tied=False, size=4, wanted=32) == 32


@subcases("value", [0, -1, True, 1.5, "some", None])
def test_a_wrong_draft_vocabulary_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"draft_vocabulary=.*; allowed: 'auto', 'full' or a whole number, 1 or more$"):
        SpeculativeDecoder("toy", draft_vocabulary=value)


def test_a_draft_vocabulary_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"draft_vocabulary=40, but there is no draft model; allowed: 'auto' or 'full'"
    ):
        SpeculativeDecoder("toy", draft_vocabulary=40)
    with pytest.raises(UsageError, match=r"draft_vocabulary=40, but the toy model has no weights"):
        SpeculativeDecoder("toy", "toy:2", draft_vocabulary=40)
    with pytest.raises(UsageError, match=r"draft_vocabulary=40, but the draft model is loaded already"):
        SpeculativeDecoder(shared("llama"), shared("llama", 1), draft_vocabulary=40)
