"""The forward that reads a prompt also returns the logits after it, so the first token costs no forward of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.kv_slots import EXACT_FIT, Shapes
from slipstream.core.session import Session
from slipstream.core.types import Row
from slipstream.draft_length.planner import Planner
from slipstream.models.hf.backend import HFBackend
from tests.support.tiny_models import HashBackend, perturbed, prompts, reference, shared

AGREEING = Shapes((2, 4, 8, 16, 32, 64, 128, 256), 256, 512)
PROMPTS = [prompts((count,), seed=count)[0] for count in (3, 40, 9, 300)]
GREEDY = SamplingParams(max_tokens=12)
SAMPLED = SamplingParams(max_tokens=24, temperature=1.0, seed=5)


def rows_of(texts: list[list[int]]) -> list[Row]:
    return [Row(i, list(text), GREEDY, seed=0) for i, text in enumerate(texts)]


def session_of(shapes: Shapes, name: str = "llama") -> Session:
    session = Session(HFBackend(shared(name)), shapes)
    session.reserve(4, 400)
    return session


@pytest.mark.parametrize("shapes", [EXACT_FIT, Shapes((), 7), AGREEING], ids=["exact", "chunks", "agreeing"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_prompt_logits_equal_those_of_a_forward_of_the_last_token(name: str, shapes: Shapes) -> None:
    texts = [text[:60] for text in PROMPTS]
    no_draft = torch.empty(4, 0, dtype=torch.int64)
    expected = session_of(shapes, name).score(rows_of(texts), no_draft, [0] * 4)
    session = session_of(shapes, name)
    logits = session.prefill(rows_of(texts), logits=True)
    assert logits is not None and logits.shape == expected.shape
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-5)


def test_a_cached_prompt_returns_no_logits_and_is_not_read_again() -> None:
    session = session_of(EXACT_FIT)
    assert session.prefill(rows_of(PROMPTS[:2]), logits=True) is not None
    read = session.prefill_tokens
    assert session.prefill(rows_of(PROMPTS[:2]), logits=True) is None
    assert session.prefill_tokens == read == 43
    assert session_of(EXACT_FIT).prefill(rows_of(PROMPTS)) is None


@pytest.mark.parametrize(
    "session", [Session(HashBackend()), session_of(Shapes((2, 4, 8), 64, reuse=64))], ids=["backend", "chunks"]
)
def test_no_prompt_logits_where_prompts_agree_by_chunks_only_or_the_backend_has_none(session: Session) -> None:
    session.reserve(1, 64)
    assert not session.table.returns_prompt_logits
    assert session.prefill(rows_of([[1, 2, 3, 4, 5]]), logits=True) is None
    assert session.slot_states[0].base == 4


class CountsWidths:
    """Records the width of every forward."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widths: list[int] = []
        forward_rows = HFBackend._forward_rows

        def counted(backend: HFBackend, tokens: Tensor, *arguments: Any) -> Tensor:
            self.widths.append(tokens.shape[1])
            return forward_rows(backend, tokens, *arguments)

        monkeypatch.setattr(HFBackend, "_forward_rows", counted)


@pytest.mark.parametrize("texts", [PROMPTS[1:2], PROMPTS])
def test_plain_decoding_takes_as_many_forwards_as_tokens(
    texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = SpeculativeDecoder(shared("llama"), drafter="none", reproducible=False, max_batch_size=4)
    counts = CountsWidths(monkeypatch)
    results = decoder.generate(texts, GREEDY)
    assert [r.token_ids for r in results] == [reference(shared("llama"), text, 12) for text in texts]
    assert counts.widths == [*map(len, texts), *[1] * 11]
    first = results[0].rounds[0]
    assert first.seconds.verify == first.seconds.draft == 0 < first.seconds.prefill
    assert results[0].stats.block_efficiency == 1.0


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_the_first_round_of_every_row_drafts_nothing_even_in_a_running_batch(drafter: str) -> None:
    draft = perturbed("llama") if drafter == "model" else None
    decoder = SpeculativeDecoder(
        shared("llama"), draft, drafter=drafter, num_draft_tokens=3, reproducible=False, max_batch_size=2
    )
    results = decoder.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in results] == [reference(shared("llama"), text, 12) for text in PROMPTS]
    assert all(result.rounds[0].draft == () for result in results)
    assert any(round.draft for result in results for round in result.rounds[1:])


def test_a_policy_sees_no_row_before_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that it chose before would count as read or drafted."""
    decoder = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), drafter="model", reproducible=False, max_batch_size=2
    )
    round_counts: list[int] = []
    original = Planner.model_lengths

    def model_lengths(planner: Planner, rows: Sequence[Row], *others: Any) -> list[int]:
        round_counts.extend(len(row.rounds) for row in rows)
        return original(planner, rows, *others)

    monkeypatch.setattr(Planner, "model_lengths", model_lengths)
    for _ in range(2):  # the second time the prompts are cached
        decoder.generate(PROMPTS, GREEDY)
    assert round_counts and min(round_counts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["block", "rejection", "match"])
def test_a_seed_gives_the_same_text_with_an_empty_cache_with_a_full_one_and_in_a_batch(acceptance: str) -> None:
    """Random draws of these rules depend on where rounds begin."""
    decoder = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), drafter="model", num_draft_tokens=3, acceptance=acceptance
    )
    first = decoder.generate(PROMPTS[1], SAMPLED).token_ids
    assert decoder.generate(PROMPTS[1], SAMPLED).token_ids == first
    assert decoder.generate([PROMPTS[0], PROMPTS[1]], SAMPLED)[1].token_ids == first
    decoder.forget()
    assert decoder.generate([PROMPTS[1], PROMPTS[3]], [SAMPLED, GREEDY])[0].token_ids == first


def test_the_first_token_respects_max_tokens_and_stop_token_ids() -> None:
    expected = reference(shared("llama"), PROMPTS[1], 12)
    decoder = SpeculativeDecoder(shared("llama"), drafter="ngram", reproducible=False)
    assert decoder.generate(PROMPTS[1], SamplingParams(max_tokens=1)).token_ids == expected[:1]
    decoder.forget()
    ended = decoder.generate(PROMPTS[1], SamplingParams(max_tokens=12, stop_token_ids=[expected[0]]))
    assert (ended.token_ids, ended.finish_reason) == (expected[:1], "stop")
