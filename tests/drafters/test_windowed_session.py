"""Draft models that read a part of long prompts: what they read, what stays cached, and that texts stay the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder, UsageError
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.drafters.model.windowed_session import BEGINNING, PartialRow, WindowedSession, num_tokens_skipped
from slipstream.models.hf.backend import HFBackend
from tests.support.markers import subcases
from tests.support.tiny_models import fresh, perturbed, prompts, shared

LIMIT = 128
NOTHING = torch.empty(1, 0, dtype=torch.int64)


def row(tokens: list[int], tokens_wanted: int = 50) -> Row:
    return Row(0, list(tokens), SamplingParams(max_tokens=tokens_wanted), seed=0)


def session() -> Session:
    made = Session(HFBackend(shared("llama", 1)))
    made.reserve(4, 700)
    return made


@pytest.mark.parametrize("length", [1, LIMIT, LIMIT + 1, 160, 161, 500])
def test_at_most_the_limit_is_read_and_never_much_less(length: int) -> None:
    read = length - num_tokens_skipped(length, LIMIT)
    assert read == length if length <= LIMIT else LIMIT * 3 // 4 < read <= LIMIT


@torch.inference_mode()
def test_logits_are_those_of_the_beginning_and_the_end() -> None:
    (prompt,) = prompts([300])
    windowed, plain = WindowedSession(session(), LIMIT), session()
    known = row(prompt)
    left = num_tokens_skipped(300, LIMIT)
    for _ in range(3):
        part = known.tokens[:BEGINNING] + known.tokens[BEGINNING + left :]
        assert windowed.num_to_read(known) == len(part)
        expected = plain.score([row(part)], NOTHING, [0])
        torch.testing.assert_close(windowed.score([known], NOTHING, [0]), expected)
        assert not torch.allclose(expected, plain.score([row(known.tokens)], NOTHING, [0]))
        known.commit([5, 7])
    assert windowed.session.prefill_tokens < LIMIT
    assert windowed.holds(known) and not windowed.holds(row(prompt))


@torch.inference_mode()
def test_the_next_turn_of_a_chat_finds_what_was_read() -> None:
    (prompt,) = prompts([300])
    windowed = WindowedSession(session(), LIMIT)
    windowed.score([row(prompt)], NOTHING, [0])
    before = windowed.session.prefill_tokens
    windowed.score([row([*prompt, 4, 5, 6])], NOTHING, [0])  # as much is left out of it
    assert windowed.session.prefill_tokens - before < 16


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_are_the_targets_own(temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_DEBUG", "1")  # what is cached is compared with what was committed
    options: dict[str, Any] = {"num_draft_tokens": 3, "acceptance": "match", "draft_context": LIMIT}
    decoder = SpeculativeDecoder(shared("llama"), perturbed("llama"), drafter="model", **options)
    asked = prompts([300, 17, 250])
    params = [SamplingParams(temperature=temperature, max_tokens=30, seed=seed) for seed in range(3)]
    results = decoder.generate(asked, params)
    plain = decoder.using("none", num_draft_tokens="auto").generate(asked, params)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert sum(r.stats.num_accepted_tokens for r in results) > 5
    longer = [asked[0] + results[0].token_ids + asked[1]]
    assert decoder.generate(longer, params[:1])[0].token_ids == (
        decoder.using("none", num_draft_tokens="auto").generate(longer, params[:1])[0].token_ids
    )


def test_a_part_counts_its_rounds_without_what_it_leaves_out() -> None:
    decoder = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), drafter="model", num_draft_tokens=3, draft_context=LIMIT
    )
    (result,) = decoder.generate(prompts([300]), SamplingParams(max_tokens=8))
    left, first = num_tokens_skipped(300, LIMIT), result.rounds[1]
    part = PartialRow(0, [], SamplingParams(), seed=0, rounds=list(result.rounds))
    part.num_skipped = left
    assert part.true_length(1, 5) == first.start + first.num_accepted_on_chain - left
    assert part.true_length(len(result.rounds), 5) == 5  # a round that was never committed


@pytest.mark.slow
def test_auto_reads_what_the_context_holds() -> None:
    asked, read = prompts([300]), []
    for context, max_tokens in (("auto", 4), ("auto", 500), ("full", 4)):
        draft = fresh("llama", 1, max_position_embeddings=256)
        decoder = SpeculativeDecoder(shared("llama"), draft, drafter="model", num_draft_tokens=3, draft_context=context)
        decoder.generate(asked, SamplingParams(max_tokens=max_tokens))
        (state,) = decoder._models.draft_session.slot_states[:1]  # type: ignore[union-attr]
        read.append(state.row.prompt_length)  # type: ignore[union-attr]
    assert 128 < read[0] <= 252 and 64 < read[1] <= 128 and read[2] == 300


@subcases("value", [0, 127, True, 1.5, "some", None])
def test_a_wrong_draft_context_is_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=r"draft_context=.*; allowed: 'auto', 'full' or a whole number, 128 or more$"):
        SpeculativeDecoder("toy", draft_context=value)


def test_a_draft_context_that_would_be_ignored_is_refused() -> None:
    with pytest.raises(UsageError, match=r"draft_context=200, but there is no draft model; allowed: 'auto' or 'full'"):
        SpeculativeDecoder("toy", draft_context=200)
