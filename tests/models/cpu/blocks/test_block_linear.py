"""Blocks of GGUF files: weights equal those of the gguf package, products those of float64, and bits at all widths."""

from __future__ import annotations

import ctypes
import shutil

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import BlockLinear
from slipstream.models.cpu.kernel_libraries import block_recipe, loaded
from slipstream.models.cpu.processor import FORCED_ONLY, NEEDED, NoKernelsError, Processor, isas_of, processor
from slipstream.models.cpu.structs import BY_NAME, FORMATS, BlockFormat
from tests.support.gguf_files import HALVES, SCALE_BYTES, dequantized, part_of, random_blocks
from tests.support.markers import mostly_exhaustive

pytest.importorskip("gguf")
HERE = [name for name, flags in NEEDED.items() if set(flags) <= processor().flags]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None or HERE == ["plain"], reason="needs a C compiler and AVX2")
LIBRARY = loaded(block_recipe(HERE[0])) if shutil.which("cc") and HERE != ["plain"] else None
over_formats = pytest.mark.parametrize("block", FORMATS, ids=lambda block: block.name)


TOKENS = torch.randn(64, 512, generator=torch.Generator().manual_seed(3)) * 5


def inputs_of(block: BlockFormat) -> int:
    return 3 * block.size if block.size > 32 else 160


@over_formats
@settings(max_examples=12)
@given(seed=st.integers(0, 1 << 30), rows=st.integers(1, 40), scale=st.sampled_from([1e-7, 0.01, 900.0]))
def test_weights_equal_those_of_the_file_to_the_bit(block: BlockFormat, seed: int, rows: int, scale: float) -> None:
    raw = random_blocks(block, rows, inputs_of(block), seed, scale)
    weights = part_of(block, raw, inputs_of(block), LIBRARY).rows(torch.arange(rows))
    assert torch.equal(weights, dequantized(block, raw))


def equal(one: Tensor, other: Tensor) -> bool:
    """True if all numbers are the same, NaN included."""
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@over_formats
@settings(max_examples=4)
@given(seed=st.integers(0, 1 << 30))
def test_blocks_of_any_bytes_are_unpacked_as_by_the_gguf_package(block: BlockFormat, seed: int) -> None:
    """Scales that are infinite or NaN, denormal ones and unused codes included."""
    raw = numpy.random.default_rng(seed).integers(0, 256, (300, 2 * block.bytes), dtype=numpy.uint8)
    part = part_of(block, raw, 2 * block.size, LIBRARY)
    weights = part.rows(torch.arange(300))
    assert equal(weights, dequantized(block, raw))
    linear, x = BlockLinear([part], None, "int8"), TOKENS[:9, : 2 * block.size]
    whole = linear(x)
    assert equal(whole, torch.cat([linear(token) for token in x.split(1)]))
    if block.name != "MXFP4":  # its largest weights exceed float32, while their products may not
        assert not (whole.isfinite() & ~weights.isfinite().all(1)).any()


@pytest.mark.parametrize("name", SCALE_BYTES)
def test_every_byte_of_scale_is_that_of_the_gguf_package(name: str) -> None:
    block = BY_NAME[name]
    raw = random_blocks(block, 256, block.size, seed=6)
    raw[:, : SCALE_BYTES[name][0]] = numpy.arange(256)[:, None]
    weights = part_of(block, raw, block.size, LIBRARY).rows(torch.arange(256))
    assert equal(weights, dequantized(block, raw)) and len(weights.abs().amax(1).unique()) > 120


@pytest.mark.pairwise
@over_formats
@pytest.mark.parametrize("byte", [0x00, 0xFF, 0x80, 0x7F])
@pytest.mark.parametrize("half", [0.0, -0.0, 65504.0, -65504.0, 6e-8])
def test_weights_of_extreme_blocks_equal_those_of_the_file(block: BlockFormat, byte: int, half: float) -> None:
    raw = numpy.full((17, 2, block.bytes), byte, numpy.uint8)
    if block.name not in SCALE_BYTES:
        offset, count = HALVES.get(block.name, (0, 1))
        raw[..., offset : offset + 2 * count] = numpy.full((17, 2, count), half, numpy.float16).view(numpy.uint8)
    flat = raw.reshape(17, -1)
    weights = part_of(block, flat, 2 * block.size, LIBRARY).rows(torch.arange(17))
    assert torch.equal(weights, dequantized(block, flat))


