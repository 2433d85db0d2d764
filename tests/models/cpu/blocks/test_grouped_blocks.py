"""Panels of quantized checkpoints: weights equal those of numpy, products those of float64, and bits at all widths."""

from __future__ import annotations

import shutil

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from slipstream.models.cpu.block_linear import BlockLinear, BlockPart
from slipstream.models.cpu.grouped_blocks import GroupedMatrix, NotInBlocksError, number_format
from slipstream.models.cpu.kernel_libraries import NEEDED, block_recipe, loaded
from slipstream.models.cpu.processor import processor

HERE = [name for name, flags in NEEDED.items() if set(flags) <= processor().flags]
pytestmark = pytest.mark.skipif(shutil.which("cc") is None or HERE == ["plain"], reason="needs a C compiler and AVX2")
LIBRARY = loaded(block_recipe(HERE[0])) if shutil.which("cc") and HERE != ["plain"] else None
KINDS = ("half", "symmetric", "wide", "minima")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)


def random_matrix(kind: str, outputs: int, inputs: int, group: int, seed: int, size: float = 0.01) -> GroupedMatrix:
    """half: float16 scales, and zero points; symmetric: no zero points; wide: scales beyond float16; minima: those in
    floating point."""
    generator = numpy.random.default_rng(seed)
    codes = generator.integers(0, 16, (outputs, inputs), dtype=numpy.uint8)
    groups = -(-inputs // group)
    scales = (generator.standard_normal((outputs, groups)) * size).astype(numpy.float16).astype(numpy.float32)
    zeros = generator.integers(0, 17, (outputs, groups), dtype=numpy.int32)
    minima = None
    if kind in ("wide", "minima"):
        scales = torch.from_numpy(scales * 2.0**-30).bfloat16().float().numpy()
    if kind in ("symmetric", "minima"):
        zeros = numpy.full_like(zeros, 8)
    if kind == "minima":
        minima = torch.from_numpy(generator.standard_normal((outputs, groups)) * size * 2.0**-28).bfloat16().float()
    return GroupedMatrix(4, *map(torch.from_numpy, (codes, scales, zeros)), minima, group)


def expected(matrix: GroupedMatrix) -> Tensor:
    """The weights by their formula, one by one, float64."""
    weights = numpy.empty(matrix.codes.shape)
    for o, row in enumerate(matrix.codes.tolist()):
        for i, code in enumerate(row):
            g = i // matrix.group
            weights[o, i] = (code - int(matrix.zeros[o, g])) * float(matrix.scales[o, g])
            if matrix.minima is not None:
                weights[o, i] += float(matrix.minima[o, g])
    return torch.from_numpy(weights)


def part_of(matrix: GroupedMatrix, library: object = LIBRARY) -> BlockPart:
    block, rows = matrix.in_blocks()
    return BlockPart(block, tuple(matrix.codes.shape), lambda first, last: rows[first:last], library)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=10)
@given(
    seed=st.integers(0, 1 << 30),
    rows=st.integers(1, 35),
    form=st.sampled_from([(96, 32), (128, 64), (256, 128), (160, 160), (160, 128)]),
    size=st.sampled_from([1e-6, 0.01, 900.0]),
)
def test_weights_are_exactly_those_of_the_formula(
    kind: str, seed: int, rows: int, form: tuple[int, int], size: float
) -> None:
    matrix = random_matrix(kind, rows, *form, seed, size)
    weights = part_of(matrix).rows(torch.arange(rows))
    assert torch.equal(weights, expected(matrix).float())
    assert torch.equal(weights, matrix.values())


@pytest.mark.pairwise
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [0, 15])
@pytest.mark.parametrize("scale", [0.0, 65504.0, -65504.0, 2.0**-24, 1.0])
def test_weights_of_extreme_groups_are_those_of_the_formula(kind: str, code: int, scale: float) -> None:
    matrix = random_matrix(kind, 17, 64, 32, seed=1)
    matrix.codes.fill_(code)
    matrix.scales.fill_(scale)
    if kind == "half":
        matrix.zeros.copy_(torch.tensor([0, 16]).expand(17, 2))
    assert torch.equal(part_of(matrix).rows(torch.arange(17)), expected(matrix).float())


@pytest.mark.parametrize("kind", ["half", "wide"])
def test_a_zero_point_off_by_one_and_swapped_codes_are_noticed(kind: str) -> None:
    matrix = random_matrix(kind, 16, 128, 64, seed=2)
    weights = part_of(matrix).rows(torch.arange(16))
    matrix.zeros[3, 1] ^= 1
    assert (weights != expected(matrix).float()).sum() == 64
    matrix.zeros[3, 1] ^= 1
    swapped = matrix.codes.unflatten(1, (-1, 2)).flip(-1).flatten(1)
    assert (part_of(GroupedMatrix(4, swapped, *vars_of(matrix))).rows(torch.arange(16)) != weights).float().mean() > 0.5


def vars_of(matrix: GroupedMatrix) -> tuple[Tensor, Tensor, Tensor | None, int]:
    return matrix.scales, matrix.zeros, matrix.minima, matrix.group


