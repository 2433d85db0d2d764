"""Layers in fewer operators against the models' own, and when they are left alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import VOCAB, fast, fresh
from tiny import ragged_logits as logits
from torch import Tensor, nn

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.fast_path_warnings import warn_slower
from slipstream.models.hf import grouped_attention as grouped
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import TOLERANCE, fuse_layers, group_queries
from slipstream.models.hf.fused_layer import LayerOps, RootMeanSquare, UnknownLayerError, fused_layers, is_fused

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
OTHERS = ("phi3", "olmo2", "gpt2")
PROMPT, PARAMS = [1, 5, 9, 5, 9, 5], SamplingParams(max_tokens=40)


def num_fused(backend: HFBackend) -> int:
    return sum(is_fused(module) for module in backend.model.modules())


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_models_own_layers(name: str, dtype: torch.dtype) -> None:
    own, quick = fast(name, dtype, fused=False), fast(name, dtype)
    assert num_fused(own) == 0 and num_fused(quick) == quick.model.config.num_hidden_layers
    expected, got = logits(own), logits(quick)
    assert (expected - got).abs().max() <= {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype] * expected.abs().max()


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("width", "start"), [(40, 0), (64, 0), (200, 17)])
def test_a_prompt_read_in_blocks_gives_the_same_logits(
    name: str, width: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of it reads the shortest allowed part of the memory that holds what it may look at."""
    backend, read = fast(name), list[int]()
    backend.reserve(2, 300)
    tokens = torch.randint(1, VOCAB, (1, start + width), generator=torch.Generator().manual_seed(5))
    whole = backend.forward(tokens, [0], first_slot=1, logits=True)[:, start:]
    attend = grouped.attend

    def counted(query: Tensor, key: Tensor, *rest: Any) -> Tensor:
        read.append(key.shape[2])
        return attend(query, key, *rest)

    monkeypatch.setattr(grouped, "attend", counted)
    backend.attended_lengths = (32, 64, 96, 160)
    if start:
        backend.forward(tokens[:, :start], [0], first_slot=0, logits=False)
    blocks = backend.forward(tokens[:, start:], [start], first_slot=0, logits=True)
    assert (whole - blocks).abs().max() <= 1e-4 * whole.abs().max()
    ends = [start + min(end, width) for end in range(64, width + 64, 64)]
    assert read == [next((r for r in backend.attended_lengths if r >= e), 256) for e in ends] * num_fused(backend)


@pytest.mark.parametrize("name", OTHERS)
def test_layers_of_other_structures_keep_their_forward(name: str) -> None:
    backend = fast(name)
    assert num_fused(backend) == 0
    assert torch.equal(logits(backend), logits(fast(name, fused=False)))


def test_layers_that_compute_something_else_keep_their_forward_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    backend = fast("llama", fused=False)
    expected = logits(backend)
    monkeypatch.setattr(RootMeanSquare, "__call__", lambda self, x: x)
    monkeypatch.setattr("slipstream.models.hf.fused_layer.CLOSE", float("inf"))
    assert fused_layers(backend.model, [None, None])
    fuse_layers(backend)
    assert num_fused(backend) == 0
    assert torch.equal(logits(backend), expected)
    assert "keeps its layers' own forward: the fused one gives other logits" in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, KeyError])
def test_a_mistake_of_our_own_in_a_fused_layer_rises(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Tensor:
        raise kind("a typo")

    monkeypatch.setattr("slipstream.models.hf.fused_layer.FusedLayer._attend", broken)
    with pytest.raises(kind, match="a typo"):
        fast("llama")


@pytest.mark.parametrize("name", ["project_qkv_rope", "declared"])
def test_a_mistake_of_our_own_in_the_structure_check_rises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a typo")

    monkeypatch.setattr(LayerOps, name, broken) if name == "project_qkv_rope" else monkeypatch.setattr(
        f"slipstream.models.hf.fused_layer.{name}", broken
    )
    with pytest.raises(AttributeError, match="a typo"):
        fast("llama")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phi3", "Phi3DecoderLayer has input_layernorm, mlp, post_attention_layernorm, resid_attn_dropout"),
        ("gpt2", "GPT2Block has attn, ln_1, ln_2, mlp"),
        ("olmo2", "Olmo2DecoderLayer has mlp, post_attention_layernorm, post_feedforward_layernorm, self_attn"),
    ],
)
def test_a_model_of_another_structure_says_so_once(name: str, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    warn_slower.cache_clear()
    fast(name)
    fast(name)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert [reason in warning for warning in warnings if "own forward" in warning] == [True]


def test_plain_weights_keep_their_layers() -> None:
    backend = HFBackend(fresh("llama"))
    group_queries(backend)
    fuse_layers(backend)
    assert num_fused(backend) == 0


def test_a_forward_that_someone_has_wrapped_is_kept() -> None:
    backend = fast("llama", fused=False)
    layer = backend.model.model.layers[1]
    own, calls = layer.forward, []

    def wrapped(*inputs: Any, **options: Any) -> Any:
        calls.append(len(inputs))
        return own(*inputs, **options)

    layer.forward = wrapped
    fuse_layers(backend)
    logits(backend)
    assert num_fused(backend) == 0 and layer.forward is wrapped and calls


def test_a_second_decoder_shares_the_layers() -> None:
    model = fresh("qwen3")
    texts = [
        SpeculativeDecoder(model, drafter="ngram", fast=fast, reproducible=False).generate(PROMPT, PARAMS)
        for fast in (True, "auto")
    ]
    assert sum(is_fused(module) for module in model.modules()) == 2
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize("name", FUSED)
def test_a_fast_decoder_says_what_a_plain_one_says(name: str) -> None:
    texts = [
        SpeculativeDecoder(fresh(name), drafter="ngram", fast=fast, reproducible=False).generate(PROMPT, PARAMS)
        for fast in (False, True)
    ]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize("name", FUSED)
def test_calls_from_elsewhere_run_the_models_own_code(name: str) -> None:
    backend = fast(name)
    ids = torch.tensor([[0, 0, 5, 9, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    assert torch.equal(backend.model.generate(ids, **options), fresh(name).generate(ids, **options))


class Scaled(nn.Module):
    """RMSNorm that adds an offset to its weight, or subtracts the mean."""

    def __init__(self, weight: Tensor, offset: float = 0.0, centred: bool = False) -> None:
        super().__init__()
        self.weight, self.eps, self._offset, self._centred = nn.Parameter(weight), 1e-5, offset, centred

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float() - (x.float().mean(-1, keepdim=True) if self._centred else 0)
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (self._offset + self.weight.float())).to(x.dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 33, 576])
def test_norms(offset: float, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    norm = Scaled(torch.randn(size, generator=generator).to(dtype), offset)
    x = (100 * torch.randn(2, 3, size, generator=generator) + 50).to(dtype)
    expected, got = norm(x).float(), RootMeanSquare(norm)(x).float()
    error = 1e-5 if dtype == torch.float32 else 1 / 128
    assert (got - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("norm", [Scaled(torch.ones(8), 3.0), Scaled(torch.ones(8), centred=True), nn.LayerNorm(8)])
def test_other_norms_are_refused(norm: nn.Module) -> None:
    with pytest.raises(UnknownLayerError):
        RootMeanSquare(norm)


def test_the_tolerance_of_a_faster_forward_is_below_one() -> None:
    assert all(0 < tolerance < 1 for tolerance in TOLERANCE.values())