@over_formats
def test_a_scale_of_the_neighboring_block_is_noticed(block: BlockFormat) -> None:
    raw = random_blocks(block, 16, inputs_of(block), seed=1)
    wrong = raw.reshape(16, -1, block.bytes).copy()
    offset, count = HALVES.get(block.name, (0, 1))
    end = SCALE_BYTES[block.name][0] if block.name in SCALE_BYTES else offset + 2 * count
    wrong[:, :-1, offset:end] = wrong[:, 1:, offset:end]
    weights = part_of(block, wrong.reshape(16, -1), inputs_of(block), LIBRARY).rows(torch.arange(16))
    assert not torch.allclose(weights, dequantized(block, raw), rtol=0.05)


def rounded(x: Tensor, largest: int) -> Tensor:
    """Activations as the kernels round them, float64."""
    groups = x.unflatten(-1, (-1, 32))
    magnitude = groups.abs().amax(-1, keepdim=True)
    scale = torch.where(magnitude > 0, largest / magnitude, torch.zeros_like(magnitude))
    return ((groups * scale).round().double() * (magnitude / largest).double()).flatten(-2)


@pytest.mark.each_value
@over_formats
@pytest.mark.parametrize(("activations", "largest"), [("int8", 127), ("int15", 16319)])
def test_products_are_those_of_the_rounded_activations(block: BlockFormat, activations: str, largest: int) -> None:
    inputs, rows = inputs_of(block), 37
    raw = random_blocks(block, rows, inputs, seed=2)
    bias = torch.randn(rows, generator=torch.Generator().manual_seed(1))
    linear = BlockLinear([part_of(block, raw, inputs, LIBRARY)], bias, activations)
    x = torch.randn(2, 9, inputs, generator=torch.Generator().manual_seed(2))
    x[0, 3, :32] = 0
    weight = dequantized(block, raw).double()
    expected = rounded(x, largest) @ weight.T + bias.double()
    error = (linear(x).double() - expected).abs().max()
    assert error <= 1e-5 * expected.abs().max()
    assert (x.double() @ weight.T + bias.double() - expected).abs().max() > error  # the rounding makes a difference


@pytest.mark.parametrize("change", ["half", "bfloat16", "double"])
@pytest.mark.parametrize("outputs", [48, 32])
def test_a_bias_stays_where_the_kernels_read_it_when_the_model_changes_its_type(change: str, outputs: int) -> None:
    block = FORMATS[0]
    part = part_of(block, random_blocks(block, 48, inputs_of(block), seed=4), inputs_of(block), LIBRARY)
    linear, x = BlockLinear([part], torch.full((48,), 5.0), "int8"), torch.zeros(1, inputs_of(block))
    linear = linear if outputs == 48 else linear.first(outputs)
    assert torch.equal(linear(x), torch.full((1, outputs), 5.0))
    getattr(torch.nn.Sequential(linear), change)()
    reused = [torch.full((48,), 3e29) for _ in range(100)]  # these would take over freed memory
    assert torch.equal(linear(x), torch.full((1, outputs), 5.0)) and len(reused) == 100


def mixed(isa: str, activations: str) -> BlockLinear:
    """A layer of all formats, whose outputs fill no whole number of panels."""
    raws = [random_blocks(block, 21 + i, 512, seed=i) for i, block in enumerate(FORMATS)]
    parts = [part_of(block, raw, 512, loaded(block_recipe(isa))) for block, raw in zip(FORMATS, raws, strict=True)]
    return BlockLinear(parts, None, activations)


@pytest.mark.parametrize("activations", ["int8", "int15"])
def test_a_token_gets_the_same_bits_at_every_width(activations: str) -> None:
    linear = mixed(HERE[0], activations)
    whole = linear(TOKENS)
    for width in (*range(1, 33), 47, 64):
        assert torch.equal(linear(TOKENS[:width]), whole[:width]), width
        assert torch.equal(linear(TOKENS[-width:].view(1, width, -1))[0], whole[-width:]), width
    assert not torch.equal(whole[0], whole[1])


