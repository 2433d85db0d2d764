"""Real Qwen models with a draft model in reproducible mode: the text is that of plain decoding, to the bit.

The 0.5B model drafts for itself in 4 bits, which loads in half the time of the 1.5B model's pair.
"""

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.packed_linear import needs_float32

pytestmark = [pytest.mark.models, pytest.mark.exhaustive]

TARGETS, DRAFT = ["qwen0.5b", "qwen1.5b"], "qwen0.5b"
PROMPTS = ["Write a Python function that reverses a string.", "Name three rivers of Europe and where each one ends."]
GREEDY = SamplingParams(max_tokens=16)


@pytest.fixture(scope="module", params=TARGETS)
def decoder(request: pytest.FixtureRequest) -> SpeculativeDecoder:
    folders = [cache_folder() / name for name in (request.param, DRAFT)]
    if missing := [str(folder) for folder in folders if not (folder / "config.json").is_file()]:
        pytest.skip(f"needs the local model folder {missing[0]}")
    if needs_float32(torch.bfloat16):
        pytest.skip("this processor has no bfloat16 instructions: the pair's float32 copies take 8 GB and many minutes")
    return SpeculativeDecoder(str(folders[0]), str(folders[1]), reproducible=True, num_draft_tokens=3)


def test_a_draft_model_changes_no_text_alone_and_in_a_batch(decoder: SpeculativeDecoder) -> None:
    plain = [decoder.using("none").generate(prompt, GREEDY).token_ids for prompt in PROMPTS]
    alone = [decoder.using("model").generate(prompt, GREEDY) for prompt in PROMPTS]
    batch = decoder.using("model").generate(PROMPTS, GREEDY)
    assert [result.token_ids for result in alone] == plain
    assert [result.token_ids for result in batch] == plain
    assert sum(result.stats.num_accepted_tokens for result in alone) > 0
