"""Code written for the reference systems runs after a change of its import line, and is exact where they are not."""

import logging
from typing import Any

import pytest
import torch

from slipstream import SlipstreamError, Stats
from slipstream.integrations.reference import (
    GreedyProcessor,
    MultinomialProcessor,
    NucleusProcessor,
    SpeculativeDecoder,
    autoregressive_generate,
    speculative_generate,
    speculative_generate_batch,
)
from tests.support.reference_cases import PROMPTS, WORDS, greedy, pair
from tests.support.tiny_models import VOCAB as LETTERS
from tests.support.tiny_models import perturbed, reference, shared

pytestmark = pytest.mark.slow

# the code that the references publish


def test_the_single_example_runs_as_printed() -> None:
    target, drafter = pair()
    tokenizer = WORDS

    prompt = "Explain quantum computing in simple terms."
    chat = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(text, return_tensors="pt").input_ids[0].tolist()

    output_ids, accept_rate = speculative_generate(
        inputs,
        drafter,
        target,
        tokenizer=tokenizer,
        gamma=5,
        logits_processor=GreedyProcessor(),
        max_gen_len=100,
        eos_tokens_id=[tokenizer.eos_token_id],
    )
    output_text = tokenizer.decode(output_ids, skip_special_tokens=True)
    plain = reference(target, inputs, 100)
    assert output_ids == plain[: [*plain, 1].index(1) + 1]
    assert output_text and 0 < accept_rate < 1

    torch.manual_seed(1)  # a text that is long enough to measure a rate
    output_ids, accept_rate = speculative_generate(
        inputs,
        drafter,
        target,
        gamma=4,
        logits_processor=NucleusProcessor(temperature=0.7, top_p=0.9),
        max_gen_len=50,
        eos_tokens_id=[tokenizer.eos_token_id],
        use_cache=True,
        first_target=True,
    )
    assert 1 <= len(output_ids) <= 50 and 0 < accept_rate < 1


class Dataset(list[str]):
    """The one operation of a data set that the loop uses: dataset[i:j]["prompt"]."""

    def __getitem__(self, part: Any) -> Any:
        return {"prompt": list(self)[part]}


def test_the_batch_loop_runs_as_printed() -> None:
    target_model, draft_model = pair()
    tokenizer, prompts, logits_processor = WORDS, Dataset(["hello there", "x", "the ferry leaves"]), GreedyProcessor()
    gamma, max_new_tokens, batch_size = 4, 24, 2
    batch, lengths = batch_size, []
    for start_idx in range(0, len(prompts), batch_size):
        end_idx = min(start_idx + batch, len(prompts))
        batch_prompts = prompts[start_idx:end_idx]["prompt"]
        input_ids = tokenizer(batch_prompts, max_length=1024, truncation=True).input_ids
        output_ids_sd, alpha, stats = speculative_generate_batch(
            input_ids,
            draft_model,
            target_model,
            logits_processor=logits_processor,  # for sampling
            gamma=gamma,  # draft length
            max_gen_len=max_new_tokens,
            eos_tokens_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tokenizer=tokenizer,
        )
        for prompt, output, rate, stat in zip(input_ids, output_ids_sd, alpha, stats, strict=True):
            plain = reference(target_model, prompt, max_new_tokens)
            assert output == plain[: [*plain, 1].index(1) + 1]
            assert isinstance(stat, Stats) and stat.lossless and stat.num_output_tokens == len(output)
            assert rate == stat.num_accepted_tokens / stat.num_draft_tokens
            lengths.append(len(output))
    assert lengths.count(max_new_tokens) >= 2


def test_every_number_of_draft_tokens_decodes_and_reports_statistics() -> None:
    target_model, draft_model = pair()
    input_ids = torch.tensor([PROMPTS[1]])
    rates = {}
    for draft_tokens in range(2, 9):
        decoder = SpeculativeDecoder(target_model=target_model, draft_model=draft_model, draft_tokens=draft_tokens)
        with pytest.raises(SlipstreamError, match="before the first decode"):
            decoder.stats  # noqa: B018
        generated = decoder.decode(input_ids, max_new_tokens=30)
        assert generated.shape == (1, input_ids.shape[1] + 30) and torch.equal(generated[:, :17], input_ids)
        assert len(decoder.stats.drafted_per_position) == draft_tokens and decoder.stats.tokens_per_second > 0
        rates[draft_tokens] = decoder.acceptance_rate
    assert all(0 < rate < 1 for rate in rates.values()) and rates[8] < rates[2]


