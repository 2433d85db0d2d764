"""Weights in 12 bits each: none is changed, and a token's bits do not depend on its neighbors."""

import ctypes
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.models.cpu import kernel_libraries
from slipstream.models.cpu.kernel_libraries import (
    COMMON_FLAGS,
    SWITCH,
    VARIANTS,
    Recipe,
    bfloat16_recipe,
    built,
    kernels,
    variants_of,
)
from slipstream.models.cpu.packed_linear import CompressedLinear, PackedLinear, compressed_or_packed, pack
from slipstream.models.cpu.processor import NoCompilerError, NoKernelsError, parse
from slipstream.models.notices import warn_slower
from tests.support.markers import needs_kernels, subcases
from tests.support.tiny_models import fast, fresh


def layer(outputs: int, inputs: int, *, bias: bool = False, seed: int = 0) -> nn.Linear:
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(inputs, outputs, bias=bias, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in linear.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.03)
    return linear


def compressed(linear: nn.Linear) -> CompressedLinear:
    return CompressedLinear(linear, kernels())


def tokens(count: int, inputs: int, seed: int = 1) -> Tensor:
    return torch.randn(count, inputs, generator=torch.Generator().manual_seed(seed)).bfloat16()


def weights_of(linear: CompressedLinear) -> Tensor:
    """The weights of a layer, read from its products with the unit vectors."""
    return linear(torch.eye(linear.in_features, dtype=torch.bfloat16)).T


@needs_kernels
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 4), (31, 128), (32, 132), (33, 260), (100, 576), (256, 1000)])
def test_every_weight_is_stored_exactly(outputs: int, inputs: int) -> None:
    linear = layer(outputs, inputs)
    assert torch.equal(weights_of(compressed(linear)), linear.weight)


@needs_kernels
def test_outlying_weights_are_stored_exactly_as_exceptions() -> None:
    linear, odd = layer(70, 264), [1e30, -1e-30, 300.0, 0.0, -(2.0**-126)]
    with torch.no_grad():
        for place, value in enumerate(odd):
            linear.weight[place * 14, place * 65] = value
    compressed_layer = compressed(linear)
    assert compressed_layer.exceptions >= 4 and compressed_layer.is_worth_it
    assert torch.equal(weights_of(compressed_layer), linear.weight)
    linear.weight.data[28, 130] = 7.0  # negative control: one changed weight is seen
    assert not torch.equal(weights_of(compressed_layer), linear.weight)


@needs_kernels
@settings(max_examples=25)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 260), st.booleans())
def test_products_are_those_of_the_layer(outputs: int, quads: int, count: int, bias: bool) -> None:
    linear, x = layer(outputs, 4 * quads, bias=bias), tokens(count, 4 * quads)
    with torch.inference_mode():
        exact = x.double() @ linear.weight.double().T + (linear.bias.double() if bias else 0)
        error = (compressed(linear)(x).double() - exact).abs()
    assert bool((error <= exact.abs() / 256 + 1e-4).all())  # one rounding to bfloat16


@needs_kernels
def test_a_token_gets_the_same_bits_whatever_tokens_are_beside_it() -> None:
    compressed_layer, x = compressed(layer(96, 1028, bias=True)), tokens(300, 1028)
    alone = torch.cat([compressed_layer(x[i : i + 1]) for i in range(300)])
    for width in (2, 3, 8, 9, 10, 11, 12, 13, 20, 247, 248, 249, 300):
        assert torch.equal(torch.cat([compressed_layer(part) for part in x.split(width)]), alone), width


@needs_kernels
def test_onednns_products_in_the_same_threads_are_not_disturbed() -> None:
    """oneDNN uses the tiles of AMX, if there are any, in the same threads."""
    compressed_layer, pytorch_layer, x = compressed(layer(96, 1024)), layer(1024, 1024, seed=1), tokens(64, 1024)
    with torch.inference_mode():
        expected = [(pytorch_layer(part), compressed_layer(part)) for part in (x, x[:5])]
        for _ in range(3):
            for part, (by_pytorch, by_kernels) in zip((x, x[:5]), expected, strict=True):
                assert torch.equal(compressed_layer(part), by_kernels) and torch.equal(pytorch_layer(part), by_pytorch)


