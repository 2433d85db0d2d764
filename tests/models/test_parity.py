"""Speculative text equals plain text and Hugging Face `generate`, on tiny random models of every kind."""

from functools import cache
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from tests.support.markers import mostly_exhaustive, mostly_slow
from tests.support.tiny_models import (
    ARCHITECTURES,
    VOCAB,
    fresh,
    perturbed,
    prompts,
    reference,
    shared,
    tokenizer,
)

pytestmark = pytest.mark.usefixtures("cache_audit")

COUNT = 20
GREEDY = SamplingParams(max_tokens=COUNT)
PROMPTS = prompts([1, 5, 14, 40])  # the last one is longer than every sliding window
DRAFTS = {"none": None, "ngram": None, "other": shared, "close": perturbed}


@cache
def expected(name: str) -> list[list[int]]:
    texts = [reference(shared(name), prompt, COUNT) for prompt in PROMPTS]
    assert len({token for text in texts for token in text}) > 8, "a constant text would prove nothing"
    return texts


def decoder(name: str, drafter: str, **options: Any) -> SpeculativeDecoder:
    """A decoder on the tiny model `name`; "other" and "close" are model drafters."""
    draft = {"other": lambda: shared(name, 1), "close": lambda: perturbed(name)}.get(drafter, lambda: None)()
    return SpeculativeDecoder(shared(name), draft, drafter=drafter if draft is None else "model", **options)


def ids(results: list[Any]) -> list[list[int]]:
    return [result.token_ids for result in results]


# drafters do not depend on the architecture: all of them with one, and one with all
ALIKE = ("llama-eager", "qwen2", "qwen3", "olmo2")  # transformers computes these like others
BATCHES = [*(("llama", drafter) for drafter in DRAFTS), *((name, "close") for name in ARCHITECTURES if name != "llama")]


@pytest.mark.each_value
@pytest.mark.parametrize("reproducible", ["auto", False])  # "auto": reproducible if shapes agree on this machine
@pytest.mark.parametrize(
    ("name", "drafter"),
    [
        *mostly_slow([case for case in BATCHES if case[0] not in ALIKE], ("llama", "ngram"), ("llama", "close")),
        *mostly_exhaustive(case for case in BATCHES if case[0] in ALIKE),
    ],
)
def test_greedy_batch_equals_hugging_face_at_every_draft_length(
    name: str, drafter: str, reproducible: bool | str
) -> None:
    speculative = decoder(name, drafter, reproducible=reproducible)
    for length in (1, 3, 7) if drafter != "none" else (0,):
        results = speculative.using(speculative.drafter_name, num_draft_tokens=length).generate(PROMPTS, GREEDY)
        assert ids(results) == expected(name), f"draft length {length}"


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", mostly_slow(DRAFTS, "close"))
@pytest.mark.parametrize("name", mostly_exhaustive(ARCHITECTURES, "llama", "gemma3", "gpt2"))
def test_a_row_alone_equals_hugging_face(name: str, drafter: str) -> None:
    speculative = decoder(name, drafter, num_draft_tokens=3 if drafter != "none" else 0)
    assert ids([speculative.generate(prompt, GREEDY) for prompt in PROMPTS]) == expected(name)


@pytest.mark.parametrize("name", mostly_slow(["llama", "gemma3", "gpt2"], "llama"))
def test_drafts_of_the_close_model_are_accepted_in_part(name: str) -> None:
    results = decoder(name, "close", num_draft_tokens=3).generate(PROMPTS, GREEDY)
    drafted = sum(result.stats.num_draft_tokens for result in results)
    accepted = sum(result.stats.num_accepted_tokens for result in results)
    assert 0 < accepted < drafted  # otherwise parity with it would not exercise both ends of a round


@pytest.mark.each_value
@pytest.mark.parametrize("name", mostly_slow(["llama", "mistral", "gemma3"], "gemma3"))
@pytest.mark.parametrize("reproducible", mostly_slow([True, False], False))
def test_a_prompt_longer_than_a_prefill_chunk_equals_hugging_face(name: str, reproducible: bool) -> None:
    long = prompts([530, 300], seed=3)
    speculative = decoder(name, "close", num_draft_tokens=3, reproducible=reproducible)
    assert ids(speculative.generate(long, SamplingParams(max_tokens=8))) == [
        reference(shared(name), p, 8) for p in long
    ]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", mostly_exhaustive(["none", "ngram", "close"], "close"))
def test_the_context_can_be_filled_to_its_last_position(drafter: str) -> None:
    model, prompt = shared("gpt2"), PROMPTS[3]
    room = model.config.n_positions - len(prompt)
    batch = decoder("gpt2", drafter).generate([prompt, PROMPTS[1]], SamplingParams(max_tokens=room))
    assert ids(batch) == [reference(model, p, room) for p in (prompt, PROMPTS[1])]


