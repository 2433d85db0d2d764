"""Layers by Triton kernels compute what the model's own operators do; on a GPU or in Triton's interpreter.

Without a GPU, run in an environment that also has triton:

    TRITON_INTERPRET=1 python -m pytest tests/models/cuda/test_triton_layer.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.core.trees import segments_of
from slipstream.models import pretrained
from slipstream.models.backend_capabilities import is_shape_independent
from slipstream.models.cuda.graph_backend import GraphedBackend, use_kernels
from slipstream.models.cuda.graph_store import Rerun
from slipstream.models.cuda.indexed_cache import IndexedForward
from slipstream.models.cuda.triton_layer import has_kernels
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import OwnLogits
from tests.support.tiny_models import VOCAB, fresh, prompts

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_kernels()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # from the interpreter
    pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU, or Triton with TRITON_INTERPRET=1"),
]

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
MODELS = ("llama", "qwen2", "qwen3", "gemma3", "phi3")
PROMPT = 24
PARENTS = [(-1, 0, 1, 2, 3, 4, 2, 6, 7, -1), (-1,), (-1, -1, -1)]


def models(name: str, dtype: torch.dtype = torch.float32, *, may_join: bool = True) -> tuple[HFBackend, GraphedBackend]:
    """The same model with its own operators, and with the kernels."""
    plain, computed = (fresh(name, dtype=dtype, **SIZES).to(DEVICE) for _ in range(2))
    graphed = GraphedBackend(computed, Rerun())
    assert use_kernels(graphed, OwnLogits(graphed.eager), may_join=may_join) is None
    assert graphed.shape_independent
    return HFBackend(plain), graphed


def fill(backends: Sequence[Any], rows: int, length: int = 300) -> None:
    generator = torch.Generator().manual_seed(1)
    for slot in range(rows):
        prompt = torch.randint(3, VOCAB, (1, PROMPT), generator=generator).to(DEVICE)
        for backend in backends:
            backend.reserve(rows, length)
            backend.forward(prompt, [0], first_slot=slot, logits=False)


def tokens(rows: int, width: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_the_models_own(name: str) -> None:
    plain, graphed = models(name)
    fill((plain, graphed), 4)
    for rows, width, starts in [
        (1, 1, [24]),
        (1, 5, [17]),
        (3, 4, [24, 9, 20]),
        (4, 8, [24, 24, 13, 1]),
        (1, 20, [24]),
    ]:
        expected, logits = (b.forward(tokens(rows, width), starts, first_slot=0, logits=True) for b in (plain, graphed))
        torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-4)
    segments = [
        segment
        for slot, (start, parents) in enumerate(zip([24, 17, 22], PARENTS, strict=True))
        for segment in segments_of(slot, start, start + 2, parents)
    ]
    inputs = tokens(1, sum(segment.count for segment in segments))[0]
    expected, logits = (backend.forward_tree(inputs, segments, widths=None) for backend in (plain, graphed))
    torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-4)


def test_weights_that_stay_in_place_give_the_bits_of_joined_ones() -> None:
    (_, joined), (_, separate) = models("qwen2"), models("qwen2", may_join=False)
    layers = [backend._bodies.stack.layers[0] for backend in (joined, separate)]
    assert [len(layer._qkv._parts) for layer in layers] == [1, 3] and [len(x._gate_up._parts) for x in layers] == [1, 2]
    fill((joined, separate), 1)
    logits = [backend.forward(tokens(1, 5), [PROMPT], first_slot=0, logits=True) for backend in (joined, separate)]
    assert torch.equal(*logits)


def test_joined_weights_are_the_models_own() -> None:
    model, expected = (fresh("llama", **SIZES).to(DEVICE) for _ in range(2))
    model(input_ids=tokens(1, 3), output_hidden_states=True)  # leaves hooks, which change nothing
    backend = GraphedBackend(model, Rerun())
    assert use_kernels(backend, OwnLogits(backend.eager), may_join=True) is None
    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    attention = model.model.layers[0].self_attn
    attention.k_proj.weight.data.zero_()  # in place, as training changes weights
    layer = backend._bodies.stack.layers[0]
    keys = layer._qkv(torch.ones(1, 64, device=DEVICE), is_whole=True)[0, attention.q_proj.out_features :]
    assert not keys[: attention.k_proj.out_features].any() and keys[attention.k_proj.out_features :].any()


def test_a_decoder_computes_by_kernels_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(pretrained, "_is_captured", lambda model, fast: fast is not False)
        monkeypatch.setattr(pretrained, "packing", lambda model, fast: None)
    target, draft = (fresh("qwen2", seed, **SIZES).to(DEVICE) for seed in (0, 1))
    params, text = (
        [SamplingParams(max_tokens=5), SamplingParams(max_tokens=5, temperature=0.8, seed=3)],
        prompts((9,))[0],
    )
    texts = []
    for fast, length in ((False, 0), ("auto", 0), ("auto", 2)):
        options = {"fast": fast, "num_draft_tokens": length, "reproducible": False, "max_batch_size": 1}
        decoder = SpeculativeDecoder(target, draft, drafter="model" if length else "none", **options)
        assert is_shape_independent(decoder.target.backend) == (fast == "auto")
        texts.append([decoder.generate(text, each).token_ids for each in params])
    assert texts[0] == texts[1] == texts[2]


def test_a_subset_of_layers_computes_what_the_models_own_layers_do() -> None:
    plain, graphed = models("qwen3")
    fill((plain, graphed), 1)
    subsets = [backend.layer_subset([0]) for backend in (plain, graphed)]
    assert subsets[1].shape_independent
    expected, logits = (backend.forward(tokens(1, 3), [PROMPT], first_slot=0, logits=True) for backend in subsets)
    torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-4)
    whole = graphed.forward(tokens(1, 3), [PROMPT], first_slot=0, logits=True)
    assert not torch.allclose(whole, logits, rtol=1e-2)


@pytest.mark.parametrize("change", ["a hook", "a wrong kernel"])
def test_a_model_that_the_kernels_would_change_keeps_its_own_forward(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh("llama", **SIZES).to(DEVICE)
    if change == "a hook":
        model.model.layers[0].register_forward_hook(lambda *_: None)
    else:
        monkeypatch.setattr("slipstream.models.cuda.triton_layer.ACTIVATIONS", {"silu": (1.1, 0.0)})
    backend = GraphedBackend(model, Rerun())
    reason = use_kernels(backend, OwnLogits(backend.eager))
    assert reason is not None and ("hooks" in reason if change == "a hook" else "different results" in reason)
    assert not backend.shape_independent


def test_logits_are_the_models_own_over_several_chunks() -> None:
    plain, graphed = models("qwen3")
    prompt = tokens(1, 280, 5)
    for backend in (plain, graphed):
        backend.reserve(1, 400)
        for start in (0, 140):
            backend.forward(prompt[:, start : start + 140], [start], first_slot=0, logits=False)
    for start in (280, 126, 128, 253):
        expected, logits = (b.forward(tokens(1, 3), [start], first_slot=0, logits=True) for b in (plain, graphed))
        torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_attention_gives_the_same_bits_at_any_width_and_length(dtype: torch.dtype) -> None:
    _, graphed = models("qwen3", dtype)
    fill([graphed], 2)
    layer, generator = graphed._bodies.stack.layers[0], torch.Generator().manual_seed(2)
    sizes = (8, (layer.plan.heads + 2 * layer.plan.key_heads) * layer.plan.size), (2, 8, layer.plan.size)
    qkv, rope = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)

    def attended(width: int, length: int) -> Tensor:
        columns = PROMPT + torch.arange(width, device=DEVICE)[None]
        zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        forward = IndexedForward(zero, zero + PROMPT, columns, columns, length)
        out = qkv.new_empty(width, layer.plan.heads, layer.plan.size)
        graphed.cache.index(forward)
        return layer._attend(qkv[:width], out, (rope[0, :width], rope[1, :width]), graphed.cache)

    whole = attended(8, 512)
    for width, length in [(8, 256), (1, 256), (3, 512), (5, 256)]:
        assert torch.equal(attended(width, length), whole[:width])
    assert not torch.equal(whole[0], whole[1])


def test_many_chunks_combine_to_the_same_output_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context gives the same in a few long chunks."""
    _, graphed = models("qwen3")
    graphed.reserve(1, 2400)
    graphed.cache.hold(1, 2400)
    layer, generator = graphed._bodies.stack.layers[0], torch.Generator().manual_seed(3)
    for part in (graphed.cache.layers[0].keys, graphed.cache.layers[0].values):
        part.copy_(torch.randn(part.shape, generator=generator))
    qkv = torch.randn(2, (layer.plan.heads + 2 * layer.plan.key_heads) * layer.plan.size, generator=generator).to(
        DEVICE
    )
    rope = torch.ones(2, layer.plan.size, device=DEVICE), torch.zeros(2, layer.plan.size, device=DEVICE)

    def attended(start: int) -> Tensor:
        zero, columns = torch.zeros(1, dtype=torch.int64, device=DEVICE), start + torch.arange(2, device=DEVICE)[None]
        graphed.cache.index(IndexedForward(zero, zero + start, columns, columns, 2400))
        return layer._attend(qkv, qkv.new_empty(2, layer.plan.heads, layer.plan.size), rope, graphed.cache)

    outputs = [attended(start) for start in (2047, 2200)]
    monkeypatch.setattr("slipstream.models.cuda.triton_layer.CHUNK", 1024)
    for start, output in zip((2047, 2200), outputs, strict=True):
        torch.testing.assert_close(output, attended(start), rtol=1e-4, atol=1e-5)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