@needs_kernels
def test_inputs_of_any_layout_and_shape_are_multiplied() -> None:
    compressed_layer, x = compressed(layer(40, 64)), tokens(12, 128)
    strided = x[:, ::2]
    assert torch.equal(compressed_layer(strided), compressed_layer(strided.contiguous()))
    assert torch.equal(compressed_layer(strided.view(3, 4, 64)), compressed_layer(strided).view(3, 4, 40))
    assert compressed_layer(x[:0, :64]).shape == (0, 40)


@needs_kernels
@pytest.mark.parametrize("x", [torch.zeros(2, 60, dtype=torch.bfloat16), torch.zeros(2, 64)])
def test_inputs_of_another_size_or_kind_are_refused(x: Tensor) -> None:
    with pytest.raises(ValueError, match=r"allowed: bfloat16 \[..., 64\]"):
        compressed(layer(40, 64))(x)


@needs_kernels
def test_a_layer_is_compressed_only_where_that_saves_memory() -> None:
    spread = layer(64, 64)
    with torch.no_grad():  # very different exponents
        spread.weight.copy_(torch.randn(64, 64).sign() * 2.0 ** torch.randint(-100, 100, (64, 64)))
    assert type(compressed_or_packed(layer(64, 64))) is CompressedLinear
    assert type(compressed_or_packed(spread)) is PackedLinear
    assert type(compressed_or_packed(layer(64, 66))) is PackedLinear  # inputs are not a multiple of four
    assert type(compressed_or_packed(layer(64, 64).float())) is PackedLinear


def test_without_kernels_weights_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.models.cpu.packed_linear.kernels", lambda: None)
    assert type(compressed_or_packed(layer(64, 64))) is PackedLinear


@needs_kernels
def test_a_compressed_model_gives_its_own_logits() -> None:
    model = fresh("llama", dtype=torch.bfloat16)
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        expected = model(ids).logits
        pack(model, compressed)
        logits = model(ids).logits
    assert float((logits - expected).abs().max()) < 0.05 * float(expected.abs().max())


CPUINFO = "flags\t\t: fpu avx2 fma f16c " + " ".join(VARIANTS["avx512bf16"])
PLAIN = bfloat16_recipe("plain")


@subcases(
    "description, wanted, variant",
    [
        (CPUINFO, None, "avx512bf16"),
        (CPUINFO, "avx2", "avx2"),
        (CPUINFO.replace("avx512_bf16", ""), None, "avx512"),
        (CPUINFO, "avx512", "avx512bf16"),
        (CPUINFO.replace("avx512_vnni", ""), None, "avx2"),
        (CPUINFO + " avx_vnni", "avxvnni", "avx2"),
        ("Features : fp asimd asimddp", None, "neon"),
        (CPUINFO + " amx_tile amx_int8 amx_bf16", None, "amx"),
        (CPUINFO + " amx_tile amx_int8 amx_bf16", "avx512", "avx512bf16"),
        (CPUINFO + " amx_tile amx_int8", None, "avx512bf16"),
        (CPUINFO, "plain", "plain"),
    ],
)
def test_the_best_variant_is_chosen(description: str, wanted: str | None, variant: str) -> None:
    assert variants_of(parse(description), wanted)[0] == variant


@pytest.mark.parametrize(
    ("description", "reason"),
    [("", "AVX2, FMA and F16C"), ("flags: fpu avx512f avx512bw", "AVX2")],
)
def test_unsupported_processors_are_refused_with_what_they_lack(description: str, reason: str) -> None:
    with pytest.raises(NoKernelsError, match=reason):
        variants_of(parse(description), None)


