"""Quantized Hugging Face checkpoints: their weights are exact, and no draft changes their texts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.hf import block_model
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.plain_models import load_unpacked
from tests.support.markers import mostly_exhaustive, needs_avx2
from tests.support.plain_texts import alone_and_together
from tests.support.quantized_files import Checkpoint, kl, write_checkpoint

pytestmark = needs_avx2
HALF, BRAIN = torch.float16, torch.bfloat16
# form, architecture, bits, group (0: whole rows), symmetric, type of the scales
CASES = [
    ("gptq", "llama", 4, 128, False, HALF),
    ("gptq", "qwen2", 4, 0, True, HALF),
    ("gptq", "llama", 4, 32, True, HALF),
    ("gptq_v2", "llama", 4, 64, False, BRAIN),
    ("gptq", "llama", 8, 32, True, HALF),
    ("gptq", "llama", 2, 64, False, HALF),
    ("awq", "qwen2", 4, 128, False, HALF),
    ("awq", "llama", 4, 64, False, HALF),
    ("compressed-tensors", "llama", 4, 128, True, BRAIN),
    ("compressed-tensors", "qwen2", 4, 64, False, BRAIN),
    ("compressed-tensors", "llama", 8, 0, True, HALF),
    ("torchao", "llama", 4, 128, False, BRAIN),
]
FEW = (CASES[0], CASES[6], CASES[8])
RARE = (CASES[1], CASES[2], CASES[7], CASES[9])  # groups and types of scales that others have, too
MARKS = (pytest.mark.slow, pytest.mark.exhaustive)
IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
PROMPTS = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33], list(range(40, 90))]


def logits(loaded: Loaded) -> Tensor:
    loaded.backend.reserve(1, 256)
    return loaded.backend.forward(IDS, [0], first_slot=0, logits=True)


def reference(checkpoint: Checkpoint) -> Tensor:
    with torch.inference_mode():
        return checkpoint.reference(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(tmp_path_factory.mktemp("gptq"), group=64, tie_word_embeddings=True)


@pytest.fixture
def editable(tmp_path: Path) -> Checkpoint:
    """A checkpoint that a test may change."""
    return write_checkpoint(tmp_path / "own", group=64, num_hidden_layers=1)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in FEW else MARKS[case in RARE]) for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
def test_logits_are_those_of_the_dequantized_weights(case: tuple, tmp_path: Path) -> None:  # type: ignore[type-arg]
    form, name, bits, group, symmetric, dtype = case
    checkpoint = write_checkpoint(
        tmp_path / "made", form, name, bits=bits, group=group, symmetric=symmetric, dtype=dtype
    )
    expected = reference(checkpoint)
    int15, int8 = (load(str(checkpoint.folder), LoadOptions(activations=kind)) for kind in ("int15", "int8"))
    assert int15.backend.shape_independent and int15.packed and int15.arithmetic.endswith("blocks, int15 activations")
    assert kl(expected, logits(int15)) < 1e-6 and kl(expected, logits(int15)) < kl(expected, logits(int8)) / 10 < 0.01
    unpacked = load_unpacked(str(checkpoint.folder), LoadOptions("float32"))
    for parameter, number in checkpoint.reference.state_dict().items():
        assert torch.equal(unpacked.state_dict()[parameter], number), parameter
    assert not block_linears(unpacked)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_zero_point_off_by_one_and_swapped_codes_change_the_logits(form: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "made", form, num_hidden_layers=1)
    expected, tensors = reference(checkpoint), checkpoint.tensors()
    name, digests = "model.layers.0.mlp.down_proj", set[str]()
    for key, change in (("qzeros", lambda words: words ^ 0x11111111), ("qweight", lambda words: words.roll(1, 0))):
        folder = checkpoint.change(tensors | {f"{name}.{key}": change(tensors[f"{name}.{key}"])})
        loaded = load(folder, LoadOptions(activations="int15"))
        digests.add(loaded.backend.weights_digest())
        assert kl(expected, logits(loaded)) > 1e-4
    loaded = load(checkpoint.change(tensors), LoadOptions(activations="int15"))
    assert kl(expected, logits(loaded)) < 1e-6
    assert len(digests | {loaded.backend.weights_digest()}) == 3  # receipts distinguish them


def test_every_weight_is_computed_in_the_checkpoints_own_codes(gptq: Checkpoint) -> None:
    loaded = load(str(gptq.folder), LoadOptions())
    assert loaded.arithmetic == "F16+int4 group 64 blocks, int8 activations"
    assert not [module for module in loaded.model.modules() if type(module) in (torch.nn.Linear, torch.nn.Embedding)]
    tied = loaded.model.get_output_embeddings().parts[0]
    assert tied is loaded.model.get_input_embeddings().part and tied.block.name == "F16"
    assert torch.equal(tied.rows(torch.arange(9)), gptq.reference.lm_head.weight[:9])


@pytest.mark.slow
@pytest.mark.parametrize("activations", mostly_exhaustive(["int8", "int15"], "int8"))
def test_texts_are_the_same_with_drafts_and_in_batches(activations: str, gptq: Checkpoint) -> None:
    decoder = SpeculativeDecoder(str(gptq.folder), activations=activations, max_batch_size=3)
    assert decoder.reproducible and f"{activations} activations" in repr(decoder)
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.8, seed=3)):
        for length in (1, 6, 15):
            results = alone_and_together(decoder.using("ngram", num_draft_tokens=length), PROMPTS, params)
    assert len({tuple(result.token_ids) for result in results}) == len(PROMPTS)


def test_a_forward_has_the_same_bits_at_every_width(gptq: Checkpoint) -> None:
    loaded = load(str(gptq.folder), LoadOptions())
    whole = logits(loaded)
    for width in range(1, 17):
        starts = range(0, 40 - width, width)
        parts = [
            loaded.backend.forward(IDS[:, start : start + width], [start], first_slot=0, logits=True)
            for start in starts
        ]
        assert torch.equal(torch.cat(parts, 1), whole[:, : width * len(parts)]), width
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_other_precisions_and_fast_false_unpack_the_checkpoint(
    gptq: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "slipstream"):
        for options in (LoadOptions("bfloat16", fast=False), LoadOptions(fast=False)):
            loaded = load(str(gptq.folder), options)
            assert not block_linears(loaded.model) and loaded.model.dtype == BRAIN and not loaded.arithmetic
    assert not [record for record in caplog.records if "unpacked" in record.message]
    with pytest.raises(UsageError, match=r"not computed in its own blocks: dtype='bfloat16' unpacks it; allowed"):
        load(str(gptq.folder), LoadOptions("bfloat16", activations="int15"))


def test_without_kernels_a_checkpoint_is_unpacked_with_one_warning(
    gptq: Checkpoint, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_KERNELS", "off")
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(gptq.folder), LoadOptions())
    messages = [record.message for record in caplog.records if "unpacked" in record.message]
    assert messages == [f"{gptq.folder} is unpacked to bfloat16, which rounds its weights: SLIPSTREAM_KERNELS is off"]
    assert not block_linears(loaded.model) and kl(reference(gptq), logits(loaded).float()) < 0.05


def test_act_order_is_unpacked_with_one_warning(editable: Checkpoint, caplog: pytest.LogCaptureFixture) -> None:
    tensors, name = editable.tensors(), "model.layers.0.self_attn.q_proj"
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][order]
    folder = editable.change(tensors)
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(folder, LoadOptions())
    messages = [record.message for record in caplog.records if "unpacked" in record.message]
    assert (
        len(messages) == 1
        and f"tensor '{name}.weight' has groups of inputs that are not successive (act-order)" in messages[0]
    )
    groups = order // 64
    zeros, scales = (tensors[f"{name}.{key}"] for key in ("qzeros", "scales"))
    codes = [(int(tensors[f"{name}.qweight"][i // 8, 0]) >> 4 * (i % 8)) & 15 for i in range(256)]  # of output 0
    first_zeros = [(int(word) & 15) + 1 for word in zeros[:, 0]]
    expected = [(codes[i] - first_zeros[groups[i]]) * float(scales[groups[i], 0]) for i in range(256)]
    weights = load_unpacked(folder, LoadOptions("float32")).model.layers[0].self_attn.q_proj.weight[0]
    assert torch.equal(weights, torch.tensor(expected)) and loaded.model.dtype == BRAIN


def test_libraries_of_the_quantizers_are_not_imported(gptq: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for library in ("gptqmodel", "optimum", "awq", "compressed_tensors", "torchao"):
        monkeypatch.setitem(sys.modules, library, None)  # importing it fails
    assert block_model.check_kernels() is None and load(str(gptq.folder), LoadOptions()).arithmetic
