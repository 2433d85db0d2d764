"""Models that compute with the blocks of their GGUF file: exact weights, texts that no draft changes, bad files."""

from __future__ import annotations

import logging
import random
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import SlipstreamError, UsageError
from slipstream.models.cpu.block_linear import BlockEmbedding, BlockLinear, block_linears
from slipstream.models.cpu.compiled_layers import BlockLayerOps
from slipstream.models.cpu.structs import TYPES
from slipstream.models.decoder.fused_layer import FusedLayer
from slipstream.models.decoder.rotary import RotaryAngles
from slipstream.models.draft_vocabulary import RestrictedHead
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.plain_models import load_model
from slipstream.models.weights.gguf_file import read_header
from tests.support.gguf_files import HALVES, TOKENS, write_model
from tests.support.markers import mostly_exhaustive, needs_avx2
from tests.support.plain_texts import alone_and_together
from tests.support.quantized_files import kl

gguf = pytest.importorskip("gguf")
pytest.importorskip("accelerate")
pytestmark = needs_avx2
MIXED = {"": "Q8_0", "attn_q": "Q4_1", "attn_v": "Q6_K", "ffn_down": "Q4_K", "ffn_up": "Q5_0", "ffn_gate": "Q4_0"}
PROMPTS = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33], list(range(40, 90))]
ARCHITECTURES = (("llama", False), ("llama", True), ("qwen2", False))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """A file of mixed types per architecture, with an output layer of its own or the embedding's."""
    folder = tmp_path_factory.mktemp("gguf")
    for name, tied in ARCHITECTURES:
        write_model(folder / f"{name}-{tied}.gguf", name, MIXED, tie_word_embeddings=tied)
    return {(name, tied): folder / f"{name}-{tied}.gguf" for name, tied in ARCHITECTURES}


def logits(loaded: Loaded, ids: torch.Tensor) -> torch.Tensor:
    loaded.backend.reserve(1, 256)
    return loaded.backend.forward(ids, [0], first_slot=0, logits=True)


@pytest.mark.parametrize("form", ARCHITECTURES)
def test_logits_are_those_of_the_files_weights(form: tuple[str, bool], files: dict[tuple[str, bool], Path]) -> None:
    file, ids = str(files[form]), torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
    _, reference = load_model(file, LoadOptions("float32"))
    with torch.inference_mode():
        expected = reference(input_ids=ids, use_cache=False).logits
    error_int15, error_int8 = (
        kl(expected, logits(load(file, LoadOptions(activations=name)), ids)) for name in ("int15", "int8")
    )
    assert error_int15 < 1e-6 and error_int15 < error_int8 / 10 < 0.01
    assert kl(expected, expected.roll(1, 1)) > 0.01  # negative control: logits of other tokens are far off


def test_logits_are_right_with_head_norms_windows_and_scaled_embeddings(tmp_path: Path) -> None:
    """Checked with Gemma 3."""
    kinds = {"": "Q8_0", "ffn_down": "Q5_1", "attn_k": "Q4_1"}
    shape = {"tie_word_embeddings": True, "num_hidden_layers": 3, "query_pre_attn_scalar": 64}
    reference = write_model(tmp_path / "gemma.gguf", "gemma3", kinds, **shape)
    loaded = load(str(tmp_path / "gemma.gguf"), LoadOptions(activations="int15"))
    assert loaded.backend.shape_independent  # whole layers are compiled
    ids = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
    with torch.inference_mode():
        expected = reference(input_ids=ids, use_cache=False).logits
    assert kl(expected, logits(loaded, ids)) < 1e-6 < kl(expected, expected.roll(1, 1))


OTHERS = (
    {"": "Q8_0", "0.attn_v": "F16", "0.ffn_up": "F32", "1.ffn_gate": "BF16", "1.attn_k": "BF16"},
    {"": "MXFP4", "0.attn_v": "IQ4_NL", "0.ffn_up": "IQ4_XS", "1.ffn_up": "Q3_K", "1.ffn_down": "Q2_K"},
    {"": "IQ3_S", "0.attn_v": "IQ3_XXS", "0.ffn_up": "NVFP4", "1.ffn_up": "TQ1_0", "1.ffn_down": "TQ2_0"},
)