def test_without_a_compiler_the_reason_names_it(tmp_path: Path) -> None:
    with pytest.raises(NoCompilerError, match=r"no C compiler found \(no-such-compiler\)"):
        built(tmp_path, {"CC": "no-such-compiler"}, PLAIN)


def test_without_a_compiler_one_warning_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(recipe: Recipe) -> None:
        raise NoCompilerError("no C compiler found (gcc or cc)")

    warn_slower.cache_clear()
    caplog.set_level("INFO", "slipstream")
    monkeypatch.setattr(kernel_libraries, "loaded", none)
    monkeypatch.setattr(kernel_libraries, "COMPILERS", {sys.platform: "get gcc"})
    assert kernel_libraries.kernels_for.__wrapped__(None) is None
    (line,) = [record.getMessage() for record in caplog.records]
    remedy = "install one (get gcc) or a Slipstream wheel with prebuilt kernels"
    assert line.endswith(f"no C compiler found (gcc or cc); {remedy}")


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    """Two short C files instead of the kernels, which take seconds to compile."""
    sources = tuple(tmp_path / f"{name}.c" for name in ("one", "two"))
    for number, source in enumerate(sources, 1):
        source.write_text(f"int {source.stem}(void) {{ return {number}; }}\n")
    return Recipe("short", sources, COMMON_FLAGS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of compiled libraries."""
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    return path


@needs_kernels
def test_a_compiler_may_have_options(folder: Path, recipe: Recipe) -> None:
    libraries = [built(folder, {"CC": compiler}, recipe) for compiler in ("gcc -g0", "gcc")]
    assert libraries[0] != libraries[1]
    assert all((library.one(), library.two()) == (1, 2) for library in map(ctypes.CDLL, map(str, libraries)))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(folder: Path, tmp_path: Path) -> None:
    compiler = tmp_path / "broken"
    compiler.write_text("#!/bin/sh\necho 'cannot compile this' >&2\nexit 3\n")
    compiler.chmod(0o755)
    with pytest.raises(NoKernelsError, match="broken failed: cannot compile this"):
        built(folder, {"CC": str(compiler)}, PLAIN)
    assert not list(folder.iterdir())


@needs_kernels
def test_the_library_is_compiled_once(folder: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    library = built(folder, {}, recipe)
    monkeypatch.setattr(kernel_libraries, "_run", lambda command: pytest.fail("compiled again"))
    assert built(folder, {}, recipe) == library and list(folder.iterdir()) == [library]
    with pytest.raises(pytest.fail.Exception):
        built(folder, {}, replace(recipe, flags=(*recipe.flags, "-g")))
    recipe.sources[1].write_text("int two(void) { return 3; }\n")
    with pytest.raises(pytest.fail.Exception):
        built(folder, {}, recipe)


def test_without_kernels_a_warning_says_why_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    warn_slower.cache_clear()
    caplog.set_level("INFO", "slipstream")
    monkeypatch.setattr(kernel_libraries, "processor", lambda: parse("flags: fpu"))
    for _ in range(2):
        assert kernel_libraries.kernels_for.__wrapped__(None) is None
    (reason,) = [record for record in caplog.records if "PyTorch's kernels are used" in record.message]
    assert reason.levelname == "WARNING" and "a processor with AVX2" in reason.getMessage()


def test_models_that_need_no_kernels_cause_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    warn_slower.cache_clear()
    fast("llama", torch.float32)
    assert "kernels" not in caplog.text


def test_kernels_are_switched_off_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "off")
    assert kernels() is None and type(compressed_or_packed(layer(64, 64))) is PackedLinear
    monkeypatch.setenv(SWITCH, "maybe")
    with pytest.raises(UsageError, match="SLIPSTREAM_KERNELS='maybe'; allowed: 'on' or 'off'"):
        kernels()
