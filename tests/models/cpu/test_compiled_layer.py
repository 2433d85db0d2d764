"""Compiled layers against the operators they stand for, and when there are none."""

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
from slipstream.models.cpu.compiled_layers import CompiledOps, kernel_activation
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
from slipstream.models.cpu.quantised_linear import quantised
from slipstream.models.cpu.structs import (
    BlockLinearStruct,
    CacheStruct,
    FloatLayerStruct,
    FloatNormStruct,
    LayerStruct,
    LinearStruct,
    NormStruct,
)
from slipstream.models.decoder.cache import TreeRows, tree_rows
from slipstream.models.decoder.fused_layer import GELU, SILU, FusedLayer, LayerOps
from slipstream.models.decoder.fused_linear import fuse
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers, group_queries
from tests.support.tiny_models import fast, fresh
from tests.support.tiny_models import ragged_logits as logits

NAMES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")

pytestmark = pytest.mark.skipif(kernels() is None, reason="needs a C compiler and a processor with AVX2")


def layers(backend: HFBackend) -> list[FusedLayer]:
    found = (module.__dict__.get("forward") for module in backend.model.modules())
    return [forward for forward in found if isinstance(forward, FusedLayer)]


def compiled(name: str) -> HFBackend:
    """Heads of 32, which the kernels take."""
    return fast(name, torch.bfloat16, head_dim=32)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def rope(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0, 9, tokens)[:, None] / torch.arange(1, size // 2 + 1)
    both = torch.cat([angles, angles], -1)[None]
    return both.cos().bfloat16(), both.sin().bfloat16()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_models_own_layers(name: str) -> None:
    own, made = fast(name, torch.bfloat16, fused=False, head_dim=32), compiled(name)
    assert layers(made) and all(type(layer.ops) is CompiledOps for layer in layers(made))
    expected, got = logits(own), logits(made)
    assert (expected - got).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.each_value
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 10.0, 3000.0])
def test_compiled_operators_give_the_numbers_of_the_plain_ones(name: str, scale: float) -> None:
    """To a few roundings of bfloat16, small activations and such as overflow an exponential."""
    layer = layers(compiled(name))[0]
    own, made = layer.plain, layer.ops
    hidden, attended = numbers(1, 11, 32, scale=scale), numbers(1, 11, own.heads * own.size, seed=1, scale=scale)
    with torch.inference_mode():
        pairs = [
            *zip(own.project_qkv_rope(hidden, rope(11, 32)), made.project_qkv_rope(hidden, rope(11, 32)), strict=True)
        ]
        pairs.append((own.residual_mlp(hidden, attended), made.residual_mlp(hidden, attended)))
    for expected, got in pairs:
        assert expected.shape == got.shape
        assert (expected.float() - got.float()).abs().max() <= 0.02 * expected.float().abs().max()
    assert not torch.equal(pairs[2][0], hidden)  # a layer does something


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_token_gets_the_same_bits_whatever_tokens_are_beside_it(name: str) -> None:
    made = layers(compiled(name))[0].ops
    hidden, attended = numbers(1, 40, 32), numbers(1, 40, made.heads * 32, seed=1)
    cos, sin = rope(40, 32)
    with torch.inference_mode():
        heads, left = made.project_qkv_rope(hidden, (cos, sin))[0], made.residual_mlp(hidden, attended)
        for first, last in ((0, 1), (7, 8), (3, 11), (5, 25)):
            some = slice(first, last)
            assert torch.equal(
                made.project_qkv_rope(hidden[:, some], (cos[:, some], sin[:, some]))[0], heads[:, :, some]
            )
            assert torch.equal(made.residual_mlp(hidden[:, some], attended[:, some]), left[:, some])
            as_rows = made.residual_mlp(hidden[0, some, None], attended[0, some, None])
            assert torch.equal(as_rows[:, 0], left[0, some])


def test_the_activation_is_recognised_by_what_it_computes() -> None:
    assert kernel_activation(layers(compiled("llama"))[0].plain) == SILU
    assert kernel_activation(layers(compiled("gemma3"))[0].plain) == GELU


