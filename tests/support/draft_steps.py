"""The logits of a draft head step by step after a text, from the sessions that a decoder drafts with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.config import DecoderConfig
from slipstream.core.types import Row
from slipstream.models.heads.network import all_scores
from slipstream.sampling.params import SamplingParams
from slipstream.wiring.model_pair import ModelPair
from tests.support.tiny_models import tokenizer


def pair_of(model: Any, head: Path | str) -> ModelPair:
    """A target and its head as a decoder loads them."""
    return ModelPair.load(model, str(head), DecoderConfig(reproducible=False, drafter="model", fast=False), tokenizer())


@torch.inference_mode()
def step_logits(pair: ModelPair, text: Sequence[int], steps: int, draft: Sequence[int] | None = None) -> list[Tensor]:
    """The head's logits [V] for each token of a draft after a text; the target has read all but its last token.

    draft: its tokens, at least all but the last; the likeliest by default.
    """
    scorer = pair.draft_scorer()
    assert scorer is not None and pair.draft_session is not None
    pair.forget()
    row = Row(0, list(text[:-1]), SamplingParams(temperature=0.0), seed=0)
    for session in (pair.target_session, pair.draft_session):
        session.reserve(1, len(text) + steps + 16)
    pair.target_session.score([row], torch.empty(1, 0, dtype=torch.int64), [0])
    row.tokens.append(text[-1])
    drafted, logits = torch.zeros(1, 0, dtype=torch.int64), []
    for step in range(steps):
        scored = scorer.score([row], drafted, [step], keep=1)[0, -1]
        logits.append(all_scores(scored, scorer.token_ids, scorer.backend.vocab_size).clone())
        token = logits[-1].argmax() if draft is None or step >= len(draft) else torch.tensor(draft[step])
        drafted = torch.cat([drafted, token[None, None]], 1)
    scorer.keep_drafts([0])
    return logits


def same_logits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> list[bool]:
    """For each step, whether the logits agree within 1e-5 of the largest."""
    return [
        bool((a - b).abs().max() <= 1e-5 * b.abs().max().clamp(min=1)) for a, b in zip(found, expected, strict=True)
    ]
