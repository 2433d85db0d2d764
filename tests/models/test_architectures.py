"""One architecture of each family: its texts are those of `generate`, whatever the drafts.

`make check-architectures` does the same for every causal language model of transformers, with more checks.
"""

import pytest
import torch

from slipstream import SamplingParams
from slipstream.core.rng import Race
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.sampling.sampler import Sampler
from tests.support.architecture_checks import PROMPTS, Checks, Outcome, PartlyWrongDrafter, check, check_wide
from tests.support.architecture_configs import CONFIGS, NOT_CAUSAL
from tests.support.architectures import Unbuilt, model_types, tiny_model
from tests.support.markers import mostly_exhaustive, mostly_slow, needs_kernels, needs_transformers

CPU = torch.device("cpu")
FAMILIES = {
    "llama": "rotary positions",
    "gpt2": "learned positions",
    "bert": "an encoder's layers as a decoder",
    "gpt_oss": "attention sinks and windows",
    "gemma2": "windows and soft caps",
    "doge": "a mask of its own",
    "deepseek_v3": "latent attention",
    "gpt_neo": "windows that it masks itself",
    "bloom": "ALiBi",
    "bart": "positions of its own counting",
    "gemma3n_text": "layers that share keys and values",
    "llama4_text": "chunked attention",
    "deepseek_v32": "an index of keys",
    "deepseek_v4": "compressed keys",
    "qwen3_5_text": "the gated delta rule",
    "minimax": "lightning attention",
    "mamba": "selective state spaces",
    "recurrent_gemma": "linear recurrences",
    "rwkv": "a state argument of its own",
    "xlstm": "matrices as memory",
    "openai-gpt": "no cache",
}
# these have a mechanism that is tried above, with the kernels or with caches of their own
ALIKE = {
    "zamba2": "a shared attention layer",
    "bamba": "layers of Mamba-2 and of attention",
    "falcon": "one key head for all queries",
    "smollm3": "layers without positions",
    "diffllama": "differences of attentions",
    "mixtral": "experts",
    "minicpm3": "latent attention, scaled residuals",
    "mamba2": "state spaces with heads",
    "falcon_h1": "both in each layer",
    "lfm2": "short convolutions",
}
# the largest ones, which take longest, and those that tests/models/decoder runs with the kernels
ELSEWHERE = ("deepseek_v32", "deepseek_v4", "deepseek_v3", "gpt_oss", "gemma2")
REFUSED = {
    "xlnet": "permuted order",
    "prophetnet": "n-gram attention with another cached forward",
    "reformer": "hashed attention",
    "blt": "patches of bytes, with a model for each size",
}


@pytest.mark.parametrize(
    "model_type",
    [
        *mostly_slow([name for name in FAMILIES if name not in ELSEWHERE], "llama", "qwen3_5_text"),
        *mostly_exhaustive([*ALIKE, *ELSEWHERE]),
    ],
)
def test_texts_are_those_of_generate(model_type: str) -> None:
    outcome = check(model_type, quick=True)
    assert outcome.verdict == "works", outcome
    assert outcome.tokens_per_round > 3  # a model that drafts for itself is nearly always accepted


@pytest.mark.exhaustive
def test_texts_are_those_of_generate_whatever_number_of_tokens_is_accepted() -> None:
    assert check("cohere2").verdict == "works"


@needs_kernels
def test_the_wide_size_reaches_the_kernels() -> None:
    wide = check_wide("llama")
    assert (wide.verdict, wide.kernels) == ("works", "all layers in one call"), wide
    assert Checks(tiny_model("llama"), fast=True).kernels == "fused layers"


@pytest.mark.parametrize("model_type", REFUSED)
def test_unsupported_architectures_are_refused_by_name(model_type: str) -> None:
    model = tiny_model(model_type)
    with pytest.raises(UsageError, match=f"{type(model).__name__} is not supported"):
        assert Checks(model).decoder


def test_a_wrong_text_is_distinguished_from_a_tie() -> None:
    checks = Checks(tiny_model("llama"))
    prompt, text = PROMPTS[1], list(checks.texts[tuple(PROMPTS[1])])
    assert checks.agrees(prompt, text, len(text))
    assert not checks.agrees(prompt, [(text[0] + 1) % 97, *text[1:]], len(text))
    assert checks.margin > 1e-3 and checks.ties == 0


def test_the_wrong_drafts_of_the_checks_are_right_for_every_number_of_tokens() -> None:
    texts = {(1, 2): [10, 11, 12, 13, 14]}
    row = Row(0, [1, 2], SamplingParams(max_tokens=5), seed=0)
    drafter, sampler = PartlyWrongDrafter(texts, 97), Sampler([row], Race(97, CPU), 97, CPU)
    drafts = [drafter.propose([row], [4], sampler).tokens[0].tolist() for _ in range(5)]
    right = [sum(a == b for a, b in zip(draft, texts[(1, 2)], strict=False)) for draft in drafts]
    assert sorted(right) == [0, 1, 2, 3, 4]


@needs_transformers("5.23", "all of these types")
def test_configurations_name_existing_model_types() -> None:
    assert not (set(CONFIGS) | set(NOT_CAUSAL) | set(FAMILIES) | set(ALIKE) | set(REFUSED)) - set(model_types())
    with pytest.raises(Unbuilt, match="drafts from the hidden states"):
        tiny_model("gemma4_assistant")
    assert check("gemma4_assistant") == Outcome("unbuilt", NOT_CAUSAL["gemma4_assistant"])