@pytest.mark.slow
@pytest.mark.parametrize("drafter", mostly_exhaustive(["none", "ngram", "close"], "close"))
def test_a_double_precision_model_keeps_its_double_precision_text(drafter: str) -> None:
    model, draft = shared("llama", 0, torch.float64), perturbed("llama") if drafter == "close" else None
    speculative = SpeculativeDecoder(model, draft, drafter=drafter if draft is None else "model")
    assert ids(speculative.generate(PROMPTS, GREEDY)) == [reference(model, prompt, COUNT) for prompt in PROMPTS]


@pytest.mark.parametrize("head_size", mostly_slow([VOCAB + 19, VOCAB - 9], VOCAB - 9))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_output_layer_of_another_size_in_the_draft_model_changes_no_text(head_size: int, temperature: float) -> None:
    draft = fresh("qwen2", 4, vocab_size=head_size)
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=COUNT)
    char_tokenizer = tokenizer()
    options: dict[str, Any] = {"tokenizer": char_tokenizer, "acceptance": "match", "num_draft_tokens": 3}
    drafted = SpeculativeDecoder(shared("qwen2"), draft, **options).generate(PROMPTS, params)
    plain = SpeculativeDecoder(shared("qwen2"), drafter="none", tokenizer=char_tokenizer).generate(PROMPTS, params)
    assert ids(drafted) == ids(plain)
    assert any(token >= min(head_size, VOCAB) - 9 for text in ids(plain) for token in text)


SAMPLED = [
    SamplingParams(temperature=0.8, top_k=20, seed=11, max_tokens=COUNT),
    SamplingParams(temperature=1.3, top_p=0.9, seed=12, max_tokens=9, repetition_penalty=1.2),
    SamplingParams(max_tokens=COUNT - 3, presence_penalty=0.5),
    SamplingParams(temperature=0.6, min_p=0.02, seed=14, max_tokens=COUNT, num_draft_tokens=5),
]


@pytest.mark.each_value
@pytest.mark.parametrize("drafter", mostly_slow(["ngram", "other", "close"], "close"))
@pytest.mark.parametrize("name", mostly_slow(["llama", "gemma3", "gpt2"], "llama"))
def test_match_generates_the_text_of_seeded_plain_decoding(name: str, drafter: str) -> None:
    plain = decoder(name, "none").generate(PROMPTS, SAMPLED)
    drafted = decoder(name, drafter, acceptance="match", num_draft_tokens=3).generate(PROMPTS, SAMPLED)
    assert ids(drafted) == ids(plain)
    assert ids(plain)[0] != expected(name)[0]


@pytest.mark.each_value
@pytest.mark.parametrize("acceptance", mostly_slow(["rejection", "match", "auto"], "rejection"))
@pytest.mark.parametrize("drafter", mostly_slow(["ngram", "close"], "close"))
def test_each_row_keeps_its_options_and_random_draws_in_a_batch(drafter: str, acceptance: str) -> None:
    speculative = decoder("llama", drafter, acceptance=acceptance, num_draft_tokens=3)
    batch = speculative.generate(PROMPTS, SAMPLED)
    alone = [speculative.generate(prompt, params) for prompt, params in zip(PROMPTS, SAMPLED, strict=True)]
    assert ids(batch) == ids(alone)
    assert [len(text) for text in ids(batch)] == [params.max_tokens for params in SAMPLED]
    assert max(round.num_draft_tokens for round in batch[0].rounds) <= 3


def test_a_request_sets_its_own_draft_length() -> None:
    params = [SamplingParams(max_tokens=COUNT, num_draft_tokens=n) for n in (0, 1, 5, None)]
    results = decoder("llama", "close", num_draft_tokens=2).generate(PROMPTS, params)
    assert [max(round.num_draft_tokens for round in result.rounds) for result in results] == [0, 1, 5, 2]
    assert ids(results) == expected("llama")


def test_another_seed_gives_another_text() -> None:
    speculative = decoder("llama", "close")
    texts = [
        speculative.generate(PROMPTS[2], SamplingParams(temperature=1.0, seed=s, max_tokens=COUNT)) for s in (1, 2, 1)
    ]
    assert texts[0].token_ids == texts[2].token_ids != texts[1].token_ids
    unseeded = speculative.generate(PROMPTS[2], SamplingParams(temperature=1.0, max_tokens=COUNT))
    reseeded = speculative.generate(PROMPTS[2], SamplingParams(temperature=1.0, max_tokens=COUNT, seed=unseeded.seed))
    assert unseeded.token_ids == reseeded.token_ids
