"""Compiled layers compute what plain operators compute, to rounding; other layers keep the plain operators."""

import ctypes
import shutil
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.core.rounds import depths
from slipstream.core.trees import path_to, segments_of
from slipstream.errors import SlipstreamError
from slipstream.models.cpu.compiled_layers import CompiledOps, why_not_compiled
from slipstream.models.cpu.kernel_libraries import (
    SOURCES,
    address,
    block_kernels,
    block_recipe,
    compile_library,
    kernels,
    typed,
)
from slipstream.models.cpu.packed_linear import pack
from slipstream.models.cpu.quantized_linear import quantized
from slipstream.models.cpu.structs import (
    CacheStruct,
    FloatLayerStruct,
    LayerStruct,
)
from slipstream.models.decoder.cache import TreeRows, in_type, tree_rows
from slipstream.models.decoder.fused_layer import FusedLayer, LayerOps
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from tests.support.markers import needs_kernels
from tests.support.tiny_models import fast, fresh
from tests.support.tiny_models import ragged_logits as logits

NAMES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")
CACHED = {torch.bfloat16: torch.bfloat16, torch.float32: torch.float16}  # types of keys and values, by that of heads

pytestmark = needs_kernels


def layers(backend: HFBackend) -> list[FusedLayer]:
    forwards = (module.__dict__.get("forward") for module in backend.model.modules())
    return [forward for forward in forwards if isinstance(forward, FusedLayer)]


