"""What Triton compiles the kernels to, for two generations of GPUs; no GPU is needed.

Run in an environment that also has triton, without its interpreter.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from slipstream.models.cuda.stored_weights import KINDS
from slipstream.models.cuda.triton_layer import (
    CHUNK,
    LARGEST_TILE,
    ROWS,
    STEP,
    TILES,
    TOGETHER,
    Tile,
    has_kernels,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not has_kernels() or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton, not interpreted"
    ),
]

ARCHITECTURES = (80, 90)
PRODUCT = re.compile(
    r"mma\.sync\.aligned\.(m\d+n\d+k\d+)\S*\s*\{\s*(%\w+)[^}]*\},\s*\{[^}]*\},\s*\{[^}]*\},\s*\{\s*(%\w+)"
)
INPUTS = 128  # per step, in bfloat16
SIZES = (
    "inner",
    "outputs",
    "row_size",
    "size",
    "slot_stride",
    "head_stride",
)  # a launch knows these to be multiples of 16
SHARED = 99 << 10  # bytes of shared memory that all GPUs have since Ampere


def compiled(name: str, types: dict[str, str], constants: dict[str, Any], architecture: int, **options: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from slipstream.models.cuda import triton_kernels

    kernel = getattr(triton_kernels, name)
    names = kernel.arg_names
    signature = {argument: "constexpr" if argument in constants else types.get(argument, "i32") for argument in names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, argument in enumerate(names)
        if signature[argument].startswith("*") or (argument in SIZES and signature[argument] == "i32")
    }
    source = ASTSource(
        kernel, signature, {(names.index(constant),): value for constant, value in constants.items()}, aligned
    )
    return triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)


def product(tile: Tile, architecture: int, kind: str = "") -> Any:
    types = dict.fromkeys(("x", "weight", "halves", "bias"), "*bf16") | {"out": "*fp32"}
    if kind:
        types |= {"weight": "*u8", "halves": "*fp16"}
    sizes = {"tiles": tile.tiles, "rows": tile.rows, "columns": tile.columns, "step": INPUTS}
    constants = {"kind": kind, "has_bias": True, "is_even": True, "splits": 4, **sizes}
    stages = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compiled("product", types, constants, architecture, **stages)


def lengths_of_sums(ptx: str) -> list[int]:
    """For each sum of a program's loop, how many instructions add to it in sequence."""
    lengths: dict[str, int] = {}
    for _, result, added_to in PRODUCT.findall(ptx):
        lengths[result] = lengths.pop(added_to, 0) + 1
    return list(lengths.values())


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("tile", [*TILES.values(), LARGEST_TILE])
def test_every_tile_adds_in_the_same_order(tile: Tile, architecture: int) -> None:
    """One instruction adds sixteen inputs at a time to one sum: no other instructions, no partial sums, no atomics."""
    kernel = product(tile, architecture)
    ptx = kernel.asm["ptx"]
    assert {shape for shape, _, _ in PRODUCT.findall(ptx)} == {"m16n8k16"}
    lengths = lengths_of_sums(ptx)
    assert set(lengths) == {INPUTS // 16}
    assert len(lengths) * 16 * 8 * tile.num_warps == tile.tiles * tile.rows * tile.columns
    assert "wgmma" not in ptx and "atom." not in ptx
    assert tile.num_stages * tile.columns * INPUTS <= kernel.metadata.shared <= SHARED  # weights are read ahead


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_are_added_in_the_order_of_numbers_whatever_the_tile(kind: str, architecture: int) -> None:
    for tile in (TILES[16], LARGEST_TILE):
        kernel = product(tile, architecture, kind)
        ptx = kernel.asm["ptx"]
        assert {shape for shape, _, _ in PRODUCT.findall(ptx)} == {"m16n8k16"}
        assert set(lengths_of_sums(ptx)) == {INPUTS // 16}
        assert "wgmma" not in ptx and "atom." not in ptx
        assert kernel.metadata.shared <= SHARED


def test_a_tile_of_more_rows_uses_other_instructions() -> None:
    assert "wgmma" in product(Tile(1, 64, 64, 4, 3), 90).asm["ptx"]


def attention(architecture: int, **mode: bool) -> str:
    """The parts of the compiler's intermediate code that decide in which order attention adds."""
    floats, indices = ("queries", "keys", "values"), ("slots", "starts", "positions", "ancestors")
    types = dict.fromkeys(floats, "*bf16") | dict.fromkeys(indices, "*i64") | {"scale": "fp32"}
    types |= dict.fromkeys(("partial", "leading", "totals"), "*fp32")
    constants = {"has_window": True, "size": 128, "chunk": CHUNK, "rows": ROWS, "step": STEP, **mode}
    kernel = compiled("attend_chunk", types, constants, architecture, num_warps=4, num_stages=3)
    code = re.sub(r"\s*loc\(.*", "", kernel.asm["ttgir"])
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", code, re.M))
    lines = [line for line in code.splitlines() if re.search(r"tt\.dot|tt\.reduce|addf|maxnumf|math\.exp", line)]
    lines = [re.sub(r"%\w+(#\d+)?", "%", line) for line in lines]
    return re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), "\n".join(lines))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_chains_and_branches_attend_in_the_same_order(architecture: int) -> None:
    chains = attention(architecture, before_own=False, is_branch=False)
    assert chains.count("mma") >= 2
    assert attention(architecture, before_own=True, is_branch=False) == chains
    assert attention(architecture, before_own=False, is_branch=True) == chains


FLOATS = ("x", "residual", "summed", "out", "qkv", "cosines", "sines", "queries", "keys", "values", "gate_up")
NUMBERS = ("eps", "offset", "slope", "cubic")
POINTERS = (
    dict.fromkeys(FLOATS, "*bf16")
    | dict.fromkeys(("slots", "starts", "columns"), "*i64")
    | dict.fromkeys(("after_weight", "next_weight", "queries_norm", "keys_norm"), "*bf16")
    | dict.fromkeys(("partial", "leading", "totals"), "*fp32")
    | dict.fromkeys(NUMBERS, "fp32")
)
NORMS = {"has_after": True, "has_residual": True, "has_next": True, "rounds_first": True, "block": 4096, "splits": 4}
OTHERS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "add_norm": ({"x": "*fp32"}, NORMS),
    "rotate_and_cache": ({"qkv": "*fp32"}, {"splits": 4, "has_norms": True, "rounds_first": False, "half": 64}),
    "combine_chunks": ({}, {"chunk": CHUNK, "together": TOGETHER, "size": 128}),
    "gate": ({"gate_up": "*fp32"}, {"splits": 2, "block": 1024}),
    "unpack": ({"codes": "*u8", "halves": "*fp16", "rows": "*i64"}, {"kind": "Q4_K", "group": 16, "block": 256}),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("name", OTHERS)
def test_the_other_kernels_compile_without_atomics(name: str, architecture: int) -> None:
    types, constants = OTHERS[name]
    ptx = compiled(name, POINTERS | types, constants, architecture, num_warps=4, num_stages=3).asm["ptx"]
    assert "atom." not in ptx and ".local" not in ptx
