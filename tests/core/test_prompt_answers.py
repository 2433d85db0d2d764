"""The forward that reads a prompt says what comes after it: the first token costs no forward of its own."""

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
from tests.support.markers import mostly_slow
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
def test_the_answer_is_what_a_forward_of_the_last_token_gives(name: str, shapes: Shapes) -> None:
    texts = [text[:60] for text in PROMPTS]
    nothing = torch.empty(4, 0, dtype=torch.int64)
    expected = session_of(shapes, name).score(rows_of(texts), nothing, [0] * 4)
    session = session_of(shapes, name)
    answer = session.prefill(rows_of(texts), logits=True)
    assert answer is not None and answer.shape == expected.shape
    torch.testing.assert_close(answer, expected, rtol=1e-4, atol=2e-5)


def test_rows_that_the_memory_knows_are_not_answered_and_read_no_more_than_before() -> None:
    session = session_of(EXACT_FIT)
    assert session.prefill(rows_of(PROMPTS[:2]), logits=True) is not None
    read = session.prefill_tokens
    assert session.prefill(rows_of(PROMPTS[:2]), logits=True) is None
    assert session.prefill_tokens == read == 43
    assert session_of(EXACT_FIT).prefill(rows_of(PROMPTS)) is None


@pytest.mark.parametrize("made", [Session(HashBackend()), session_of(Shapes((2, 4, 8), 64, reuse=64))])
def test_nothing_is_answered_where_prompts_agree_by_chunks_only_or_the_backend_cannot(made: Session) -> None:
    made.reserve(1, 64)
    assert not made.returns_prompt_logits
    assert made.prefill(rows_of([[1, 2, 3, 4, 5]]), logits=True) is None
    assert made.slot_states[0].base == 4


class Counting:
    """Notes the columns of every forward of the target."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widths: list[int] = []
        whole = HFBackend._forward_rows

        def eager(backend: HFBackend, tokens: Tensor, *rest: Any) -> Tensor:
            self.widths.append(tokens.shape[1])
            return whole(backend, tokens, *rest)

        monkeypatch.setattr(HFBackend, "_forward_rows", eager)


@pytest.mark.parametrize("texts", [PROMPTS[1:2], PROMPTS])
def test_plain_decoding_takes_as_many_forwards_as_tokens(
    texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = SpeculativeDecoder(shared("llama"), drafter="none", reproducible=False, max_batch_size=4)
    counting = Counting(monkeypatch)
    results = made.generate(texts, GREEDY)
    assert [r.token_ids for r in results] == [reference(shared("llama"), text, 12) for text in texts]
    assert counting.widths == [*map(len, texts), *[1] * 11]
    first = results[0].rounds[0]
    assert first.seconds.verify == first.seconds.draft == 0 < first.seconds.prefill
    assert results[0].stats.block_efficiency == 1.0


@pytest.mark.parametrize("drafter", ["ngram", "model"])
def test_the_first_round_of_every_row_drafts_nothing_also_in_a_batch_under_way(drafter: str) -> None:
    draft = perturbed("llama") if drafter == "model" else None
    made = SpeculativeDecoder(
        shared("llama"), draft, drafter=drafter, num_draft_tokens=3, reproducible=False, max_batch_size=2
    )
    results = made.generate(PROMPTS, GREEDY)
    assert [r.token_ids for r in results] == [reference(shared("llama"), text, 12) for text in PROMPTS]
    assert all(result.rounds[0].draft == () for result in results)
    assert any(done.draft for result in results for done in result.rounds[1:])


def test_a_policy_hears_of_no_row_before_its_first_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it asks for then would count as read or drafted, and is not."""
    made = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), drafter="model", reproducible=False, max_batch_size=2
    )
    seen: list[int] = []
    whole = Planner.model_lengths

    def model_lengths(planner: Planner, rows: Sequence[Row], *others: Any) -> list[int]:
        seen.extend(len(row.rounds) for row in rows)
        return whole(planner, rows, *others)

    monkeypatch.setattr(Planner, "model_lengths", model_lengths)
    for _ in range(2):  # the second time the memory knows the prompts
        made.generate(PROMPTS, GREEDY)
    assert seen and min(seen) == 1


@pytest.mark.parametrize("acceptance", mostly_slow(["block", "rejection", "match"], "block"))
def test_a_seed_says_the_same_with_an_empty_memory_a_full_one_and_in_a_batch(acceptance: str) -> None:
    """Draws of these rules depend on where rounds begin."""
    made = SpeculativeDecoder(
        shared("llama"), perturbed("llama"), drafter="model", num_draft_tokens=3, acceptance=acceptance
    )
    first = made.generate(PROMPTS[1], SAMPLED).token_ids
    assert made.generate(PROMPTS[1], SAMPLED).token_ids == first
    assert made.generate([PROMPTS[0], PROMPTS[1]], SAMPLED)[1].token_ids == first
    made.forget()
    assert made.generate([PROMPTS[1], PROMPTS[3]], [SAMPLED, GREEDY])[0].token_ids == first


def test_one_token_and_end_tokens_are_kept_to() -> None:
    expected = reference(shared("llama"), PROMPTS[1], 12)
    made = SpeculativeDecoder(shared("llama"), drafter="ngram", reproducible=False)
    assert made.generate(PROMPTS[1], SamplingParams(max_tokens=1)).token_ids == expected[:1]
    made.forget()
    ended = made.generate(PROMPTS[1], SamplingParams(max_tokens=12, stop_token_ids=[expected[0]]))
    assert (ended.token_ids, ended.finish_reason) == (expected[:1], "stop")