def compiled(name: str) -> HFBackend:
    """A backend whose heads have 32 numbers, which the kernels take."""
    return fast(name, torch.bfloat16, head_dim=32)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def memory_of(slots: int, length: int, size: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Random keys and values in the cache of heads of this type."""
    keys, values = (numbers(slots, 2, length, size, seed=seed).to(CACHED[dtype]) for seed in (1, 2))
    return keys, values


both_types = pytest.mark.parametrize("dtype", CACHED)


def rope(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0, 9, tokens)[:, None] / torch.arange(1, size // 2 + 1)
    angles_twice = torch.cat([angles, angles], -1)[None]
    return angles_twice.cos().bfloat16(), angles_twice.sin().bfloat16()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_models_own_layers(name: str) -> None:
    plain, backend = fast(name, torch.bfloat16, fused=False, head_dim=32), compiled(name)
    assert layers(backend) and all(type(layer.ops) is CompiledOps for layer in layers(backend))
    expected, got = logits(plain), logits(backend)
    assert (expected - got).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 10.0, 3000.0])
def test_compiled_operators_compute_what_the_plain_ones_compute(name: str, scale: float) -> None:
    """Up to a few roundings of bfloat16, for small activations and for some that overflow an exponential."""
    layer = layers(compiled(name))[0]
    plain, ops = layer.plain, layer.ops
    hidden, attended = numbers(1, 11, 32, scale=scale), numbers(1, 11, plain.heads * plain.size, seed=1, scale=scale)
    with torch.inference_mode():
        pairs = [
            *zip(plain.project_qkv_rope(hidden, rope(11, 32)), ops.project_qkv_rope(hidden, rope(11, 32)), strict=True)
        ]
        pairs.append((plain.residual_mlp(hidden, attended), ops.residual_mlp(hidden, attended)))
    for expected, got in pairs:
        assert expected.shape == got.shape
        assert (expected.float() - got.float()).abs().max() <= 0.02 * expected.float().abs().max()
    assert not torch.equal(pairs[2][0], hidden)  # or the layer would do nothing


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_token_gets_the_same_bits_whatever_tokens_are_beside_it(name: str) -> None:
    ops = layers(compiled(name))[0].ops
    hidden, attended = numbers(1, 40, 32), numbers(1, 40, ops.heads * 32, seed=1)
    cos, sin = rope(40, 32)
    with torch.inference_mode():
        heads, mlp_outputs = ops.project_qkv_rope(hidden, (cos, sin))[0], ops.residual_mlp(hidden, attended)
        for first, last in ((0, 1), (7, 8), (3, 11), (5, 25)):
            part = slice(first, last)
            assert torch.equal(
                ops.project_qkv_rope(hidden[:, part], (cos[:, part], sin[:, part]))[0], heads[:, :, part]
            )
            assert torch.equal(ops.residual_mlp(hidden[:, part], attended[:, part]), mlp_outputs[:, part])
            as_rows = ops.residual_mlp(hidden[0, part, None], attended[0, part, None])
            assert torch.equal(as_rows[:, 0], mlp_outputs[0, part])


def test_layers_the_kernels_cannot_compute_keep_the_plain_operators() -> None:
    assert all(type(layer.ops) is LayerOps for layer in layers(fast("llama", torch.bfloat16)))  # heads of 8
    assert all(type(layer.ops) is LayerOps for layer in layers(fast("llama", torch.float32, head_dim=32)))
    ops = layers(compiled("llama"))[0].plain
    assert why_not_compiled(ops) is None
    ops.plan = replace(ops.plan, rotated=24)
    assert why_not_compiled(ops) == "32 numbers in a head, 24 of them rotated, not multiples of 32"


def test_operators_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledOps, "residual_mlp", lambda self, hidden, attended: torch.zeros_like(hidden))
    backend = fast("llama", torch.bfloat16, head_dim=608)  # too large for whole layers
    assert layers(backend) and all(type(layer.ops) is LayerOps for layer in layers(backend))
    monkeypatch.undo()
    expected = logits(fast("llama", torch.bfloat16, fused=False, head_dim=608))
    assert (expected - logits(backend)).abs().max() <= 0.1 * expected.abs().max()


def test_quantized_layers_are_compiled() -> None:
    model = fresh("llama", dtype=torch.bfloat16, head_dim=32, intermediate_size=64)
    backend = HFBackend(model)
    fuse(model, lambda linear: quantized(linear, "int4"))
    pack(model, partial(quantized, bits="int4"))
    group_queries(backend)
    fuse_layers(backend)
    assert all(type(layer.ops) is CompiledOps for layer in layers(backend))
    plain, compiled_ops = layers(backend)[0].plain, layers(backend)[0].ops
    for tokens in (1, 20, 100):
        hidden, attended = numbers(1, tokens, 32), numbers(1, tokens, compiled_ops.heads * 32, seed=1)
        with torch.inference_mode():
            expected, got = (ops.residual_mlp(hidden, attended).float() for ops in (plain, compiled_ops))
        assert (expected - got).abs().max() <= 0.05 * expected.abs().max()


def reference(heads: Tensor, memory: tuple[Tensor, Tensor], places: list[tuple[int, int]], window: int) -> Tensor:
    """Attention by its definition, float32. heads: [tokens, 4 + 2 * 2, D]; memory: keys and values, with the new."""
    out = torch.empty(len(places), 4, heads.shape[2])
    for i, (slot, position) in enumerate(places):
        attended = slice(max(0, position - window + 1) if window else 0, position + 1)
        for head in range(4):
            keys, values = (part[slot, head // 2, attended].float() for part in memory)
            out[i, head] = torch.softmax(keys @ heads[i, head].float() / 8, 0) @ values
    return out


def attention(
    heads: Tensor,
    memory: tuple[Tensor, Tensor],
    places: list[tuple[int, int]],
    window: int,
    tree: TreeRows | None = None,
    library: Any = None,
) -> Tensor:
    """Attention by the kernel, which also writes keys and values. tree: where tokens of branches are written."""
    tokens, size = len(places), heads.shape[2]
    layer: ctypes.Structure
    assert memory[0].dtype == memory[1].dtype == CACHED[heads.dtype]
    if heads.dtype == torch.float32:
        library = library or block_kernels()
        layer = FloatLayerStruct(hidden=64, inner=64, heads=4, key_heads=2, size=size)
    else:
        library = library or kernels()
        layer = LayerStruct(hidden=64, inner=64, heads=4, key_heads=2, size=size)
    slots, positions = (torch.tensor(part) for part in zip(*places, strict=True))
    tree_tensors = (
        (positions, None, None, None) if tree is None else (tree.into[1], tree.forks, tree.begins, tree.paths)
    )
    cache = CacheStruct(
        *map(address, memory), memory[0].shape[2], window, 1 / 8, *map(address, (slots, positions, *tree_tensors))
    )
    out, space = (
        heads.new_empty(tokens, 4, size),
        heads.new_empty(library.layer_scratch(ctypes.addressof(layer), tokens, cache.length)),
    )
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (heads, out, space)]
    library.attend(ctypes.byref(layer), ctypes.byref(cache), pointers[0], ctypes.c_int64(tokens), *pointers[1:])
    return out


PLACES = {
    "a prompt": [(1, position) for position in range(100)],
    "one token each": [(slot, 17 * slot + 3) for slot in range(6)],
    "ragged": [(0, 63), (0, 64), (0, 65), (1, 0), (2, 200), (2, 201), (4, 31), (4, 32)],
    "long": [*((0, position) for position in range(1017, 1030)), (1, 511), (1, 512), (2, 1599), (3, 5)],
}
LENGTHS = {"long": 1600}  # cached positions; 256 otherwise


@pytest.mark.pairwise
@both_types
@pytest.mark.parametrize("size", [32, 64, 96, 128, 256, 512])
@pytest.mark.parametrize("window", [0, 7, 50, 700])
@pytest.mark.parametrize("name", PLACES)
def test_attention_equals_its_definition(name: str, window: int, size: int, dtype: torch.dtype) -> None:
    places = PLACES[name]
    heads = torch.randn(len(places), 8, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    memory = memory_of(6, LENGTHS.get(name, 256), size, dtype)
    outputs = attention(heads, memory, places, window)
    for i, (slot, position) in enumerate(places):
        assert torch.equal(memory[0][slot, :, position], in_type(heads[i, 4:6], CACHED[dtype]))
        assert torch.equal(memory[1][slot, :, position], in_type(heads[i, 6:], CACHED[dtype]))
    expected = reference(heads, memory, places, window)
    assert (outputs.float() - expected).abs().max() <= 0.01 * expected.abs().max()
    if window == 7 and name == "a prompt":
        assert (outputs.float() - reference(heads, memory, places, 8)).abs().max() > 0.05 * expected.abs().max()


def test_keys_and_values_beyond_the_largest_float16_number_become_it() -> None:
    """And infinities become NaN, which reaches the result."""
    heads = torch.zeros(1, 8, 64)
    heads[0, 4:, :6] = torch.tensor([65504.0, 65519.9, 65520.0, -1e9, 3e38, 1e-9])
    memory = memory_of(1, 256, 64, torch.float32)
    assert attention(heads, memory, [(0, 0)], 0)[0, :, :6].tolist() == [[65504.0] * 3 + [-65504.0, 65504.0, 0.0]] * 4
    assert torch.equal(memory[0][0, :, 0], in_type(heads[0, 4:6], torch.float16))
    heads[0, 4:, 0] = float("inf")
    assert attention(heads, memory, [(0, 0)], 0).isnan().all() and in_type(heads, torch.float16).isnan().any()


@both_types
@pytest.mark.parametrize("window", [0, 50])
def test_attention_gives_a_token_the_same_bits_whatever_is_beside_it(window: int, dtype: torch.dtype) -> None:
    places = PLACES["a prompt"]
    heads, memory = numbers(100, 8, 64).to(dtype), memory_of(3, 256, 64, dtype)
    whole = attention(heads, memory, places, window)
    for first, last in ((0, 1), (40, 41), (90, 100), (63, 80)):
        assert torch.equal(attention(heads[first:last], memory, places[first:last], window), whole[first:last])
    longer = tuple(torch.cat([part, part.flip(2)], 2) for part in memory)
    assert torch.equal(attention(heads[90:], (longer[0], longer[1]), places[90:], window), whole[90:])


def long_texts(dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor], list[tuple[int, int]]]:
    """Heads, cache and places: tokens of one text around a multiple of 512, and a token of each of three others."""
    places = [*((0, position) for position in range(1017, 1030)), (1, 511), (2, 1599), (3, 5)]
    return numbers(len(places), 8, 64).to(dtype), memory_of(4, 1600, 64, dtype), places


def depends_on_threads(dtype: torch.dtype, window: int, library: Any = None) -> list[tuple[int, int]]:
    """The (threads, tokens at a time) that give other bits than one token at a time on one thread."""
    heads, memory, places = long_texts(dtype)

    def outputs(width: int) -> Tensor:
        parts = [slice(first, first + width) for first in range(0, len(places), width)]
        return torch.cat([attention(heads[part], memory, places[part], window, library=library) for part in parts])

    torch.set_num_threads(1)
    outputs(len(places))  # caches all tokens
    expected, differs = outputs(1), []
    for threads in (1, 2, 3, 5, 8, 16, 33):
        torch.set_num_threads(threads)
        differs += [(threads, width) for width in (1, 2, 5, len(places)) if not torch.equal(outputs(width), expected)]
    return differs


@both_types
@pytest.mark.parametrize("window", [0, 600])
def test_attention_over_long_texts_gives_the_same_bits_however_many_threads_share_it(
    window: int, dtype: torch.dtype
) -> None:
    assert depends_on_threads(dtype, window) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and its OpenMP")
def test_attention_whose_stretches_depend_on_threads_is_noticed(tmp_path: Path) -> None:
    recipe = block_recipe("plain")
    sources = shutil.copytree(SOURCES, tmp_path / "csrc")
    attention_file = sources / "attention.h"
    text = attention_file.read_text()
    by_threads = "extern int omp_get_max_threads(void);\n#define STRETCH (omp_get_max_threads() > 2 ? 256 : 512)\n"
    assert "    STRETCH = 512, " in text
    attention_file.write_text(by_threads + text.replace("    STRETCH = 512, ", "    OLD_STRETCH, "))
    files = tuple(sources / file.relative_to(SOURCES) for file in recipe.sources)
    compile_library(["gcc"], replace(recipe, sources=files, flags=("-O1", *recipe.flags[1:])), tmp_path / "library.so")
    differs = depends_on_threads(torch.float32, 0, typed(ctypes.CDLL(str(tmp_path / "library.so"))))
    assert {threads for threads, _ in differs} == {3, 5, 8, 16, 33}


@both_types
@pytest.mark.parametrize("window", [0, 7, 50])
@pytest.mark.parametrize("base", [30, 63, 97, 1021])
def test_a_branch_gets_the_bits_of_a_row_of_its_own(base: int, window: int, dtype: torch.dtype) -> None:
    """Compares every path of the tree with the same tokens in a slot of their own."""
    parents = (
        -1,
        0,
        1,
        2,
        1,
        4,
        5,
        4,
        -1,
        8,
    )  # a chain of four; a branch of its second node, which branches again; a second root
    segments = segments_of(0, base - 2, base, parents)
    memory = memory_of(2, base + 64, 64, dtype)
    for part in memory:
        part[1, :, :base] = part[0, :, :base]
    tree = tree_rows(segments, 2 + len(parents), torch.device("cpu"))
    heads = numbers(2 + len(parents), 8, 64).to(dtype)
    positions = [base - 2, base - 1, *(base + depth for depth in depths(parents))]
    outputs = attention(heads, memory, [(0, position) for position in positions], window, tree)
    for node in range(len(parents)):
        path = [0, 1, *(2 + n for n in path_to(parents, node))]
        places = [(1, base - 2 + i) for i in range(len(path))]
        assert torch.equal(attention(heads[path], memory, places, window)[-1], outputs[2 + node])
    wrong_tree = replace(tree, paths=tree.paths + 1)
    wrong_outputs = attention(heads, memory, [(0, position) for position in positions], window, wrong_tree)
    assert not torch.equal(wrong_outputs[6:], outputs[6:]) and torch.equal(wrong_outputs[:6], outputs[:6])


@both_types
def test_attention_does_not_read_stale_keys_and_values_after_a_token(dtype: torch.dtype) -> None:
    places = PLACES["ragged"]
    heads, clean = numbers(len(places), 8, 64).to(dtype), memory_of(6, 256, 64, dtype)
    stale = tuple(part.clone() for part in clean)
    for slot, end in ((0, 66), (1, 1), (2, 202), (4, 33)):
        for part in stale:
            part[slot, :, end:] = float("nan")
    assert torch.equal(attention(heads, (stale[0], stale[1]), places, 0), attention(heads, clean, places, 0))


@pytest.mark.pairwise
@both_types
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("window", "index"), [(0, 65), (0, 90), (7, 40), (7, 65), (50, 3)])
@pytest.mark.parametrize("before", [0, 470])
def test_nan_and_infinity_reach_exactly_the_tokens_that_attend_to_them(
    before: int, window: int, index: int, broken: float, dtype: torch.dtype
) -> None:
    places = [(1, before + position) for position in range(100)]
    heads = numbers(100, 8, 64).to(dtype)
    clean = attention(heads, memory_of(3, 640, 64, dtype), places, window)
    heads[index, 4:] = broken
    outputs = attention(heads, memory_of(3, 640, 64, dtype), places, window)
    sees = [index <= i < index + (window or 100) for i in range(100)]
    assert all(torch.equal(outputs[i], clean[i]) for i in range(100) if not sees[i])
    assert all(not outputs[i].isfinite().any() for i in range(100) if sees[i])
    alone = attention(heads[:index], memory_of(3, 640, 64, dtype), places[:index], window)
    assert torch.equal(alone, clean[:index])


@both_types
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [0, 40])
def test_queries_with_nan_or_infinity_give_nan(first: int, broken: float, dtype: torch.dtype) -> None:
    """A broken model must be noticed, not hidden behind plausible weights."""
    places = PLACES["a prompt"][first:80]
    heads, memory = numbers(len(places), 8, 64).to(dtype), memory_of(3, 256, 64, dtype)
    heads[5, :4, 3] = broken  # in one token's queries; keys and values are finite
    if broken == float("inf"):
        heads[5, :4, 4] = -broken  # infinity minus infinity, whatever the keys' signs
        memory[0][..., 3:5] = heads[:, 4:6, 3:5] = 1
    outputs = attention(heads, memory, places, 0)
    assert outputs[5].isnan().all() and outputs[:5].isfinite().all() and outputs[6:].isfinite().all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_whole_layers_that_compute_something_else_are_not_used(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledOps, "whole_layer", lambda self, hidden, *rest: torch.full_like(hidden, broken))
    backend = fast("llama", torch.bfloat16, head_dim=64)
    assert layers(backend) and all(type(layer.ops) is LayerOps for layer in layers(backend))


def test_a_forward_past_the_reserved_memory_is_refused() -> None:
    backend = fast("llama", torch.bfloat16, head_dim=64)
    backend.reserve(1, 128)
    end = backend.cache.shape[1]
    backend.forward(torch.ones(1, 4, dtype=torch.int64), [end - 4], first_slot=0, logits=False)
    with pytest.raises(SlipstreamError, match=f"position {end + 3}"):
        backend.forward(torch.ones(1, 4, dtype=torch.int64), [end], first_slot=0, logits=False)