def test_other_layers_keep_their_operators() -> None:
    assert all(type(layer.ops) is LayerOps for layer in layers(fast("llama", torch.bfloat16)))  # heads of 8
    assert all(type(layer.ops) is LayerOps for layer in layers(fast("llama", torch.float32, head_dim=32)))
    ops = layers(compiled("llama"))[0].plain
    ops.act = torch.nn.ReLU()
    assert isinstance(kernel_activation(ops), str)


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledOps, "residual_mlp", lambda self, hidden, attended: torch.zeros_like(hidden))
    backend = compiled("llama")
    assert layers(backend) and all(type(layer.ops) is LayerOps for layer in layers(backend))
    monkeypatch.undo()
    expected = logits(fast("llama", torch.bfloat16, fused=False, head_dim=32))
    assert (expected - logits(backend)).abs().max() <= 0.1 * expected.abs().max()


def test_quantised_layers_are_compiled() -> None:
    model = fresh("llama", dtype=torch.bfloat16, head_dim=32, intermediate_size=64)
    backend = HFBackend(model)
    fuse(model, lambda linear: quantised(linear, "int4"))
    pack(model, partial(quantised, bits="int4"))
    group_queries(backend)
    fuse_layers(backend)
    assert all(type(layer.ops) is CompiledOps for layer in layers(backend))
    plain, made = layers(backend)[0].plain, layers(backend)[0].ops
    for tokens in (1, 20, 100):
        hidden, attended = numbers(1, tokens, 32), numbers(1, tokens, made.heads * 32, seed=1)
        with torch.inference_mode():
            expected, got = (ops.residual_mlp(hidden, attended).float() for ops in (plain, made))
        assert (expected - got).abs().max() <= 0.05 * expected.abs().max()


def reference(heads: Tensor, memory: tuple[Tensor, Tensor], places: list[tuple[int, int]], window: int) -> Tensor:
    """Attention by its definition, float32. heads: [tokens, 4 + 2 * 2, D]; memory: with the new tokens in it."""
    out = torch.empty(len(places), 4, heads.shape[2])
    for i, (slot, position) in enumerate(places):
        seen = slice(max(0, position - window + 1) if window else 0, position + 1)
        for head in range(4):
            keys, values = (part[slot, head // 2, seen].float() for part in memory)
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
    """The same by the kernel, which also writes the memory. tree: where the tokens of branches are written."""
    tokens, size = len(places), heads.shape[2]
    layer: ctypes.Structure
    if heads.dtype == torch.float32:
        library = library or block_kernels()
        none, no_norm = BlockLinearStruct(), FloatNormStruct()
        layer = FloatLayerStruct(none, none, none, none, *[no_norm] * 6, 64, 64, 4, 2, size, 0, 1.0, 0.0)
    else:
        library = library or kernels()
        none, no_norm = LinearStruct(), NormStruct()
        layer = LayerStruct(none, none, none, none, *[no_norm] * 6, 64, 64, 4, 2, size, 1.0, 0.0)
    slots, positions = (torch.tensor(part) for part in zip(*places, strict=True))
    own = (positions, None, None, None) if tree is None else (tree.into[1], tree.forks, tree.begins, tree.paths)
    where = CacheStruct(
        *map(address, memory), memory[0].shape[2], window, 1 / 8, *map(address, (slots, positions, *own))
    )
    out, space = (
        heads.new_empty(tokens, 4, size),
        heads.new_empty(library.layer_scratch(ctypes.addressof(layer), tokens, where.length)),
    )
    pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (heads, out, space)]
    library.attend(ctypes.byref(layer), ctypes.byref(where), pointers[0], ctypes.c_int64(tokens), *pointers[1:])
    return out


PLACES = {
    "a prompt": [(1, position) for position in range(100)],
    "one token each": [(slot, 17 * slot + 3) for slot in range(6)],
    "ragged": [(0, 63), (0, 64), (0, 65), (1, 0), (2, 200), (2, 201), (4, 31), (4, 32)],
    "long": [*((0, position) for position in range(1017, 1030)), (1, 511), (1, 512), (2, 1599), (3, 5)],
}
LENGTHS = {"long": 1600}  # of memory, 256 otherwise


@pytest.mark.pairwise
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("window", [0, 7, 50, 700])
@pytest.mark.parametrize("name", PLACES)
def test_attention_is_what_it_is_defined_as(name: str, window: int, size: int) -> None:
    places = PLACES[name]
    heads, length = numbers(len(places), 8, size), LENGTHS.get(name, 256)
    memory = numbers(6, 2, length, size, seed=1), numbers(6, 2, length, size, seed=2)
    found = attention(heads, memory, places, window)
    for i, (slot, position) in enumerate(places):
        assert torch.equal(memory[0][slot, :, position], heads[i, 4:6])
        assert torch.equal(memory[1][slot, :, position], heads[i, 6:])
    expected = reference(heads, memory, places, window)
    assert (found.float() - expected).abs().max() <= 0.01 * expected.abs().max()
    if window == 7 and name == "a prompt":
        assert (found.float() - reference(heads, memory, places, 8)).abs().max() > 0.05 * expected.abs().max()


@pytest.mark.parametrize("window", [0, 50])
def test_attention_gives_the_same_bits_whatever_is_beside_a_token(window: int) -> None:
    places = PLACES["a prompt"]
    heads, memory = numbers(100, 8, 64), (numbers(3, 2, 256, 64, seed=1), numbers(3, 2, 256, 64, seed=2))
    whole = attention(heads, memory, places, window)
    for first, last in ((0, 1), (40, 41), (90, 100), (63, 80)):
        assert torch.equal(attention(heads[first:last], memory, places[first:last], window), whole[first:last])
    longer = tuple(torch.cat([part, numbers(3, 2, 256, 64, seed=5)], 2) for part in memory)
    assert torch.equal(attention(heads[90:], (longer[0], longer[1]), places[90:], window), whole[90:])


both_types = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])


