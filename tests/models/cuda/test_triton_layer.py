"""Layers by Triton kernels compute what the model's own operators do; on a GPU or in Triton's interpreter.

Without a GPU, run in an environment that also has triton 3.6.0 and numpy below 2.4:

    TRITON_INTERPRET=1 python -m pytest tests/models/cuda/test_triton_layer.py
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.trees import segments_of
from slipstream.models.cuda.graph_backend import GraphedBackend, make_graphs_faster
from slipstream.models.cuda.graph_store import Rerun
from slipstream.models.cuda.indexed_cache import IndexedForward
from slipstream.models.cuda.triton_layer import has_kernels, uses_kernels
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import OwnLogits
from tests.support.tiny_models import VOCAB, fresh

ON_GPU = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
DEVICE = "cuda" if ON_GPU else "cpu"
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and has_kernels()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # from the interpreter
    pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="needs a GPU, or Triton with TRITON_INTERPRET=1"),
]

SIZES = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96}
MODELS = ("llama", "qwen2", "qwen3", "gemma3")
PROMPT = 24
PARENTS = [(-1, 0, 1, 2, 3, 4, 2, 6, 7, -1), (-1,), (-1, -1, -1)]


def models(name: str, dtype: torch.dtype = torch.float32) -> tuple[HFBackend, GraphedBackend]:
    """The same model with its own operators, and with the kernels."""
    plain, fused = (fresh(name, dtype=dtype, **SIZES).to(DEVICE) for _ in range(2))
    fuse(fused)
    graphed = GraphedBackend(fused, Rerun())
    make_graphs_faster(graphed, OwnLogits(graphed.eager))
    assert uses_kernels(fused)
    make_graphs_faster(graphed, OwnLogits(graphed.eager))  # as a second decoder over the same model does
    assert uses_kernels(fused)
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


def test_a_model_with_kernels_can_be_copied() -> None:
    plain, graphed = models("llama")
    copied = deepcopy(graphed.model)
    expected, logits = (model(input_ids=tokens(1, 7), use_cache=False).logits for model in (plain.model, copied))
    torch.testing.assert_close(expected, logits, rtol=1e-4, atol=1e-4)


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
    fused = next(module.__dict__["forward"] for module in graphed.model.modules() if "forward" in module.__dict__)
    ops, generator = fused.ops, torch.Generator().manual_seed(2)
    sizes = (8, (ops.heads + 2 * ops.key_heads) * ops.size), (2, 8, ops.size)
    qkv, rope = (torch.randn(size, generator=generator).to(DEVICE, dtype) for size in sizes)

    def attended(width: int, length: int) -> Tensor:
        columns = PROMPT + torch.arange(width, device=DEVICE)[None]
        zero = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        forward = IndexedForward(zero, zero + PROMPT, columns, columns, length)
        out = qkv.new_empty(width, ops.heads, ops.size)
        graphed.cache.index(forward)
        return ops._attend(qkv[:width], out, (rope[0, :width], rope[1, :width]), graphed.cache, fused.plan)

    whole = attended(8, 512)
    for width, length in [(8, 256), (1, 256), (3, 512), (5, 256)]:
        assert torch.equal(attended(width, length), whole[:width])
    assert not torch.equal(whole[0], whole[1])


def test_many_chunks_combine_to_the_same_output_as_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long context gives the same in a few long chunks."""
    _, graphed = models("qwen3")
    graphed.reserve(1, 2400)
    graphed.cache.hold(1, 2400)
    fused = next(module.__dict__["forward"] for module in graphed.model.modules() if "forward" in module.__dict__)
    ops, generator = fused.ops, torch.Generator().manual_seed(3)
    for part in (graphed.cache.layers[0].keys, graphed.cache.layers[0].values):
        part.copy_(torch.randn(part.shape, generator=generator))
    qkv = torch.randn(2, (ops.heads + 2 * ops.key_heads) * ops.size, generator=generator).to(DEVICE)
    rope = torch.ones(2, ops.size, device=DEVICE), torch.zeros(2, ops.size, device=DEVICE)

    def attended(start: int) -> Tensor:
        zero, columns = torch.zeros(1, dtype=torch.int64, device=DEVICE), start + torch.arange(2, device=DEVICE)[None]
        graphed.cache.index(IndexedForward(zero, zero + start, columns, columns, 2400))
        return ops._attend(qkv, qkv.new_empty(2, ops.heads, ops.size), rope, graphed.cache, fused.plan)

    outputs = [attended(start) for start in (2047, 2200)]
    monkeypatch.setattr("slipstream.models.cuda.triton_layer.CHUNK", 1024)
    for start, output in zip((2047, 2200), outputs, strict=True):
        torch.testing.assert_close(output, attended(start), rtol=1e-4, atol=1e-5)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-2