# greedy decoding gives the target's greedy text


@pytest.mark.each_value
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_greedy_text_equals_the_targets(name: str, gamma: int) -> None:
    target, prompt = shared(name), PROMPTS[2]
    plain = reference(target, prompt, 24)
    options: dict[str, Any] = {"max_gen_len": 24, "eos_tokens_id": None}
    ids, rate = speculative_generate(prompt, perturbed(name), target, gamma=gamma, **options)
    assert ids == plain == autoregressive_generate(prompt, target, **options)
    assert (rate > 0) == (gamma > 0)


def test_skipping_the_adjustment_leaves_greedy_exact(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "slipstream"):
        assert greedy(PROMPTS[0], skip_sample_adjustment=True) == greedy(PROMPTS[0])
    assert not any("lossy" in record.message for record in caplog.records)


@pytest.mark.parametrize("options", [{"use_cache": True}, {"first_target": False}, {"pad_token_id": None}])
def test_cache_and_padding_options_do_not_change_the_text(options: dict[str, Any]) -> None:
    assert greedy(PROMPTS[1], **options) == greedy(PROMPTS[1])


@pytest.mark.parametrize("count", [1, 2])
def test_texts_of_one_and_two_tokens_are_correct(count: int) -> None:
    ids, rate = greedy(PROMPTS[0], max_gen_len=count)
    assert ids == reference(shared("qwen2"), PROMPTS[0], count)
    assert rate == 0.0 if count == 1 else rate in (0.0, 1.0)


def test_text_ends_with_an_end_token_inside_an_accepted_block() -> None:
    prompt, target = PROMPTS[3], shared("llama")
    plain = reference(target, prompt, 24)
    at = next(i for i in range(3, 24) if plain[i] not in plain[:i])
    other = next(token for token in range(LETTERS) if token not in plain)
    # the target drafts for itself, so that everything is accepted and the end lies within a block
    for ends in (plain[at], [other, plain[at]]):
        ids, _ = speculative_generate(prompt, target, target, gamma=23, max_gen_len=24, eos_tokens_id=ends)
        assert ids == plain[: at + 1] == autoregressive_generate(prompt, target, eos_tokens_id=ends)
    ids, rate = speculative_generate(prompt, target, target, gamma=23, max_gen_len=24, eos_tokens_id=other)
    assert (ids, rate) == (plain, 1.0)


# rows


def test_rows_do_not_depend_on_each_other() -> None:
    target, drafter = pair()
    for processor in (GreedyProcessor(), MultinomialProcessor(1.0)):
        for mates in (PROMPTS[1:], [PROMPTS[3]]):
            torch.manual_seed(5)
            ids, rates, stats = speculative_generate_batch(
                [PROMPTS[0], *mates], drafter, target, logits_processor=processor, eos_tokens_id=None
            )
            torch.manual_seed(5)
            alone = speculative_generate(PROMPTS[0], drafter, target, logits_processor=processor, eos_tokens_id=None)
            assert (ids[0], rates[0]) == alone
            assert [len(row) for row in ids] == [40] * (1 + len(mates)) == [s.num_output_tokens for s in stats]
    assert speculative_generate_batch([], drafter, target) == ([], [], [])


def test_sampling_follows_torchs_seed() -> None:
    texts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        texts += [greedy(PROMPTS[0], logits_processor=MultinomialProcessor(1.0))[0] for _ in range(2)]
    assert texts[:2] == texts[2:4] and texts[0] != texts[1] and texts[0] != texts[4]


def test_the_default_end_token_is_1() -> None:
    inputs = WORDS("u:Explain quantum computing in simple terms..a:").input_ids
    plain = reference(shared("gpt2"), inputs, 20)
    assert 0 < plain.index(1) < 19
    ids, _ = speculative_generate(inputs, perturbed("gpt2"), shared("gpt2"), max_gen_len=20)
    assert ids == plain[: plain.index(1) + 1]