@pytest.mark.parametrize("kinds", OTHERS, ids=lambda kinds: "+".join(kinds.values()))
def test_other_types_and_matrices_in_floating_point_are_computed_as_they_are(
    kinds: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, ids = str(tmp_path / "model.gguf"), torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
    write_model(Path(file), "llama", kinds)
    _, reference = load_model(file, LoadOptions("float32"))
    with torch.inference_mode():
        expected = reference(input_ids=ids, use_cache=False).logits
    loaded = load(file, LoadOptions(activations="int15"))
    assert loaded.backend.shape_independent and "unpacked" not in caplog.text
    assert loaded.arithmetic == f"{'+'.join(sorted({*kinds.values()}))} blocks, int15 activations"
    assert kl(expected, logits(loaded, ids)) < 1e-6 < kl(expected, expected.roll(1, 1))


def test_a_file_of_bfloat16_matrices_is_unpacked_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_model(tmp_path / "plain.gguf", kinds="BF16")
    loaded = load(str(tmp_path / "plain.gguf"), LoadOptions())
    assert not block_linears(loaded.model) and loaded.model.dtype == torch.bfloat16 and "rounds" not in caplog.text


@pytest.mark.parametrize("kind", ["MXFP4", "IQ4_XS", "Q3_K", "F16"])
def test_damaged_weights_give_some_text_or_one_line(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "damaged.gguf"
    write_model(file, kinds={"": "Q8_0", "ffn_down": kind})
    down = read_header(file).tensors["blk.0.ffn_down.weight"]
    content, damage = bytearray(file.read_bytes()), random.Random(7)
    for _ in range(200):
        content[down.start + damage.randrange(down.num_bytes)] = damage.randrange(256)
    file.write_bytes(content)
    try:
        decoder = SpeculativeDecoder(str(file), drafter="none", reproducible=False)
        assert len(decoder.generate(PROMPTS[0], SamplingParams(max_tokens=4, ignore_eos=True)).token_ids) == 4
    except SlipstreamError as error:
        assert "\n" not in str(error)


def test_whole_layers_are_compiled_and_every_weight_is_a_block(files: dict[tuple[str, bool], Path]) -> None:
    loaded = load(str(files["llama", True]), LoadOptions())
    layers = [module.__dict__["forward"] for module in loaded.model.modules() if "forward" in module.__dict__]
    assert len(layers) == 2 and all(isinstance(f, FusedLayer) and isinstance(f.ops, BlockLayerOps) for f in layers)
    assert loaded.backend.shape_independent and loaded.backend.ragged
    model, linears = loaded.model, block_linears(loaded.model)
    assert not [module for module in model.modules() if type(module) in (torch.nn.Linear, torch.nn.Embedding)]
    assert len(linears) == 2 * 4 + 1 and isinstance(model.get_input_embeddings(), BlockEmbedding)
    assert model.get_output_embeddings().parts[0] is model.get_input_embeddings().part  # tied, so stored once
    assert loaded.arithmetic == "Q4_0+Q4_1+Q4_K+Q5_0+Q6_K+Q8_0 blocks, int8 activations"


def test_keys_and_values_take_two_bytes_a_number(files: dict[tuple[str, bool], Path]) -> None:
    loaded: Any = load(str(files["llama", True]), LoadOptions())
    logits(loaded, torch.ones(1, 40, dtype=torch.int64))
    config, cache = loaded.model.config, loaded.backend.cache
    slots, positions = cache.held
    numbers = slots * positions * config.num_key_value_heads * config.head_dim
    assert positions >= 40 and {keys.dtype for layer in cache.layers for keys in (layer.keys, layer.values)} == {
        torch.float16
    }
    assert [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers] == [2 * 2 * numbers] * 2


@pytest.mark.slow
@pytest.mark.parametrize("compiles_layers", [True, False])  # some sizes of heads are not taken
def test_logits_that_overflow_are_refused_whatever_computes_them(
    compiles_layers: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiles_layers:
        monkeypatch.setattr("slipstream.models.planned_models.use_compiled_ops", lambda *arguments: None)
    file = tmp_path / "large.gguf"
    write_model(file, num_hidden_layers=1)
    assert (load(str(file), LoadOptions()).backend.stack is not None) == compiles_layers
    entry, content = read_header(file).tensors["output_norm.weight"], bytearray(file.read_bytes())
    content[entry.start : entry.start + 4] = struct.pack("<f", 3e38)
    file.write_bytes(content)
    with pytest.raises(SlipstreamError, match="logits that are not finite"):
        load(str(file), LoadOptions())


@pytest.mark.slow
@pytest.mark.parametrize("activations", mostly_exhaustive(["int8", "int15"], "int8"))
def test_texts_are_the_same_with_drafts_and_in_batches(activations: str, files: dict[tuple[str, bool], Path]) -> None:
    decoder = SpeculativeDecoder(str(files["llama", False]), activations=activations, max_batch_size=3)
    assert decoder.reproducible and f"{activations} activations" in repr(decoder)
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=0.8, seed=3)):
        for length in (1, 5):
            results = alone_and_together(decoder.using("ngram", num_draft_tokens=length), PROMPTS, params)
    assert len({tuple(result.token_ids) for result in results}) == len(PROMPTS)


@pytest.mark.slow
def test_a_gguf_draft_model_with_a_restricted_output_layer_changes_no_text(files: dict[tuple[str, bool], Path]) -> None:
    target, draft = str(files["llama", False]), str(files["llama", True])
    plain = SpeculativeDecoder(target, drafter="none").generate(PROMPTS[0], SamplingParams(max_tokens=30))
    decoder = SpeculativeDecoder(target, draft, drafter="model", num_draft_tokens=3, draft_vocabulary=64)
    tree = decoder.using(num_draft_tokens="3x2").generate(PROMPTS[0], SamplingParams(max_tokens=30))
    assert tree.token_ids == plain.token_ids and tree.stats.num_draft_tokens > 0
    assert decoder.draft is not None and decoder.draft.arithmetic.endswith("int8 activations")
    head = decoder.draft.restricted
    assert isinstance(head, RestrictedHead) and isinstance(head.first, BlockLinear) and head.first.out_features == 64
    result = decoder.generate(PROMPTS[0], SamplingParams(max_tokens=30))
    assert result.token_ids == plain.token_ids and result.stats.num_draft_tokens > 0


def test_other_precisions_and_fast_false_unpack_the_file(files: dict[tuple[str, bool], Path]) -> None:
    file = str(files["llama", False])
    for options in (LoadOptions("bfloat16"), LoadOptions(fast=False)):
        loaded = load(file, options)
        assert not block_linears(loaded.model) and loaded.model.dtype == torch.bfloat16 and not loaded.arithmetic


def test_activations_is_refused_for_models_without_blocks(files: dict[tuple[str, bool], Path]) -> None:
    with pytest.raises(UsageError, match=r"activations='int4'; allowed: auto, int8, int15"):
        SpeculativeDecoder("toy", activations="int4")
    with pytest.raises(UsageError, match=r"activations='int15', but the toy model"):
        SpeculativeDecoder("toy", activations="int15")
    with pytest.raises(
        UsageError, match=r"not computed in its own blocks: dtype='bfloat16' unpacks it; allowed: 'auto'"
    ):
        SpeculativeDecoder(str(files["llama", False]), dtype="bfloat16", activations="int15")


def test_types_without_a_kernel_are_unpacked_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_model(tmp_path / "two.gguf", kinds={"": "Q8_0", "1.ffn_down": "IQ2_S"})
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(tmp_path / "two.gguf"), LoadOptions())
    assert not block_linears(loaded.model) and loaded.model.dtype == torch.bfloat16
    messages = [record.message for record in caplog.records if "unpacked" in record.message]
    assert messages == [
        "two.gguf is unpacked to bfloat16, which rounds its weights: tensor 'blk.1.ffn_down.weight' is of type IQ2_S; "
        "computed with: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ3_XXS, IQ4_NL, IQ3_S, IQ4_XS, "
        "TQ1_0, TQ2_0, MXFP4, NVFP4, F32, F16, BF16"
    ]


