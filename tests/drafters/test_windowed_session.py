"""Draft models that read only part of a long prompt: what they read, what stays cached, and that no text changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.drafters.model.windowed_session import BEGINNING, PartialRow, WindowedSession, num_tokens_skipped
from slipstream.models.hf.backend import HFBackend
from tests.support.markers import mostly_exhaustive, subcases
from tests.support.plain_texts import drafted_as_plain
from tests.support.tiny_models import fresh, perturbed, prompts, shared

LIMIT = 128
NO_DRAFT = torch.empty(1, 0, dtype=torch.int64)


def row(tokens: list[int], tokens_wanted: int = 50) -> Row:
    return Row(0, list(tokens), SamplingParams(max_tokens=tokens_wanted), seed=0)


def session() -> Session:
    new_session = Session(HFBackend(shared("llama", 1)))
    new_session.reserve(4, 700)
    return new_session


@pytest.mark.parametrize("length", [1, LIMIT, LIMIT + 1, 160, 161, 500])
def test_between_three_quarters_of_the_limit_and_the_limit_is_read(length: int) -> None:
    read = length - num_tokens_skipped(length, LIMIT)
    assert read == length if length <= LIMIT else LIMIT * 3 // 4 < read <= LIMIT


@torch.inference_mode()
def test_logits_are_those_of_the_beginning_and_the_end_of_the_prompt() -> None:
    (prompt,) = prompts([300])
    windowed, plain = WindowedSession(session(), LIMIT), session()
    long_row = row(prompt)
    num_skipped = num_tokens_skipped(300, LIMIT)
    for _ in range(3):
        part = long_row.tokens[:BEGINNING] + long_row.tokens[BEGINNING + num_skipped :]
        assert windowed.num_to_read(long_row) == len(part)
        expected = plain.score([row(part)], NO_DRAFT, [0])
        torch.testing.assert_close(windowed.score([long_row], NO_DRAFT, [0]), expected)
        assert not torch.allclose(expected, plain.score([row(long_row.tokens)], NO_DRAFT, [0]))
        long_row.commit([5, 7])
    assert windowed.session.prefill_tokens < LIMIT
    assert windowed.holds(long_row) and not windowed.holds(row(prompt))


@torch.inference_mode()
def test_the_next_turn_of_a_chat_reuses_the_cached_part() -> None:
    (prompt,) = prompts([300])
    windowed = WindowedSession(session(), LIMIT)
    windowed.score([row(prompt)], NO_DRAFT, [0])
    before = windowed.session.prefill_tokens
    windowed.score([row([*prompt, 4, 5, 6])], NO_DRAFT, [0])  # it skips as many tokens
    assert windowed.session.prefill_tokens - before < 16


@pytest.mark.slow
@pytest.mark.parametrize("temperature", mostly_exhaustive([0.0, 0.9], 0.9))
def test_the_text_is_that_of_plain_decoding(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")  # what is cached is compared with what was committed
    options: dict[str, Any] = {"num_draft_tokens": 3, "acceptance": "match", "draft_context": LIMIT}
    decoder = SpeculativeDecoder(shared("llama"), perturbed("llama"), drafter="model", **options)
    texts = prompts([300, 17, 250])
    params = [SamplingParams(temperature=temperature, max_tokens=30, seed=seed) for seed in range(3)]
    results = drafted_as_plain(decoder, texts, params)
    assert sum(r.stats.num_accepted_tokens for r in results) > 5
    drafted_as_plain(decoder, [texts[0] + results[0].token_ids + texts[1]], params[:1])


def test_a_partial_row_places_rounds_without_the_skipped_tokens() -> None:
    decoder = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), drafter="model", num_draft_tokens=3, draft_context=LIMIT
    )
    (result,) = decoder.generate(prompts([300]), SamplingParams(max_tokens=8))
    num_skipped, first = num_tokens_skipped(300, LIMIT), result.rounds[1]
    part = PartialRow(0, [], SamplingParams(), seed=0, rounds=list(result.rounds))
    part.num_skipped = num_skipped
    assert part.true_length(1, 5) == first.start + first.num_accepted_on_chain - num_skipped
    assert part.true_length(len(result.rounds), 5) == 5  # a round that was never committed


def test_auto_leaves_room_in_the_context_for_the_output() -> None:
    texts, lengths_read = prompts([300]), list[int]()
    for context, max_tokens in (("auto", 4), ("auto", 500), ("full", 4)):
        draft = fresh("llama", 1, max_position_embeddings=256)
        options = {"num_draft_tokens": 3, "draft_context": context, "reproducible": False}
        decoder = SpeculativeDecoder(shared("llama"), draft, drafter="model", **options)
        chunks = decoder.stream(texts[0], SamplingParams(max_tokens=max_tokens))
        next(chunks), next(chunks)
        (state,) = decoder._models.draft_session.slot_states[:1]  # type: ignore[union-attr]
        lengths_read.append(state.row.prompt_length)  # type: ignore[union-attr]
    assert 128 < lengths_read[0] <= 252 and 64 < lengths_read[1] <= 128 and lengths_read[2] == 300


def test_a_draft_model_that_holds_all_of_the_targets_context_has_no_window() -> None:
    for context, has_window in (("auto", False), (200, True)):
        models = SpeculativeDecoder("toy", "toy:2", draft_context=context)._models
        assert (models.windowed is not None) is has_window


@subcases("value", [0, 127, True, 1.5, "some", None])
def test_a_wrong_draft_context_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"draft_context=.*; allowed: 'auto', 'full' or a whole number, 128 or more$"):
        SpeculativeDecoder("toy", draft_context=value)


def test_a_draft_context_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(UsageError, match=r"draft_context=200, but there is no draft model; allowed: 'auto' or 'full'"):
        SpeculativeDecoder("toy", draft_context=200)
