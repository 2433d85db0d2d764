"""Layers fused into fewer operators compute what the models' own do; other layers keep their forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.decoder import attention as grouped
from slipstream.models.decoder.families import FAMILIES, llama, plan_of
from slipstream.models.decoder.fused_layer import LayerOps, Norm, fused_layers, is_fused
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.decoder.plan import NormPlan, UnknownLayerError
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from slipstream.models.hf.trials import later_starts, tolerance
from slipstream.models.loaded import LoadOptions
from slipstream.models.notices import warn_slower
from slipstream.models.pretrained import wrap_model
from tests.support.markers import mostly_slow
from tests.support.mtp_cases import SHAPE
from tests.support.tiny_models import ARCHITECTURES, VOCAB, fast, fresh
from tests.support.tiny_models import ragged_logits as logits

FUSED = ("llama", "qwen2", "qwen3", "mistral", "gemma3", "phi3", "olmo2")
PROMPT, PARAMS = [1, 5, 9, 5, 9, 5], SamplingParams(max_tokens=40)


def num_fused(backend: HFBackend) -> int:
    return sum(is_fused(module) for module in backend.model.modules())


@pytest.mark.each_value
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_the_models_own_layers(name: str, dtype: torch.dtype) -> None:
    plain, fused = fast(name, dtype, fused=False), fast(name, dtype)
    assert num_fused(plain) == 0 and num_fused(fused) == fused.model.config.num_hidden_layers
    expected, got = logits(plain), logits(fused)
    assert (expected - got).abs().max() <= {torch.float32: 1e-4, torch.bfloat16: 0.05}[dtype] * expected.abs().max()


@pytest.mark.slow
@pytest.mark.pairwise
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize(("width", "start"), [(40, 0), (64, 0), (200, 17)])
def test_a_prompt_read_in_blocks_gives_the_same_logits(
    name: str, width: int, start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block reads the shortest allowed part of the cache that holds all it attends to."""
    backend, lengths_read = fast(name), list[int]()
    backend.reserve(2, 300)
    tokens = torch.randint(1, VOCAB, (1, start + width), generator=torch.Generator().manual_seed(5))
    whole = backend.forward(tokens, [0], first_slot=1, logits=True)[:, start:]
    attend = grouped.attend

    def counted(query: Tensor, key: Tensor, *args: Any) -> Tensor:
        lengths_read.append(key.shape[2])
        return attend(query, key, *args)

    monkeypatch.setattr(grouped, "attend", counted)
    backend.attended_lengths = (32, 64, 96, 160)
    if start:
        backend.forward(tokens[:, :start], [0], first_slot=0, logits=False)
    blocks = backend.forward(tokens[:, start:], [start], first_slot=0, logits=True)
    assert (whole - blocks).abs().max() <= 1e-4 * whole.abs().max()
    ends = [start + min(end, width) for end in range(64, width + 64, 64)]
    assert lengths_read == [next((n for n in backend.attended_lengths if n >= end), 256) for end in ends] * num_fused(
        backend
    )


def test_layers_of_other_structures_keep_their_forward() -> None:
    backend = fast("gpt2")
    assert num_fused(backend) == 0
    assert torch.equal(logits(backend), logits(fast("gpt2", fused=False)))


def test_layers_that_compute_something_else_keep_their_forward_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    backend = fast("llama", fused=False)
    expected = logits(backend)
    monkeypatch.setattr(Norm, "__call__", lambda self, x: x)
    assert fused_layers(backend.model, plan_of(backend.model.config, [None, None]))
    fuse_layers(backend)
    assert num_fused(backend) == 0
    assert torch.equal(logits(backend), expected)
    assert "keeps its layers' own forward: the fused one gives different results" in caplog.text


def test_layers_that_rotate_another_part_of_each_head_than_planned_keep_their_forward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    monkeypatch.setattr("slipstream.models.decoder.families._rotated", lambda config, plan: 4)
    backend = fast("phi3")
    assert num_fused(backend) == 0
    assert torch.equal(logits(backend), logits(fast("phi3", fused=False)))
    assert "keeps its layers' own forward: it rotates 8 of a head's 8 numbers" in caplog.text


