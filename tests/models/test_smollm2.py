"""The embedded default model in float32: neither drafts nor batches change its texts.

Forwards may have any shape, since in float32 rounding changes no token of these texts.
"""

from functools import cache

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cache_folder import cache_folder

pytestmark = pytest.mark.smollm2

COUNT = 16
GREEDY = SamplingParams(max_tokens=COUNT)
PROMPTS = [
    "Write a Python function that returns the sum of the squares of a list of numbers.",
    "Summarize in one sentence: The tide comes in twice a day. When the tide is in, the boats leave the harbour. "
    "When the tide is out, the boats rest on the sand and the children look for shells.",
    "A baker sells 12 loaves in the morning and twice as many in the afternoon. How many loaves is that?",
]


@pytest.fixture(scope="module")
def decoder() -> SpeculativeDecoder:
    return SpeculativeDecoder("smollm2", dtype="float32", drafter="ngram", reproducible=False, max_batch_size=4)


@cache
def by_hugging_face() -> list[list[int]]:
    import transformers

    folder = cache_folder() / "smollm2"
    hf_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = []
    for prompt in PROMPTS:
        chat = [{"role": "user", "content": prompt}]
        ids = hf_tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        outputs = model.generate(**ids, do_sample=False, max_new_tokens=COUNT)
        texts.append(outputs[0, ids["input_ids"].shape[1] :].tolist())
    return texts


@pytest.mark.parametrize(("drafter", "length"), [("none", "auto"), ("ngram", 4)])
def test_a_text_alone_equals_hugging_face(decoder: SpeculativeDecoder, drafter: str, length: int | str) -> None:
    result = decoder.using(drafter, num_draft_tokens=length).generate(PROMPTS[1], GREEDY)
    assert result.token_ids == by_hugging_face()[1]
    assert (result.stats.num_draft_tokens > 0) == (drafter == "ngram")


def test_a_ragged_batch_of_four_equals_each_alone(decoder: SpeculativeDecoder) -> None:
    results = decoder.generate([*PROMPTS, PROMPTS[0]], GREEDY)
    assert [result.token_ids for result in results] == [*by_hugging_face(), by_hugging_face()[0]]
    assert all(max(round.num_rows for round in result.rounds) == 4 for result in results)


@pytest.mark.exhaustive
def test_a_stop_string_cuts_the_text_and_the_stream(decoder: SpeculativeDecoder) -> None:
    full_text = decoder.generate(PROMPTS[1], GREEDY).text
    stop = full_text[len(full_text) // 2 :][:7]
    params = SamplingParams(max_tokens=COUNT, stop=stop)
    texts = []
    for drafter in ("none", "ngram"):
        drafting = decoder.using(drafter)
        result = drafting.generate(PROMPTS[1], params)
        chunks = list(drafting.stream(PROMPTS[1], params))
        assert (result.text, result.finish_reason) == (full_text[: full_text.index(stop)], "stop")
        assert "".join(chunk.text for chunk in chunks) == result.text
        assert [token for chunk in chunks for token in chunk.token_ids] == result.token_ids
        texts.append(result.token_ids)
    assert texts[0] == texts[1] == by_hugging_face()[1][: len(texts[0])]


def test_seeded_texts_are_the_same_with_and_without_drafts(decoder: SpeculativeDecoder) -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=3, max_tokens=COUNT)
    texts = [decoder.using(drafter).generate(PROMPTS[2], params).token_ids for drafter in ("none", "ngram")]
    assert texts[0] == texts[1] != by_hugging_face()[2]
