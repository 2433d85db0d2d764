"""Real models of different vocabularies: drafts change no text to the bit, greedy or seeded, alone or in a batch."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.packed_linear import needs_float32

PROMPTS = [
    "Write a Python function that reverses a string.",
    "Name three rivers of Europe and where each one ends.",
    "Erkl\u00e4re kurz, was eine B\u00e4ckerei verkauft, und ende mit einem Emoji. \N{ROCKET}",
]
PAIRS = [("smollm2", "gemma3"), ("qwen1.5b", "smollm2"), ("gemma3", "qwen0.5b")]


def folder(name: str) -> str:
    path = cache_folder() / name
    if not (path / "config.json").is_file():
        pytest.skip(f"needs the local model folder {path}")
    return str(path)


def check(decoder: SpeculativeDecoder, count: int, prompts: Sequence[str] = PROMPTS) -> int:
    """Compares all texts with plain decoding, and returns the number of accepted tokens."""
    accepted = 0
    for temperature in (0.0, 0.8):
        params = [SamplingParams(max_tokens=count, temperature=temperature, seed=seed) for seed in range(len(prompts))]
        plain = [decoder.using("none").generate(p, each).token_ids for p, each in zip(prompts, params, strict=True)]
        for drafter in ("model", "auto"):
            drafting = decoder.using(drafter, num_draft_tokens=4 if drafter == "model" else "auto")
            alone = [drafting.generate(p, each) for p, each in zip(prompts, params, strict=True)]
            batch = drafting.generate(prompts, params)
            assert [each.token_ids for each in alone] == plain == [each.token_ids for each in batch]
            accepted += sum(each.stats.num_accepted_tokens for each in alone)
    return accepted


@pytest.mark.smollm2
@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize(("target", "draft"), [("smollm2", "toy"), ("toy", "smollm2")])
def test_smollm2_drafts_and_is_drafted_for_across_vocabularies(target: str, draft: str) -> None:
    assert check(SpeculativeDecoder(target, draft, reproducible=True), 8, PROMPTS[1:]) > 0


@pytest.mark.models
@pytest.mark.exhaustive
@pytest.mark.usefixtures("cache_audit")
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_a_draft_model_of_another_family_changes_no_text(target: str, draft: str) -> None:
    if needs_float32(torch.bfloat16):
        pytest.skip("this processor has no bfloat16 instructions: float32 copies take many minutes")
    with SpeculativeDecoder(folder(target), folder(draft), reproducible=True, max_batch_size=4) as decoder:
        assert check(decoder, 12, PROMPTS[1:]) > 10