def test_the_format_follows_the_kind_and_group_size() -> None:
    names = {
        (kind, group): random_matrix(kind, 16, 256, group, 3).in_blocks()[0].name
        for kind in KINDS
        for group in (32, 128)
    }
    assert names["symmetric", 32] == "Q4_0" and names["symmetric", 128] == "int4 group 128"
    assert names["half", 32] == names["wide", 32] == names["minima", 32] == "int4 group 32"
    codes = {kind: random_matrix(kind, 16, 256, 128, 3).in_blocks()[0].code for kind in KINDS}
    assert codes["half"] == codes["symmetric"] != codes["wide"] == codes["minima"]
    eight_bits = GroupedMatrix(
        8, *(part for part in (torch.zeros(2, 64).byte(), torch.ones(2, 1), torch.full((2, 1), 128))), None, 64
    )
    assert eight_bits.in_blocks()[0].name == "Q8_0"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scales": torch.full((2, 2), 0.1)}, "more than 20 significant bits"),
        ({"bits": 8}, "8 bits and zero points other than 128"),
        ({"group": 48}, "in groups of 48; computed with: multiples of 32"),
        ({"owners": torch.arange(64) % 2}, "act-order"),
    ],
)
def test_matrices_that_no_block_holds_exactly_are_refused(changes: dict[str, object], message: str) -> None:
    common = {
        "bits": 4,
        "codes": torch.zeros(2, 64).byte(),
        "scales": torch.ones(2, 2),
        "zeros": torch.ones(2, 2).int(),
    }
    with pytest.raises(NotInBlocksError, match=message):
        GroupedMatrix(**{**common, "minima": None, "group": 32, **changes}).in_blocks()  # type: ignore[arg-type]


def numbers_part(dtype: torch.dtype, outputs: int, inputs: int, library: object = LIBRARY) -> tuple[BlockPart, Tensor]:
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(5)).to(dtype)
    raw = weight.view(torch.uint8).numpy()
    return BlockPart(number_format(dtype, inputs), (outputs, inputs), lambda a, b: raw[a:b], library), weight.float()


@pytest.mark.parametrize("dtype", FLOATS)
def test_floating_point_matrices_are_stored_exactly_and_multiplied_unrounded(dtype: torch.dtype) -> None:
    part, weight = numbers_part(dtype, 37, 96)
    assert torch.equal(part.rows(torch.arange(37)), weight)
    x = torch.randn(9, 96, generator=torch.Generator().manual_seed(2))
    exact = x.double() @ weight.T.double()
    assert (BlockLinear([part], None, "int8")(x).double() - exact).abs().max() < 1e-5  # activations are not rounded
    with pytest.raises(NotInBlocksError, match="is of type float64"):
        number_format(torch.float64, 96)
    with pytest.raises(NotInBlocksError, match="has 90 inputs"):
        number_format(dtype, 90)


def mixed(isa: str, activations: str) -> tuple[BlockLinear, Tensor]:
    """A layer of all kinds, whose outputs fill no whole number of panels, and its weights."""
    library = loaded(block_recipe(isa))
    matrices = [random_matrix(kind, 21 + i, 320, group, i) for i, kind in enumerate(KINDS) for group in (32, 160)]
    for matrix in matrices:
        if float(matrix.scales.abs().max()) < 1e-6:  # scaled to the size of the others
            matrix.scales.mul_(2.0**30)
            if matrix.minima is not None:
                matrix.minima.mul_(2.0**30)
            matrix.scales[0, 0] = 2.0**-40
    parts = [part_of(matrix, library) for matrix in matrices]
    parts += [numbers_part(dtype, 19, 320, library)[0] for dtype in FLOATS]
    weights = [expected(matrix) for matrix in matrices] + [numbers_part(dtype, 19, 320)[1].double() for dtype in FLOATS]
    return BlockLinear(parts, None, activations), torch.cat(weights)


TOKENS = torch.randn(17, 320, generator=torch.Generator().manual_seed(3)) * 5


@pytest.mark.parametrize(("activations", "largest"), [("int8", 127), ("int15", 16319)])
def test_products_are_right_and_have_the_same_bits_at_every_width(activations: str, largest: int) -> None:
    linear, weight = mixed(HERE[0], activations)
    whole = linear(TOKENS)
    groups = TOKENS.unflatten(-1, (-1, 32))
    magnitude = groups.abs().amax(-1, keepdim=True)
    rounded = ((groups * (largest / magnitude)).round().double() * (magnitude / largest).double()).flatten(-2)
    num_unrounded = 3 * 19  # the outputs whose activations are not rounded
    exact = torch.cat([rounded @ weight[:-num_unrounded].T, TOKENS.double() @ weight[-num_unrounded:].T], -1)
    scale = exact.abs().amax(0)
    assert ((whole.double() - exact).abs() <= 2e-5 * scale).all()
    assert ((TOKENS.double() @ weight.T - exact).abs() > 1e-5 * scale)[
        :, :-num_unrounded
    ].any()  # the rounding makes a difference
    for width in range(1, 17):
        assert torch.equal(linear(TOKENS[:width]), whole[:width]), width
        assert torch.equal(linear(TOKENS[-width:]), whole[-width:]), width


@pytest.mark.exhaustive  # compiles kernels for all instruction sets
@pytest.mark.parametrize("activations", ["int8", "int15"])
def test_all_instruction_sets_give_the_same_bits(activations: str) -> None:
    expected_bits = mixed("plain", activations)[0](TOKENS[:13])
    assert all(torch.equal(mixed(isa, activations)[0](TOKENS[:13]), expected_bits) for isa in HERE)