def long_texts(dtype: torch.dtype) -> tuple[Tensor, tuple[Tensor, Tensor], list[tuple[int, int]]]:
    """Heads, memory and places of a few tokens of one text, across a multiple of 512, and one of each of three more."""
    places = [*((0, position) for position in range(1017, 1030)), (1, 511), (2, 1599), (3, 5)]
    memory = numbers(4, 2, 1600, 64, seed=1).to(dtype), numbers(4, 2, 1600, 64, seed=2).to(dtype)
    return numbers(len(places), 8, 64).to(dtype), memory, places


def depends_on_threads(dtype: torch.dtype, window: int, library: Any = None) -> list[tuple[int, int]]:
    """The numbers of threads, and tokens at a time, that give other bits than one token at a time by one thread."""
    heads, memory, places = long_texts(dtype)

    def found(width: int) -> Tensor:
        parts = [slice(first, first + width) for first in range(0, len(places), width)]
        return torch.cat([attention(heads[part], memory, places[part], window, library=library) for part in parts])

    torch.set_num_threads(1)
    found(len(places))  # all are in the memory from now on
    expected, differs = found(1), []
    for threads in (1, 2, 3, 5, 8, 16, 33):
        torch.set_num_threads(threads)
        differs += [(threads, width) for width in (1, 2, 5, len(places)) if not torch.equal(found(width), expected)]
    return differs


@both_types
@pytest.mark.parametrize("window", [0, 600])
def test_attention_over_long_texts_gives_the_same_bits_however_many_threads_share_it(
    window: int, dtype: torch.dtype
) -> None:
    assert depends_on_threads(dtype, window) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux" or shutil.which("gcc") is None, reason="needs gcc and its OpenMP")