def test_a_truncated_file_is_refused_with_the_tensor_it_lacks(
    files: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    content = files["llama", False].read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[:-5000])
    with pytest.raises(
        SlipstreamError, match=r"truncated: .* tensor '[\w.]+' ends at byte [\d,]+, the file at [\d,]+$"
    ):
        load(str(cut), LoadOptions())
    for length in (4, 20, 300, read_header(files["llama", False]).size - 3):
        cut.write_bytes(content[:length])
        with pytest.raises(SlipstreamError, match=r"is truncated: .* it ends in its header"):
            load(str(cut), LoadOptions())
    cut.write_bytes(b"GGML" + content[4:])
    with pytest.raises(UsageError, match="is not a GGUF file"):
        load(str(cut), LoadOptions())
    with pytest.raises(UsageError, match="does not exist"):
        load(str(tmp_path / "none.gguf"), LoadOptions())


def test_impossible_rows_and_shapes_are_refused(files: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    file = files["llama", False]
    header, content = read_header(file), file.read_bytes()
    name = b"blk.0.ffn_up.weight"
    offset = content.index(name) + len(name) + 4  # after the number of dimensions comes its shape, inputs first
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(content[:offset] + (250).to_bytes(8, "little") + content[offset + 8 :])
    with pytest.raises(
        SlipstreamError, match=r"'blk.0.ffn_up.weight' has rows of 250 numbers in Q5_0; allowed: multiples"
    ):
        load(str(broken), LoadOptions())
    broken.write_bytes(content[: offset + 8] + (480).to_bytes(8, "little") + content[offset + 16 :])
    with pytest.raises(SlipstreamError, match=r"'blk.0.ffn_up.weight' is \[480, 256\]; allowed: \[512, 256\]"):
        load(str(broken), LoadOptions())
    assert header.tensors["blk.0.ffn_up.weight"].shape == (512, 256)


@pytest.mark.parametrize(
    ("offset", "size", "value", "message"),
    [
        (16, 4, 250, "is of the unknown type 250; allowed: Q4_0, .*, BF16, and others that the gguf package names$"),
        (20, 8, 7, r"begins at byte 7 of the data; allowed: multiples of \d+$"),
        (20, 8, 0, r"begins within tensor '[\w.]+'; allowed: tensors that do not overlap"),
    ],
)
def test_unknown_types_and_impossible_places_are_refused(
    offset: int, size: int, value: int, message: str, files: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    broken = changed(files["llama", False], tmp_path, offset, value.to_bytes(size, "little"))
    with pytest.raises(SlipstreamError, match=f"tensor '[\\w.]+' {message}"):
        load(str(broken), LoadOptions())


def changed(file: Path, folder: Path, offset: int, new: bytes) -> Path:
    """A copy with other bytes at `offset` into a tensor's entry, where its shape, type and place stand."""
    content, name = file.read_bytes(), b"blk.0.ffn_up.weight"
    offset += content.index(name) + len(name) + 4
    (folder / "changed.gguf").write_bytes(content[:offset] + new + content[offset + len(new) :])
    return folder / "changed.gguf"


def test_types_without_kernels_need_the_gguf_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("IQ2_S", "Q4_K"):
        write_model(tmp_path / f"{kind}.gguf", kinds={"": "Q8_0", "1.ffn_down": kind})
        read_header(tmp_path / f"{kind}.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    read_header(tmp_path / "Q4_K.gguf")
    with pytest.raises(
        SlipstreamError,
        match=r"'blk.1.ffn_down.weight' is of the unknown type 22; allowed: Q4_0, .*BF16"
        r", and others after pip install gguf$",
    ):
        read_header(tmp_path / "IQ2_S.gguf")


def test_two_tensors_of_one_name_are_refused(files: dict[tuple[str, bool], Path], tmp_path: Path) -> None:
    content = files["llama", False].read_bytes()
    (tmp_path / "two.gguf").write_bytes(content.replace(b"blk.0.ffn_up.weight", b"blk.1.ffn_up.weight"))
    with pytest.raises(
        SlipstreamError, match=r"two tensors are called 'blk.1.ffn_up.weight'; allowed: a name for each"
    ):
        load(str(tmp_path / "two.gguf"), LoadOptions())


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192
}
SCALED = {
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
}


def add_scaling(kind: str) -> Callable[[Any], None]:
    """Adds the scaling as llama.cpp's converter writes it."""

    def add(writer: Any) -> None:
        if kind == "llama3":
            config = LlamaConfig(head_dim=64, rope_parameters={"rope_theta": 10000.0} | LLAMA3)
            plain = 1 / 10000.0 ** (torch.arange(32) / 32)
            writer.add_tensor("rope_freqs.weight", (plain / LlamaRotaryEmbedding(config).inv_freq).numpy())
            return
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
        writer.add_rope_scaling_factor(SCALED[kind]["factor"])
        if kind == "yarn":
            writer.add_rope_scaling_orig_ctx_len(128)

    return add


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_positions_are_the_files_however_it_is_loaded(kind: str, tmp_path: Path) -> None:
    file = tmp_path / f"{kind}.gguf"
    model = write_model(file, more=add_scaling(kind))
    settings = {"rope_theta": 10000.0} | SCALED[kind]
    shape = {"head_dim": 64, "max_position_embeddings": model.config.max_position_embeddings}
    expected = LlamaRotaryEmbedding(LlamaConfig(rope_parameters=settings, **shape))
    unscaled = LlamaRotaryEmbedding(LlamaConfig(**shape))
    assert not torch.allclose(unscaled.inv_freq, expected.inv_freq)  # or the test would show nothing
    x, positions = torch.zeros(1, 1), torch.arange(40)[None]
    for options in (LoadOptions("float32"), LoadOptions("bfloat16"), LoadOptions()):
        rope = load(str(file), options).model.model.rotary_emb
        kinds = list(rope.rope_type)[:1] if isinstance(rope, RotaryAngles) else []
        for ours, theirs in zip(rope(x, positions, *kinds), expected(x, positions), strict=True):
            assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


def test_unknown_scalings_of_positions_are_refused(tmp_path: Path) -> None:
    def factors(name: str, *numbers: float) -> Callable[[Any], None]:
        return lambda writer: writer.add_tensor(name, numpy.array(numbers, numpy.float32))

    for number, (more, message) in enumerate(
        [
            (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE), "allowed: types none, linear"),
            (lambda writer: writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), r"rope.scaling.factor is None"),
            (
                factors("rope_factors_long.weight", 1, 2),
                "it has one of 'rope_factors_long.weight' and .*; allowed: both",
            ),
            (factors("rope_freqs.weight", *range(1, 33)), "holds other factors than Llama 3's"),
            (factors("rope_freqs.weight", *[0.5] * 32), r"holds numbers from 0.5; allowed: numbers from 1"),
        ]
    ):
        file = tmp_path / f"{number}.gguf"
        write_model(file, more=more)
        for options in (LoadOptions(), LoadOptions("float32")):
            with pytest.raises(SlipstreamError, match=message):
                load(str(file), options)
    write_model(tmp_path / "ones.gguf", more=factors("rope_freqs.weight", *[1.0] * 32))
    load(str(tmp_path / "ones.gguf"), LoadOptions())


