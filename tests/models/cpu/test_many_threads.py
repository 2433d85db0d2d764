"""A token's bits do not depend on how many threads share the tokens of a forward, nor on how."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.kernel_libraries import block_kernels, kernels
from slipstream.models.cpu.packed_linear import CompressedLinear, pack
from slipstream.models.cpu.quantized_linear import QuantizedLinear
from slipstream.models.decoder.fused_layer import activated
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from tests.support.gguf_files import BY_NAME, part_of, random_blocks
from tests.support.markers import mostly_exhaustive, needs_kernels
from tests.support.tiny_models import fast, fresh, prompts

THREADS = (2, 3, 5, 8, 16, 33)
FEW, MANY = [3], mostly_exhaustive((2, 5, 8, 16, 33))
over_threads = pytest.mark.parametrize("threads", [*FEW, *MANY])
ROWS = (1, 2, 3, 5, 8, 13, 16, 24, 31, 32, 40)


def gates(rows: int, size: int, dtype: torch.dtype) -> Tensor:
    """Gates as a joint product leaves them: a view of half the columns."""
    columns = torch.randn(1, rows, 2 * size, generator=torch.Generator().manual_seed(0)) * 4
    return columns.to(dtype).split(size, -1)[0]


@pytest.mark.pairwise
@over_threads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("act", [nn.functional.silu, nn.GELU("tanh")])
def test_an_activation_of_many_rows_has_the_bits_of_each_alone(
    act: nn.Module, dtype: torch.dtype, threads: int
) -> None:
    for size in (1536, 4096, 8960, 4000):
        x = gates(max(ROWS), size, dtype)
        torch.set_num_threads(1)
        alone = torch.cat([act(x[:, row : row + 1]) for row in range(max(ROWS))], 1)
        torch.set_num_threads(threads)
        for rows in ROWS:
            assert torch.equal(activated(act, x[:, :rows]), alone[:, :rows]), (size, rows)


def test_activations_have_the_same_bits_where_pytorchs_own_sharing_changes_them() -> None:
    x = gates(32, 4096, torch.float32)
    torch.set_num_threads(1)
    alone = nn.functional.silu(x)
    torch.set_num_threads(3)
    if torch.equal(nn.functional.silu(x), alone):
        pytest.skip("this PyTorch rounds alike everywhere")
    assert torch.equal(activated(nn.functional.silu, x), alone)


@over_threads
def test_packed_forwards_of_several_widths_give_the_same_bits(threads: int) -> None:
    torch.set_num_threads(threads)
    sizes = {"hidden_size": 192, "intermediate_size": 4096, "num_attention_heads": 3, "num_key_value_heads": 1}
    backend = HFBackend(fresh("llama", **sizes, head_dim=64))
    fuse(backend.model)
    pack(backend.model)
    group_queries(backend)
    fuse_layers(backend)
    backend.reserve(1, 200)
    product = backend.model.model.layers[0].mlp.gate_proj.fused.joint
    x = torch.randn(1, 16, product.in_features, generator=torch.Generator().manual_seed(0))
    if not torch.equal(product(x)[:, :8], product(x[:, :8])):
        pytest.skip("this PyTorch's oneDNN rounds by the number of tokens, which calibration finds")
    text = torch.randint(0, backend.vocab_size, (1, 64), generator=torch.Generator().manual_seed(1))

    def logits(width: int) -> Tensor:
        parts = [
            backend.forward(text[:, first : first + width], [first], first_slot=0, logits=True)
            for first in range(0, 64, width)
        ]
        return torch.cat(parts, 1)

    assert torch.equal(logits(8), logits(32)) and torch.equal(logits(8), logits(16))


def products(library: Any) -> Iterator[tuple[str, nn.Module, torch.dtype]]:
    """Layers of each kind of weights, with numbers of panels that few numbers of threads divide."""
    generator = torch.Generator().manual_seed(5)
    for outputs, inputs in ((300, 96), (1090, 256), (2080, 64)):
        linear = nn.Linear(inputs, outputs).bfloat16()
        linear.weight.data.normal_(generator=generator)
        yield "12 bits", CompressedLinear(linear, library), torch.bfloat16
        yield "4 bits", QuantizedLinear(linear, "int4", library), torch.bfloat16
    names = ("Q4_0", "Q8_0", "Q4_0")
    raws = [(BY_NAME[name], random_blocks(BY_NAME[name], 161 + 160 * i, 256, i)) for i, name in enumerate(names)]
    parts = [part_of(block, raw, 256, block_kernels()) for block, raw in raws]
    yield "blocks", BlockLinear(parts, None, "int8"), torch.float32


@needs_kernels
def test_products_on_many_threads_are_those_of_one_thread() -> None:
    for kind, layer, dtype in products(kernels()):
        x = torch.randn(300, layer.in_features, generator=torch.Generator().manual_seed(6)).to(dtype)
        for tokens in (1, 3, 8, 17, 300):
            torch.set_num_threads(1)
            expected = layer(x[:tokens])
            for threads in THREADS:
                torch.set_num_threads(threads)
                for _ in range(3):  # threads take different panels each time
                    assert torch.equal(layer(x[:tokens]), expected), (kind, tokens, threads)


@needs_kernels
def test_concurrent_callers_with_changing_numbers_of_threads_get_the_same_products() -> None:
    kinds = list(products(kernels()))
    x = [
        torch.randn(5, layer.in_features, generator=torch.Generator().manual_seed(6)).to(dtype)
        for _, layer, dtype in kinds
    ]
    torch.set_num_threads(1)
    expected = [layer(inputs) for (_, layer, _), inputs in zip(kinds, x, strict=True)]

    def call(caller: int) -> list[str]:
        wrong = []
        for turn in range(20):
            torch.set_num_threads((1, *THREADS)[(caller + turn) % 5])
            for (kind, layer, _), inputs, sums in zip(kinds, x, expected, strict=True):
                wrong += [] if torch.equal(layer(inputs), sums) else [kind]
        return wrong

    with ThreadPoolExecutor(4) as callers:
        assert [wrong for wrong in callers.map(call, range(4)) if wrong] == []


@pytest.mark.slow
@needs_kernels
@over_threads
def test_texts_by_kernels_are_those_of_one_thread(threads: int) -> None:
    """Calibrated with that many threads; one prompt is longer than two stretches of attention."""
    expected = generated("none", together=False, threads=1)
    assert generated("ngram", True, threads) == generated("none", True, threads) == expected


@cache
def generated(drafter: str, together: bool, threads: int) -> list[list[int]]:
    torch.set_num_threads(threads)
    texts, params = prompts([30, 9, 1100]), SamplingParams(max_tokens=24, ignore_eos=True)
    model = fast("llama", torch.bfloat16, head_dim=64, max_position_embeddings=2048).model
    with SpeculativeDecoder(model, drafter=drafter, num_draft_tokens=5, reproducible=True) as decoder:
        results = decoder.generate(texts, params) if together else [decoder.generate(text, params) for text in texts]
    return [result.token_ids for result in results]