def test_stretches_that_depend_on_the_threads_would_be_noticed(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("window", [0, 7, 50])
@pytest.mark.parametrize("base", [30, 63, 97, 1021])
def test_a_branch_gets_the_bits_of_a_row_of_its_own(base: int, window: int) -> None:
    """Of a tree every path, written one after the other into a slot of its own, is computed again."""
    parents = (-1, 0, 1, 2, 1, 4, 5, 4, -1, 8)  # a chain of four, a branch of its second with one of its own, another
    segments = segments_of(0, base - 2, base, parents)
    memory = (numbers(2, 2, base + 64, 64, seed=1), numbers(2, 2, base + 64, 64, seed=2))
    for part in memory:
        part[1, :, :base] = part[0, :, :base]
    tree, heads = tree_rows(segments, 2 + len(parents), torch.device("cpu")), numbers(2 + len(parents), 8, 64)
    positions = [base - 2, base - 1, *(base + depth for depth in depths(parents))]
    found = attention(heads, memory, [(0, position) for position in positions], window, tree)
    for node in range(len(parents)):
        path = [0, 1, *(2 + n for n in path_to(parents, node))]
        places = [(1, base - 2 + i) for i in range(len(path))]
        assert torch.equal(attention(heads[path], memory, places, window)[-1], found[2 + node])
    without = replace(tree, paths=tree.paths + 1)
    wrong = attention(heads, memory, [(0, position) for position in positions], window, without)
    assert not torch.equal(wrong[6:], found[6:]) and torch.equal(wrong[:6], found[:6])


def test_what_an_earlier_text_left_behind_a_token_does_not_reach_it() -> None:
    places = PLACES["ragged"]
    heads, clean = numbers(len(places), 8, 64), (numbers(6, 2, 256, 64, seed=1), numbers(6, 2, 256, 64, seed=2))
    left = tuple(part.clone() for part in clean)
    for slot, end in ((0, 66), (1, 1), (2, 202), (4, 33)):
        for part in left:
            part[slot, :, end:] = float("nan")
    assert torch.equal(attention(heads, (left[0], left[1]), places, 0), attention(heads, clean, places, 0))


@pytest.mark.pairwise
@both_types
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("window", "at"), [(0, 65), (0, 90), (7, 40), (7, 65), (50, 3)])
@pytest.mark.parametrize("before", [0, 470])
def test_a_token_that_is_no_number_reaches_those_that_see_it_and_no_others(
    before: int, window: int, at: int, broken: float, dtype: torch.dtype
) -> None:
    places = [(1, before + position) for position in range(100)]
    heads = numbers(100, 8, 64).to(dtype)

    def memory() -> tuple[Tensor, Tensor]:
        return numbers(3, 2, 640, 64, seed=1).to(dtype), numbers(3, 2, 640, 64).to(dtype)

    clean = attention(heads, memory(), places, window)
    heads[at, 4:] = broken
    found = attention(heads, memory(), places, window)
    sees = [at <= i < at + (window or 100) for i in range(100)]
    assert all(torch.equal(found[i], clean[i]) for i in range(100) if not sees[i])
    assert all(not found[i].isfinite().any() for i in range(100) if sees[i])
    alone = attention(heads[:at], memory(), places[:at], window)
    assert torch.equal(alone, clean[:at])


@both_types
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("first", [0, 40])
def test_scores_that_are_no_numbers_give_no_numbers(first: int, broken: float, dtype: torch.dtype) -> None:
    """Not weights that look like any others: a broken model is to be noticed."""
    places = PLACES["a prompt"][first:80]
    heads, memory = numbers(len(places), 8, 64).to(dtype), [numbers(3, 2, 256, 64, seed=s).to(dtype) for s in (1, 2)]
    heads[5, :4, 3] = broken  # of one token's queries; keys and values are numbers
    if broken == float("inf"):
        heads[5, :4, 4] = -broken  # two products of which the sum is none, whatever the keys' signs
        memory[0][..., 3:5] = heads[:, 4:6, 3:5] = 1
    found = attention(heads, (memory[0], memory[1]), places, 0)
    assert found[5].isnan().all() and found[:5].isfinite().all() and found[6:].isfinite().all()


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0])
def test_layers_that_give_something_else_fail_their_trial(broken: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledOps, "whole_layer", lambda self, hidden, *rest: torch.full_like(hidden, broken))
    backend = fast("llama", torch.bfloat16, head_dim=64)
    assert layers(backend) and all(type(layer.ops) is LayerOps for layer in layers(backend))


def test_gelu_by_the_error_function_is_not_taken_for_the_other() -> None:
    ops = layers(compiled("gemma3"))[0].plain
    ops.act = torch.nn.GELU()
    assert isinstance(kernel_activation(ops), str)


@pytest.mark.parametrize("name", NAMES)
def test_whole_layers_give_the_models_own_logits(name: str) -> None:
    own, made = fast(name, torch.bfloat16, fused=False, head_dim=64), fast(name, torch.bfloat16, head_dim=64)
    expected = logits(own)
    assert all(layer.ops.attends for layer in layers(made))
    assert (expected - logits(made)).abs().max() <= 0.05 * expected.abs().max()


def test_a_forward_past_the_reserved_memory_is_refused() -> None:
    backend = fast("llama", torch.bfloat16, head_dim=64)
    backend.reserve(1, 128)
    end = backend.cache.shape[1]
    backend.forward(torch.ones(1, 4, dtype=torch.int64), [end - 4], first_slot=0, logits=False)
    with pytest.raises(SlipstreamError, match=f"position {end + 3}"):
        backend.forward(torch.ones(1, 4, dtype=torch.int64), [end], first_slot=0, logits=False)
