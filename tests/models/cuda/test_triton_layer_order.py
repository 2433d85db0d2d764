"""With Triton kernels no bit of a token depends on the shape of a forward; on a GPU or in Triton's interpreter.

`test_triton_layer.py` says how to run it; `test_triton_kernels.py` checks what the kernels are compiled to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.core.session import Session
from slipstream.core.trees import TreeSegment, segments_of
from slipstream.models.backend_capabilities import is_shape_independent
from slipstream.models.cuda import triton_layer
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.indexed_cache import TreeTable
from slipstream.models.cuda.triton_layer import Product, splits_for
from slipstream.models.hf.backend import HFBackend
from tests.models.cuda.test_triton_layer import DEVICE, ON_GPU, models, pytestmark, tokens  # noqa: F401

COUNTS = (1, 2, 5, 16, 17, 33, 64, 65, 130)  # numbers of tokens for each tile, and at its limits
INNER, OUTPUTS = 1100 if ON_GPU else 560, 70  # neither is a multiple of a tile's size
LENGTH = 26
TREE = (-1, 0, 1, 2, 1, 4, -1, 6)
START = 121  # a tree from here reaches into the next chunk


@pytest.fixture(autouse=True, scope="module")
def sums_in_order() -> Iterator[None]:
    """Makes the interpreter add in order: NumPy's order depends on the tile, that of tensor cores does not."""
    with pytest.MonkeyPatch.context() as patch:
        if not ON_GPU:
            from triton.runtime import interpreter

            def dot(_: Any, a: Any, b: Any, total: Any, *options: Any) -> Any:
                result = total.data.copy()
                for i in range(a.data.shape[1]):
                    result += a.data[:, i : i + 1] * b.data[i : i + 1]
                return interpreter.TensorHandle(result, total.dtype.scalar)

            patch.setattr(interpreter.InterpreterBuilder, "create_dot", dot)
        yield