@pytest.mark.parametrize("options", [LoadOptions(), LoadOptions("float32"), LoadOptions(fast=False)])
@pytest.mark.parametrize("name", ["blk.0.other.weight", "blk.0.ffn_up.bias"])
def test_tensors_that_the_model_does_not_use_are_refused(name: str, options: LoadOptions, tmp_path: Path) -> None:
    write_model(tmp_path / "more.gguf", more=lambda writer: writer.add_tensor(name, numpy.ones(512, numpy.float32)))
    with pytest.raises(SlipstreamError, match=f"1 tensors of the file are not used, first {name}"):
        load(str(tmp_path / "more.gguf"), options)


def test_norms_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "nan.gguf"
    write_model(file)
    norm = read_header(file).tensors["output_norm.weight"]
    with file.open("r+b") as stream:
        stream.seek(norm.start)
        stream.write(numpy.array([numpy.nan], numpy.float32).tobytes())
    with pytest.raises(
        SlipstreamError, match=r"tensor 'output_norm.weight' holds numbers that are not finite; allowed"
    ):
        load(str(file), LoadOptions())


@pytest.mark.parametrize("kind", [block.name for block in TYPES if block.number >= 0 and block.name != "NVFP4"])
def test_matrices_whose_scales_are_not_finite_are_refused(kind: str, tmp_path: Path) -> None:
    """NVFP4 has no such scale."""
    file = tmp_path / "infinite.gguf"
    write_model(file, kinds=kind, num_hidden_layers=1, tie_word_embeddings=False)
    whole = file.read_bytes()
    # packed ahead, in another order, and read row by row
    for name in ("blk.0.ffn_up.weight", "blk.0.attn_q.weight", "token_embd.weight"):
        entry, damaged = read_header(file).tensors[name], bytearray(whole)
        place, count = HALVES.get(kind, (0, 1))
        bits = {"F32": b"\0\0\x80\x7f", "BF16": b"\x80\xff", "MXFP4": b"\xff"}.get(kind, b"\0\x7c")
        place += entry.start + (count - 1) * len(bits)  # of several, the minimum
        damaged[place : place + len(bits)] = bits
        file.write_bytes(damaged)
        with pytest.raises(
            SlipstreamError, match=f"tensor '{name}' holds numbers that are not finite; allowed: finite"
        ):
            load(str(file), LoadOptions())


def test_a_header_that_counts_more_than_the_file_holds_is_refused_as_truncated(
    files: dict[tuple[str, bool], Path], tmp_path: Path
) -> None:
    content = files["llama", False].read_bytes()
    types = struct.pack("<IIQ", 9, 5, TOKENS)  # an array of int32: the kinds of the tokens
    assert content.count(types) == 1
    (tmp_path / "huge.gguf").write_bytes(content.replace(types, struct.pack("<IIQ", 9, 12, 1 << 62)))
    with pytest.raises(SlipstreamError, match=r"is truncated: .* it ends in its header"):
        read_header(tmp_path / "huge.gguf")