@pytest.mark.parametrize("kind", [RuntimeError, AttributeError, KeyError])
def test_a_bug_in_a_fused_layer_is_raised(kind: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Tensor:
        raise kind("a typo")

    monkeypatch.setattr("slipstream.models.decoder.fused_layer.FusedLayer._attend", broken)
    with pytest.raises(kind, match="a typo"):
        fast("llama")


@pytest.mark.parametrize("name", ["project_qkv_rope", "_product"])
def test_a_bug_in_the_check_of_structure_is_raised(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> Any:
        raise AttributeError("a typo")

    monkeypatch.setattr(LayerOps, name, broken) if name == "project_qkv_rope" else monkeypatch.setattr(
        f"slipstream.models.decoder.fused_layer.{name}", broken
    )
    with pytest.raises(AttributeError, match="a typo"):
        fast("llama")


def test_a_model_of_another_structure_causes_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    monkeypatch.setitem(ARCHITECTURES, "arcee", lambda: transformers.ArceeConfig(**SHAPE, hidden_act="silu"))
    monkeypatch.delitem(FAMILIES, "arcee")
    fast("arcee")
    fast("arcee")
    (message,) = [record.message for record in caplog.records if "own forward" in record.message]
    assert message.endswith("keeps its layers' own forward: ArceeDecoderLayer has no mlp.gate_proj")


def test_layers_of_unfused_weights_keep_their_forward() -> None:
    backend = HFBackend(fresh("llama"))
    group_queries(backend)
    fuse_layers(backend)
    assert num_fused(backend) == 0


def test_a_wrapped_forward_is_kept() -> None:
    backend = fast("llama", fused=False)
    layer = backend.model.model.layers[1]
    forward, calls = layer.forward, []

    def wrapped(*inputs: Any, **options: Any) -> Any:
        calls.append(len(inputs))
        return forward(*inputs, **options)

    layer.forward = wrapped
    fuse_layers(backend)
    logits(backend)
    assert num_fused(backend) == 0 and layer.forward is wrapped and calls


def test_a_second_decoder_has_layers_of_its_own() -> None:
    model = fresh("qwen3")
    decoders = [SpeculativeDecoder(model, drafter="ngram", fast=fast, reproducible=False) for fast in (True, "auto")]
    texts = [decoder.generate(PROMPT, PARAMS) for decoder in decoders]
    assert [num_fused(decoder.target.backend) for decoder in decoders] == [2, 0]
    assert num_fused(HFBackend(model)) == 0  # the owner's model
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_a_fast_decoder_generates_the_text_of_a_plain_one(name: str) -> None:
    texts = [
        SpeculativeDecoder(fresh(name), drafter="ngram", fast=fast, reproducible=False).generate(PROMPT, PARAMS)
        for fast in (False, True)
    ]
    assert texts[0].token_ids == texts[1].token_ids


@pytest.mark.parametrize("name", mostly_slow(FUSED, "llama", "gemma3"))
def test_other_callers_run_the_models_own_code(name: str) -> None:
    backend = fast(name)
    ids = torch.tensor([[0, 0, 5, 9, 7], [3, 4, 5, 6, 7]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    options = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
    assert torch.equal(backend.model.generate(ids, **options), fresh(name).generate(ids, **options))


class Scaled(nn.Module):
    """RMSNorm that adds an offset to its weight."""

    def __init__(self, weight: Tensor, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self._offset = nn.Parameter(weight), 1e-5, offset

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (normed * (self._offset + self.weight.float())).to(x.dtype)


@pytest.mark.pairwise
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 33, 576])
def test_a_norm_equals_the_models_own(offset: float, dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    norm = Scaled(torch.randn(size, generator=generator).to(dtype), offset)
    x = (100 * torch.randn(2, 3, size, generator=generator) + 50).to(dtype)
    expected = norm(x).float()
    got = Norm(norm, NormPlan(1e-5, offset, rounds_first=False))(x).float()
    error = 1e-5 if dtype == torch.float32 else 1 / 128
    assert (got - expected).abs().max() <= error * expected.abs().max()


@pytest.mark.parametrize("norm", [nn.LayerNorm(8, elementwise_affine=False), nn.LayerNorm(8, eps=1e-3)])
def test_norms_of_other_numbers_are_refused(norm: nn.Module) -> None:
    with pytest.raises(UnknownLayerError):
        Norm(norm, NormPlan(1e-5, is_centered=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_dtype_is_tried_with_a_tolerance_of_its_own(dtype: torch.dtype) -> None:
    model = fresh("llama", dtype=dtype)
    fuse(model)
    backend = HFBackend(model)
    assert torch.finfo(dtype).eps < tolerance(model) <= 0.02
    group_queries(backend)
    fuse_layers(backend)
    assert num_fused(backend) == 2


LATER = 40  # the position from which these models compute something else


def ministral3(dtype: torch.dtype = torch.float32) -> Any:
    rope = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": LATER,
        "llama_4_scaling_beta": 0.1,
        "rope_theta": 1e4,
    }
    shape = dict(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    sizes = dict(vocab_size=VOCAB, head_dim=32, max_position_embeddings=16 * LATER, initializer_range=0.4)
    token_ids = dict(bos_token_id=None, eos_token_id=None, pad_token_id=0)
    config = transformers.Ministral3Config(**shape, **sizes, **token_ids, rope_parameters=rope)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_scaling_that_begins_at_a_later_position_is_computed(dtype: torch.dtype) -> None:
    model = ministral3(dtype)
    ids = torch.randint(3, VOCAB, (1, 160), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = model(input_ids=ids).logits.float()
    backend = wrap_model(model, None, LoadOptions(fast=True)).backend
    assert num_fused(backend) == 2
    backend.reserve(1, 256)
    scaled = backend.forward(ids, [0], first_slot=0, logits=True).float()
    assert (scaled - expected).square().mean().sqrt() <= (1e-4 if dtype == torch.float32 else 0.05) * expected.std()
    model.config.rope_parameters["llama_4_scaling_beta"] = 0  # as a layer would that ignored the scaling
    backend = wrap_model(model, None, LoadOptions(fast=True)).backend
    backend.reserve(1, 256)
    unscaled = backend.forward(ids, [0], first_slot=0, logits=True).float()
    assert (unscaled - scaled)[:, LATER:].square().mean().sqrt() > 0.08 * expected.std()
    assert torch.equal(unscaled[:, :LATER], scaled[:, :LATER])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_trial_alone_notices_a_missing_scaling(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "ministral3", llama)
    assert num_fused(wrap_model(ministral3(dtype), None, LoadOptions(fast=True)).backend) == 0
    for module in ("trials", "state_trials"):
        monkeypatch.setattr(f"slipstream.models.hf.{module}.later_starts", lambda model: [0])
    assert num_fused(wrap_model(ministral3(dtype), None, LoadOptions(fast=True)).backend) == 2


class OtherLater(LlamaDecoderLayer):
    """A layer that adds more from position LATER on, which no field of its configuration says."""

    def forward(self, hidden_states: Tensor, *inputs: Any, **options: Any) -> Any:
        out = super().forward(hidden_states, *inputs, **options)
        return out + 0.05 * (out - hidden_states) * (options["position_ids"] >= LATER)[..., None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_that_compute_something_else_at_later_positions_keep_their_forward(dtype: torch.dtype) -> None:
    model = fresh("llama", dtype=dtype)
    fuse(model)
    backend = HFBackend(model)
    group_queries(backend)
    for layer in model.model.layers:
        layer.__class__ = OtherLater
    model.config.original_max_position_embeddings = LATER
    assert later_starts(model) == [0, LATER - 6, 1024 - 9]
    fuse_layers(backend)
    assert num_fused(backend) == 0
    for layer in model.model.layers:
        layer.__class__ = LlamaDecoderLayer
    fuse_layers(backend)
    assert num_fused(backend) == 2


class Stretched(LlamaRotaryEmbedding):
    """Frequencies that depend on the whole call, in a way that transformers does not know."""

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x, position_ids / (1 + position_ids.max() // 64))


def test_a_model_whose_texts_depend_on_their_batch_mates_is_refused() -> None:
    model = fresh("llama")
    model.model.rotary_emb.__class__ = Stretched
    with pytest.raises(UsageError, match="depend on the length of other texts in the batch"):
        wrap_model(model, None, LoadOptions())