def products_agree(product: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    """Whether every token has the bits it has alone, whatever its place."""

    def whole(x: Tensor) -> Tensor:
        product_of_rows = product(x)
        return product_of_rows if product_of_rows.dim() == 2 else torch.stack(list(product_of_rows)).sum(0)

    alone = torch.cat([whole(row[None]) for row in x])
    return all(torch.equal(whole(x[-count:]), alone[-count:]) for count in COUNTS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if ON_GPU else [torch.float32])
def test_products_have_the_same_bits_for_any_number_of_tokens(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(INNER, OUTPUTS).to(DEVICE, dtype).requires_grad_(False)
    x = torch.randn(COUNTS[-1], INNER).to(DEVICE, dtype)
    product = Product([linear])
    assert product(x).dim() == 3  # in parts
    close = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(product(x).sum(0).to(dtype), linear(x), **close)
    torch.testing.assert_close(product(x, is_whole=True), linear(x), **close)
    assert products_agree(product, x)
    assert products_agree(lambda x: product(x, is_whole=True), x)


def test_a_split_that_depends_on_the_number_of_tokens_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    product, x = Product([nn.Linear(INNER, OUTPUTS).to(DEVICE)]), torch.randn(130, INNER).to(DEVICE)

    def careless(x: Tensor) -> Tensor:
        monkeypatch.setattr(triton_layer, "splits_for", lambda *sizes: splits_for(*sizes) // (1 if len(x) > 16 else 2))
        return product(x)

    assert not products_agree(careless, x)


def test_splits_keep_a_gpu_busy_and_are_not_too_short() -> None:
    assert splits_for(4096, 6144, 128) == 4  # Qwen3-8B: queries, keys and values
    assert splits_for(4096, 24576, 128) == 1
    assert splits_for(12288, 4096, 128) == 4
    assert splits_for(4096, 151936, 128) == 1
    assert splits_for(64, 64, 64) == 1


@pytest.fixture(scope="module", params=["qwen3", "gemma3"])
def backend(request: pytest.FixtureRequest) -> GraphedBackend:
    _, graphed = models(request.param)
    assert is_shape_independent(graphed) and graphed.flat
    graphed.reserve(4, 300)
    return graphed


def text() -> Tensor:
    return tokens(1, LENGTH, seed=4)


def read(backend: GraphedBackend, width: int, slot: int = 0) -> Tensor:
    """Logits [LENGTH, V] of the text, read so many tokens at a time."""
    parts = [
        backend.forward(text()[:, start : start + width], [start], first_slot=slot, logits=True)[0].clone()
        for start in range(0, LENGTH, width)
    ]
    return torch.cat(parts)


def test_a_text_has_the_same_logits_however_it_is_read(
    backend: GraphedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read(backend, LENGTH)
    for width in (1, 3, 8):
        assert torch.equal(read(backend, width), whole)
    assert torch.equal(read(backend, 9, slot=2), whole)  # uncaptured
    last = torch.tensor([LENGTH - 1], device=DEVICE)
    assert torch.equal(backend.answer(text(), 0, slot=1, columns=last)[0, 0], whole[-1])
    monkeypatch.setattr(triton_layer, "PARTIAL_BYTES", 1)  # column by column
    assert torch.equal(read(backend, LENGTH), whole)
    monkeypatch.setattr(triton_layer, "CHUNK", 64)
    monkeypatch.setattr(triton_layer, "STEP", 16)  # negative control
    assert not torch.equal(read(backend, LENGTH), whole)


def test_rows_of_a_batch_have_the_logits_they_have_alone(backend: GraphedBackend) -> None:
    whole = read(backend, LENGTH)
    for slot in (1, 2):
        read(backend, LENGTH, slot)
    starts = [LENGTH - 4, 3, LENGTH - 9]
    inputs = torch.cat([text()[:, start : start + 4] for start in starts])
    logits = backend.forward(inputs, starts, first_slot=0, logits=True)
    for row, start in zip(logits, starts, strict=True):
        assert torch.equal(row, whole[start : start + 4])


@pytest.mark.parametrize("slot", [0, 1])  # captured, and not
def test_branches_of_a_tree_have_the_logits_of_chains(
    backend: GraphedBackend, slot: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, nodes = tokens(1, START, seed=7), tokens(1, len(TREE), seed=8)[0]
    backend.forward(prompt, [0], first_slot=slot, logits=False)
    expected = []
    for node in range(len(TREE)):
        path = [node]
        while TREE[path[0]] >= 0:
            path.insert(0, TREE[path[0]])
        chain = torch.cat([prompt[0, -1:], nodes[path]])[None]
        expected.append(backend.forward(chain, [START - 1], first_slot=slot, logits=True)[0, -1].clone())
    segments: list[TreeSegment] = segments_of(slot, START - 1, START, TREE)
    inputs = torch.cat([prompt[0, -1:], nodes, nodes[:2]])  # two more tokens as padding
    logits = backend.forward_tree(inputs, segments, widths=None)
    assert len(logits) == len(inputs)
    for of_node, of_chain in zip(logits[1:], expected, strict=False):
        assert torch.equal(of_node, of_chain)
    assert not torch.equal(logits[2], logits[4])
    padded = TreeTable.padded

    def in_order_of_places(table: TreeTable, rows: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        depths, visible, ancestors = padded(table, rows, width)
        return depths, visible, torch.arange(width).expand_as(ancestors).contiguous()

    monkeypatch.setattr(TreeTable, "padded", in_order_of_places)  # negative control
    wrong_logits = backend.forward_tree(inputs, segments, widths=None)
    assert [torch.equal(*pair) for pair in zip(wrong_logits[1:], expected, strict=False)] == [True] * 4 + [False] * 4
    assert Session(backend).branches


def test_one_capture_serves_all_lengths(backend: GraphedBackend) -> None:
    backend.cache.hold(4, 300)  # growing drops earlier captures
    counts = []
    for start in (0, 130, 270):
        backend.forward(tokens(1, 15), [start], first_slot=0, logits=True)
        counts.append(backend.graph_memory().count)
    assert counts == counts[:1] * 3 and counts[0] > 0


def test_hidden_states_are_kept_as_the_models_own_forward_keeps_them() -> None:
    plain, graphed = models("qwen3")
    backends: tuple[HFBackend | GraphedBackend, ...] = plain, graphed
    kept = []
    for backend in backends:
        backend.reserve(1, 60)
        backend.keep_hidden_states([0, 1, 2])
        backend.forward(tokens(1, 7), [0], first_slot=0, logits=False)
        backend.forward(tokens(1, 2, seed=3), [7], first_slot=0, logits=True)
        kept.append(backend.hidden_states([0, 1, 2], 0, 0, 9))
    torch.testing.assert_close(*kept, rtol=1e-4, atol=1e-4)
