"""Whole decoders on a GPU: drafts change no text, with eager forwards and with captured graphs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.certificate.parity import TieJudge
from slipstream.models.backend_capabilities import is_shape_independent
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.indexed_cache import Buffer
from slipstream.models.cuda.stored_weights import KINDS, StoredLinear
from tests.support.gguf_files import write_chat_model
from tests.support.tiny_models import ARCHITECTURES, fresh, prompts, shared, tokenizer

DEVICE = "cuda"
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
pytestmark = [pytest.mark.slow, NEEDS_GPU]

COUNT = 16
PROMPTS = prompts([1, 5, 14, 40])
LONG = prompts([300, 530, 90], seed=3)
DRAFTERS: list[tuple[str, int | str]] = [
    ("suffix", 4),
    ("ngram", 3),
    ("ngram_table:3+fill", "4x2"),
    ("token_recycling", "3x3"),
    ("layer_skip:1", 3),
    ("model", 1),
    ("model", 5),
    ("model", "4x2"),
    ("hybrid", "chain"),
    ("auto", "auto"),
]
GREEDY = [SamplingParams(max_tokens=COUNT)] * len(PROMPTS)
SEEDED = [
    SamplingParams(temperature=0.8, top_k=20, seed=11, max_tokens=COUNT),
    SamplingParams(temperature=1.3, top_p=0.9, seed=12, max_tokens=COUNT, repetition_penalty=1.2),
    SamplingParams(max_tokens=COUNT - 3, presence_penalty=0.5, logit_bias={5: 0.5}, bad_words=["ab"]),
    SamplingParams(temperature=0.6, min_p=0.02, seed=14, max_tokens=COUNT, min_tokens=5, stop=["zq"]),
]


BY_KERNELS = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3")
SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}  # heads that the kernels take


@cache
def on_gpu(name: str, dtype: torch.dtype, fast: bool, close: bool = False) -> Any:
    """A tiny model on the GPU, or a similar one with noise added. fast: a copy whose layers decoders may replace."""
    model = fresh(name, **({} if name == "gpt2" else SIZES))
    if close:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for weight in model.parameters():
                weight += 0.1 * weight.std().nan_to_num() * torch.randn(weight.shape, generator=generator)
    return model.to(DEVICE, dtype)


def plain_decoder(name: str, dtype: torch.dtype, fast: bool, **options: Any) -> SpeculativeDecoder:
    target, draft = on_gpu(name, dtype, fast), on_gpu(name, dtype, fast, close=True)
    return SpeculativeDecoder(target, draft, drafter="none", tokenizer=tokenizer(), fast=fast, **options)


def texts(decoder: SpeculativeDecoder, batch: Sequence[Any], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [result.token_ids for result in decoder.generate(list(batch), list(params))]


def one_by_one(decoder: SpeculativeDecoder, batch: Sequence[Any], params: Sequence[SamplingParams]) -> list[list[int]]:
    return [decoder.generate(prompt, options).token_ids for prompt, options in zip(batch, params, strict=True)]


def drafters(decoder: SpeculativeDecoder) -> list[tuple[str, int | str]]:
    """The drafters, without trees where a reproducible decoder multiplies by PyTorch."""
    trees = not decoder.reproducible or is_shape_independent(decoder.target.backend)
    return [(name, length) for name, length in DRAFTERS if trees or "x" not in str(length)]


WAYS: list[tuple[str, bool, bool | str]] = [(name, fast, False) for name in ARCHITECTURES for fast in (False, True)]
WAYS += [("llama", False, "auto"), ("llama", True, "auto"), ("gemma3", True, "auto"), ("gpt2", True, "auto")]


@pytest.mark.parametrize(("name", "fast", "reproducible"), WAYS)
def test_no_drafter_changes_a_text(name: str, fast: bool, reproducible: bool | str) -> None:
    plain = plain_decoder(name, torch.float32, fast, max_batch_size=4, reproducible=reproducible)
    assert isinstance(plain.target.backend, GraphedBackend) == fast
    if fast and name in BY_KERNELS:
        assert is_shape_independent(plain.target.backend)
    for params in (GREEDY, SEEDED):
        expected = one_by_one(plain, PROMPTS, params)
        assert texts(plain, PROMPTS, params) == expected
        for drafter, length in drafters(plain):
            drafting = plain.using(drafter, num_draft_tokens=length)
            assert drafting.generate(PROMPTS[2], params[2]).token_ids == expected[2], (drafter, length)
            assert texts(drafting, PROMPTS, params) == expected, (drafter, length, "in a batch")


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "qwen2"])
def test_greedy_text_is_that_of_hugging_face(name: str) -> None:
    model = on_gpu(name, torch.float32, fast=False)
    for fast in (False, True):
        decoder = plain_decoder(name, torch.float32, fast).using("model", num_draft_tokens=4)
        for prompt, got in zip(PROMPTS, texts(decoder, PROMPTS, GREEDY), strict=True):
            ids = torch.tensor([prompt], device=DEVICE)
            mask = torch.ones_like(ids)
            out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=COUNT, pad_token_id=0)
            assert got == out[0, len(prompt) :].tolist()


@pytest.mark.parametrize("reproducible", ["auto", False])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2"])
def test_in_half_precision_texts_differ_only_at_ties(name: str, fast: bool, reproducible: bool | str) -> None:
    plain = plain_decoder(name, torch.bfloat16, fast, max_batch_size=4, reproducible=reproducible)
    judge = TieJudge(plain)
    expected = one_by_one(plain, PROMPTS, GREEDY)
    for drafter, length in drafters(plain):
        drafting = plain.using(drafter, num_draft_tokens=length)
        for prompt, expected_text, text in zip(PROMPTS, expected, texts(drafting, PROMPTS, GREEDY), strict=True):
            difference = judge.judge(prompt, expected_text, text, GREEDY[0], same_bits=plain.reproducible)
            assert difference is None or difference.tie, (drafter, length)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", BY_KERNELS)
def test_with_slipstreams_kernels_no_drafter_changes_a_text_in_any_dtype(name: str, dtype: torch.dtype) -> None:
    """To the bit, also in half precision, greedy and seeded, with trees and in batches, and without calibration."""
    plain = plain_decoder(name, dtype, True, max_batch_size=4, reproducible=True)
    assert plain.reproducible and is_shape_independent(plain.target.backend)
    for params in (GREEDY, SEEDED):
        expected = one_by_one(plain, PROMPTS, params)
        assert texts(plain, PROMPTS, params) == expected
        for drafter, length in DRAFTERS:
            assert texts(plain.using(drafter, num_draft_tokens=length), PROMPTS, params) == expected, (drafter, length)


def test_a_model_given_by_the_caller_is_computed_by_kernels_from_its_own_weights() -> None:
    model = on_gpu("llama", torch.bfloat16, fast=False)
    weights = [(weight.data_ptr(), weight.clone()) for weight in model.parameters()]
    decoder = SpeculativeDecoder(model, drafter="none", tokenizer=tokenizer(), reproducible=False)
    backend = decoder.target.backend
    assert isinstance(backend, GraphedBackend) and is_shape_independent(backend)
    texts(decoder, PROMPTS, GREEDY)
    assert backend.graph_memory().count > 0
    for (place, weight), now in zip(weights, model.parameters(), strict=True):
        assert now.data_ptr() == place and torch.equal(now, weight)


@pytest.mark.parametrize("fast", [False, True])
def test_long_prompts_and_a_growing_cache_change_no_text(fast: bool) -> None:
    plain = plain_decoder("gemma3", torch.float32, fast, max_batch_size=2, reproducible=False)
    expected = one_by_one(plain, LONG, GREEDY[:3])
    for drafter, length in (("model", 4), ("auto", "auto"), ("suffix", "3x2")):
        drafting = plain.using(drafter, num_draft_tokens=length)
        assert texts(drafting, LONG, GREEDY[:3]) == expected
    assert texts(plain, [*LONG, *PROMPTS], GREEDY[:1] * 7)[:3] == expected


@pytest.mark.parametrize("fast", [False, True])
def test_closing_a_stream_early_changes_no_later_text(fast: bool) -> None:
    plain = plain_decoder("qwen2", torch.float32, fast)
    expected = one_by_one(plain, PROMPTS, GREEDY)
    drafting = plain.using("model", num_draft_tokens=3)
    for _ in zip(range(3), drafting.stream(PROMPTS[2], GREEDY[0]), strict=False):
        continue  # then the stream is closed
    assert texts(drafting, PROMPTS, GREEDY) == expected


@pytest.mark.parametrize("fast", [False, True])
def test_logprobs_do_not_depend_on_the_drafter(fast: bool) -> None:
    params = SamplingParams(max_tokens=8, logprobs=3)
    plain = plain_decoder("llama", torch.float32, fast)
    plain_result, result = (d.generate(PROMPTS[2], params) for d in (plain, plain.using("model", num_draft_tokens=4)))
    assert plain_result.token_ids == result.token_ids
    for expected, got in zip(plain_result.logprobs, result.logprobs, strict=True):
        assert expected.logprob == pytest.approx(got.logprob, abs=1e-3)


@pytest.mark.parametrize("rule", ["block", "rejection"])
def test_rules_that_sample_drafts_give_varied_texts(rule: str) -> None:
    plain = plain_decoder("llama", torch.float32, fast=True)
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=6) for seed in range(40)]
    sampled_texts = texts(plain.using("model", num_draft_tokens=3, acceptance=rule), [PROMPTS[1]] * 40, params)
    assert len({tuple(text) for text in sampled_texts}) > 20


def test_a_draft_model_of_another_vocabulary_changes_no_text() -> None:
    target = on_gpu("llama", torch.float32, fast=False)
    plain = SpeculativeDecoder(target, "toy", drafter="none", tokenizer=tokenizer(), device="auto")
    expected = texts(plain, PROMPTS, GREEDY)
    assert texts(plain.using("auto", num_draft_tokens="auto"), PROMPTS, GREEDY) == expected
    assert texts(plain.using("model", num_draft_tokens=3), PROMPTS, SEEDED) == texts(plain, PROMPTS, SEEDED)


@pytest.mark.parametrize("fast", [False, True, "auto"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_folder_is_loaded_onto_the_gpu(fast: bool | str, dtype: str, tmp_path: Path) -> None:
    shared("qwen2").save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    with SpeculativeDecoder(str(tmp_path), str(tmp_path), device="cuda", dtype=dtype, fast=fast) as decoder:
        assert decoder.target.backend.device.type == "cuda"
        result = decoder.generate("abc abc abc", SamplingParams(max_tokens=COUNT))
        assert (
            result.token_ids
            == decoder.using("none").generate("abc abc abc", SamplingParams(max_tokens=COUNT)).token_ids
        )
        assert result.stats.num_accepted_tokens > 0


@pytest.mark.parametrize("kinds", KINDS)
def test_a_gguf_file_is_computed_from_its_blocks(kinds: str, tmp_path: Path) -> None:
    file = write_chat_model(tmp_path / "it.gguf", kinds=kinds)
    with SpeculativeDecoder(file, file, device="cuda", max_batch_size=4) as decoder:
        backend = decoder.target.backend
        stored = [module for module in backend.model.modules() if isinstance(module, StoredLinear)]
        assert stored and is_shape_independent(backend)
        plain = decoder.using("none")
        for params in (GREEDY, SEEDED[:1] * len(PROMPTS)):
            expected = one_by_one(plain, PROMPTS, params)
            for drafter, length in (("model", 4), ("suffix", 4), ("auto", "auto")):
                assert texts(decoder.using(drafter, num_draft_tokens=length), PROMPTS, params) == expected


def test_texts_are_the_same_in_all_batches_and_widths() -> None:
    plain = plain_decoder("qwen3", torch.bfloat16, True, max_batch_size=32, reproducible=True)
    batch = prompts([3 + 2 * i for i in range(32)], seed=5)
    params = [SamplingParams(max_tokens=COUNT)] * 32
    expected = one_by_one(plain, batch, params)
    for rows in (2, 5, 17, 32):
        assert texts(plain, batch[:rows], params[:rows]) == expected[:rows]
    for length in range(1, 16):
        drafting = plain.using("model", num_draft_tokens=length)
        assert texts(drafting, batch[:3], params[:3]) == expected[:3], length


def test_all_forwards_of_a_batch_are_captured_at_load() -> None:
    plain = plain_decoder("qwen2", torch.bfloat16, True, max_batch_size=4, reproducible=False)
    backend: Any = plain.target.backend
    before = backend.graph_memory().count
    assert before == 12  # 1, 2 and 4 rows of 1, 2, 4 and 8 tokens
    texts(plain.using("model", num_draft_tokens=4), PROMPTS, GREEDY)
    assert backend.graph_memory().count == before


def test_values_sent_in_turns_arrive_in_order() -> None:
    buffer = Buffer((1 << 20,), torch.int64, torch.device(DEVICE))
    sums = []
    for turn in range(40):  # many more than there is pinned memory for
        buffer.fill(torch.full((1 << 20,), turn))
        sums.append(buffer.values.sum())
    assert [int(total) >> 20 for total in sums] == list(range(40))