@pytest.mark.parametrize(("activations", "largest"), [("int8", 127), ("int15", 16319)])
@pytest.mark.parametrize("tokens", [9, 17])
def test_panels_that_fill_no_whole_tile_give_the_same_products(activations: str, largest: int, tokens: int) -> None:
    """67 panels, taken 4 at a time (3 for one token), and 33, taken 2 at a time; the last panel is not full."""
    sizes = {"Q8_0": 66 * 16 + 5, "Q4_K": 32 * 16 + 9}
    raws = {BY_NAME[name]: random_blocks(BY_NAME[name], rows, 1024, seed=rows) for name, rows in sizes.items()}
    linear = BlockLinear([part_of(block, raw, 1024, LIBRARY) for block, raw in raws.items()], None, activations)
    x = torch.randn(tokens, 1024, generator=torch.Generator().manual_seed(6))
    whole = linear(x)
    assert torch.equal(whole, torch.cat([linear(token) for token in x.split(1)]))
    expected = rounded(x, largest) @ torch.cat([dequantized(*item) for item in raws.items()]).double().T
    tolerance = 1e-5 * expected.abs().max()
    assert ((whole.double() - expected).abs() <= tolerance).all()
    assert (
        ((whole.double() - expected.roll(16, 1)).abs() > tolerance).any(0).all()
    )  # negative control: shifted by a panel


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_infinity_stay_within_their_token(number: float) -> None:
    linear, x = mixed(HERE[0], "int8"), TOKENS[:6].clone()
    x[2, 100] = number
    products = linear(x)
    assert products[2].isnan().all() and torch.equal(products[[0, 1, 3, 4, 5]], linear(TOKENS[:6])[[0, 1, 3, 4, 5]])


@pytest.mark.parametrize("activations", ["int8", "int15"])
def test_tiny_and_large_activations_are_scaled_correctly(activations: str) -> None:
    linear = mixed(HERE[0], activations)
    whole = linear(TOKENS)
    assert torch.allclose(linear(TOKENS * 2.0**80) * 2.0**-80, whole, rtol=1e-6)
    assert not linear(TOKENS * 1e-38).isnan().any() and not linear(torch.zeros(2, 512)).any()


@pytest.mark.slow  # compiles kernels
@pytest.mark.parametrize("isa", mostly_exhaustive(HERE, HERE[0]))
@pytest.mark.parametrize("activations", ["int8", "int15"])
def test_all_instruction_sets_give_the_same_bits(activations: str, isa: str) -> None:
    assert torch.equal(mixed(isa, activations)(TOKENS[:13]), mixed("plain", activations)(TOKENS[:13]))


def test_first_and_rows_select_outputs_of_an_output_layer() -> None:
    raw = random_blocks(BY_NAME["Q6_K"], 100, 256, seed=5)
    linear = BlockLinear([part_of(BY_NAME["Q6_K"], raw, 256, LIBRARY)], torch.randn(100), "int8")
    x = torch.randn(3, 256)
    assert torch.equal(linear.first(41)(x), linear(x)[:, :41])
    assert torch.equal(linear.rows(torch.tensor([99, 0])), dequantized(BY_NAME["Q6_K"], raw)[[99, 0]])
    with pytest.raises(IndexError, match="outputs from 0 to 100; allowed: 0 to 99"):
        linear.rows(torch.tensor([0, 100]))
    with pytest.raises(ValueError, match=r"torch.float64 \[..., 256\]; allowed: float32"):
        linear(x.double())


def test_the_best_instruction_set_is_chosen_unless_another_is_named() -> None:
    names = {isa: Processor("", frozenset(flags)) for isa, flags in NEEDED.items()}
    assert all(isas_of(names[isa], None)[0] == isa for isa in NEEDED if isa not in FORCED_ONLY)
    assert isas_of(names["avx2"], "plain")[0] == "plain"
    with pytest.raises(NoKernelsError, match="AVX2"):
        isas_of(names["plain"], None)
    with pytest.raises(UsageError, match=r"SLIPSTREAM_ISA='avx512': this processor lacks them; allowed here: avx2, pl"):
        isas_of(names["avx2"], "avx512")
    with pytest.raises(UsageError, match="SLIPSTREAM_ISA='mmx': no such instructions"):
        isas_of(names["avx2"], "mmx")


@pytest.mark.parametrize("kind, is_rounded", [("F16", False), ("F32", False), ("BF16", False), ("Q8_0", True)])
def test_activations_are_rounded_only_for_codes(kind: str, is_rounded: bool) -> None:
    block, x = BY_NAME[kind], TOKENS[:5, :64].contiguous()
    raw = random_blocks(block, 32, 64, 3) if is_rounded else numpy.zeros((32, 64 * block.bytes), numpy.uint8)
    layer = BlockLinear([part_of(block, raw, 64, LIBRARY)], None, "int8")
    assert LIBRARY is not None
    space = torch.full((LIBRARY.activation_bytes(64, 5, 1),), 0xA5, dtype=torch.uint8)
    out = torch.empty(5, 32)
    LIBRARY.multiply_blocks(ctypes.byref(layer.weights), x.data_ptr(), 5, 1, out.data_ptr(), space.data_ptr())
    assert bool((space == 0xA5).all()) is not is_rounded
