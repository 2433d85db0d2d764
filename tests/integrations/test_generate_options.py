"""Every option of `generate` means the same with our loop: equal greedy text, equally distributed sampled text."""

from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from slipstream import SamplingParams
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.integrations.transformers.custom_generate import custom_generate
from slipstream.integrations.transformers.generate_options import Options, read_prompts
from slipstream.sampling.sampler import Sampler
from tests.support import chi_square
from tests.support.hf_cases import COUNT, ENDS, WIDTH, batch, both, expected
from tests.support.markers import subcases
from tests.support.tiny_models import VOCAB, shared

pytestmark = pytest.mark.usefixtures("cache_audit")


class Forbid(LogitsProcessor):
    """Lowers the logit of a token that depends on the row's length and last token."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, ((7 * input_ids[:, -1:] + input_ids.shape[1]) % VOCAB), -30.0).where(
            torch.arange(VOCAB) % 3 != input_ids.shape[1] % 3, -20.0
        )


def every_second_token(row: int, ids: torch.Tensor) -> list[int]:
    """Another half of the vocabulary for every row."""
    return list(range(3 + row % 2, VOCAB, 2))


def early_token(index: int) -> int:
    """The first token of row `index` under plain decoding."""
    return int(expected("llama")[index, WIDTH])


OPTIONS: dict[str, Any] = {
    "repetition_penalty": lambda: 1.8,
    "no_repeat_ngram_size": lambda: 2,
    "bad_words_ids": lambda: [[early_token(0)], [early_token(1)]],
    "bad_words_ids of two": lambda: [expected("llama")[0, WIDTH : WIDTH + 2].tolist()],
    "sequence_bias": lambda: {(early_token(0),): -9.0, (20,): 2.5},
    "sequence_bias of two": lambda: {(early_token(3), 8): 20.0},
    "min_length": lambda: WIDTH + 12,
    "min_new_tokens": lambda: 12,
    "suppress_tokens": lambda: [early_token(0), early_token(2)],
    "begin_suppress_tokens": lambda: [early_token(0), early_token(2)],
    "forced_eos_token_id": lambda: 7,
    "exponential_decay_length_penalty": lambda: (2, 1.6),
    "encoder_repetition_penalty": lambda: 1.9,
    "encoder_no_repeat_ngram_size": lambda: 1,
    "prefix_allowed_tokens_fn": lambda: every_second_token,
    "logits_processor": lambda: [Forbid()],
    "max_length": lambda: WIDTH + 5,
    "generation_config": lambda: GenerationConfig(max_new_tokens=9, repetition_penalty=1.3, eos_token_id=7),
}
NEUTRAL = {"renormalize_logits": True, "remove_invalid_values": True, "use_cache": False, "num_beams": 1}


@pytest.mark.slow
@subcases("option", OPTIONS)
def test_each_greedy_option_gives_the_text_of_generate(option: str) -> None:
    ours, plain = both({option.partition(" ")[0]: OPTIONS[option]()})
    assert torch.equal(ours, plain)
    assert not torch.equal(plain, expected("llama")), "an option without effect proves nothing"


@pytest.mark.parametrize("option", NEUTRAL)
def test_neutral_options_are_accepted_without_effect(option: str) -> None:
    ours, plain = both({option: NEUTRAL[option]})
    assert torch.equal(ours, plain)


def test_options_are_applied_in_the_order_of_generate() -> None:
    names = ("sequence_bias", "repetition_penalty", "no_repeat_ngram_size", "bad_words_ids", "min_new_tokens")
    ours, plain = both({name: OPTIONS[name]() for name in names} | {"logits_processor": [Forbid()]})
    assert torch.equal(ours, plain)


SAMPLING: dict[str, tuple[dict[str, Any], set[str]]] = {
    "all four": (
        {"temperature": 0.7, "top_k": 9, "top_p": 0.8, "min_p": 0.05},
        {"temperature", "top_k", "top_p", "min_p"},
    ),
    "top-p alone": ({"top_k": 0, "top_p": 0.6}, {"top_p"}),
    "normalized": ({"temperature": 1.4, "renormalize_logits": True}, {"temperature", "top_k"}),
    "typical": ({"temperature": 0.7, "top_p": 0.9, "typical_p": 0.5}, {"logits_processors"}),
    "epsilon": ({"top_k": 12, "epsilon_cutoff": 0.03}, {"logits_processors"}),
    "eta": ({"temperature": 1.2, "eta_cutoff": 0.2}, {"logits_processors"}),
    "top-h": ({"temperature": 1.2, "top_h": 0.4, "top_k": 20, "top_p": 0.9}, {"logits_processors", "top_k", "top_p"}),
    "warpers turned round": (
        {"top_p": 0.9, "logits_processor": [TopKLogitsWarper(5), TemperatureLogitsWarper(0.6)], "temperature": 1.0},
        {"logits_processors", "top_k", "top_p"},
    ),
    "penalties": (
        {"repetition_penalty": 1.5, "sequence_bias": {(9,): 2.0}, "bad_words_ids": [[8]], "min_new_tokens": 3},
        {"repetition_penalty", "logit_bias", "bad_words", "min_tokens", "top_k"},
    ),
    "prompts that several rows share": (
        {"encoder_no_repeat_ngram_size": 1, "num_return_sequences": 2},
        {"logits_processors", "top_k"},
    ),
    "penalty after a callable": (
        {"encoder_repetition_penalty": 1.5, "repetition_penalty": 2.5, "top_k": 5},
        {"logits_processors", "top_k"},
    ),
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_options_give_every_row_the_distribution_of_generate(name: str) -> None:
    options, used = SAMPLING[name]
    kept: dict[str, Any] = {}

    def keep(model: Any, input_ids: torch.Tensor, **arguments: Any) -> torch.Tensor:
        kept.update(arguments, input_ids=input_ids)
        return input_ids

    settings = {"do_sample": True, "max_new_tokens": COUNT, "pad_token_id": 0, "eos_token_id": ENDS} | options
    shared("llama").generate(**batch(), **settings, custom_generate=keep)
    ids, processors = kept["input_ids"], kept["logits_processor"]
    chosen = Options.read(kept["generation_config"], processors, kept["stopping_criteria"], len(ids))
    rows = []
    for prompt in read_prompts(shared("llama"), ids, {"attention_mask": kept["attention_mask"]}):
        params = chosen.params(prompt, 0)
        rows.append(Row(prompt.index, list(prompt.tokens), params, 0, chosen.end_ids))
    changed = {field for field, value in vars(params).items() if value != getattr(SamplingParams(), field)}
    assert used <= changed and ("logits_processors" in changed) == ("logits_processors" in used)
    logits = 3 * torch.randn(len(rows), 1, VOCAB, generator=torch.Generator().manual_seed(3))
    sampler = Sampler(rows, Race(VOCAB, ids.device), VOCAB, ids.device)
    ours = sampler.probs(sampler.scores(logits, ids[:, :0]))[:, 0]
    expected = processors(ids, logits[:, 0].clone()).softmax(-1)
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(expected, logits[:, 0].softmax(-1), atol=1e-3)


RUNS = 500
SPOKEN = torch.tensor([chi_square.PROMPT])


def sampled_counts(**options: Any) -> chi_square.Array:
    """How often each pair of tokens followed the prompt, with a draft model that is often right."""
    torch.manual_seed(0)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": 2, "num_return_sequences": RUNS, "pad_token_id": 0}
    out = chi_square.model("llama").generate(
        SPOKEN,
        attention_mask=torch.ones_like(SPOKEN),
        custom_generate=custom_generate,
        draft=chi_square.close("llama"),
        num_draft_tokens=1,
        max_batch_size=RUNS,
        **settings | options,
    )
    assert out.shape == (RUNS, SPOKEN.shape[1] + 2)
    pairs = out[:, -2] * chi_square.VOCAB + out[:, -1]
    return torch.bincount(pairs, minlength=chi_square.VOCAB**2).double().numpy()


def pair_distribution(temperature: float) -> chi_square.Array:
    """[V * V] the model's own distribution of the next two tokens, top-p 0.9 as transformers applies it."""
    size = chi_square.VOCAB
    ids = torch.cat([SPOKEN.expand(size, -1), torch.arange(size)[:, None]], dim=1)
    with torch.no_grad():
        logits = chi_square.model("llama")(ids, attention_mask=torch.ones_like(ids)).logits[:, -2:]
    warp = chi_square._processors(SamplingParams(temperature=temperature, top_p=0.9))
    first, second = warp(ids, logits[:, 0]).softmax(-1)[0], warp(ids, logits[:, 1]).softmax(-1)
    return (first[:, None] * second).flatten().numpy()


@pytest.mark.slow
@pytest.mark.parametrize("acceptance", ["block", "match"])
def test_sampled_tokens_have_the_distribution_of_the_processed_logits(acceptance: str) -> None:
    counts = sampled_counts(temperature=1.3, top_p=0.9, acceptance=acceptance)
    assert chi_square.p_value(counts, pair_distribution(1.3)) > chi_square.SUSPICIOUS
    assert chi_square.p_value(counts, pair_distribution(1.0)) < chi_square.SUSPICIOUS  # negative control
