"""Quantised Hugging Face checkpoints: the numbers they mean, texts that no speculation changes."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slipstream import SamplingParams, SpeculativeDecoder
from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cpu.kernel_libraries import NEEDED
from slipstream.models.cpu.processor import processor
from slipstream.models.hf import block_model
from slipstream.models.load import load
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.models.plain_models import load_unpacked
from tests.support.markers import mostly_slow
from tests.support.quantised_files import Made, write_checkpoint

pytestmark = pytest.mark.skipif(
    shutil.which("cc") is None or not set(NEEDED["avx2"]) <= processor().flags, reason="needs a C compiler and AVX2"
)
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
IDS = torch.randint(0, 250, (1, 40), generator=torch.Generator().manual_seed(4))
PROMPTS = [[5, 9, 5, 9, 5, 9, 70, 71], [100, 7, 33], list(range(40, 90))]


def kl(expected: Tensor, got: Tensor) -> float:
    p, q = (torch.log_softmax(logits.double(), -1) for logits in (expected, got))
    return float((p.exp() * (p - q)).sum(-1).mean())


def logits(loaded: Loaded) -> Tensor:
    loaded.backend.reserve(1, 256)
    return loaded.backend.forward(IDS, [0], first_slot=0, logits=True)


def reference(made: Made) -> Tensor:
    with torch.inference_mode():
        return made.reference(input_ids=IDS, use_cache=False).logits


@pytest.fixture(scope="module")
def gptq(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return write_checkpoint(tmp_path_factory.mktemp("gptq"), group=64, tie_word_embeddings=True)


@pytest.fixture
def own(tmp_path: Path) -> Made:
    """One that a test may change."""
    return write_checkpoint(tmp_path / "own", group=64, num_hidden_layers=1)


@pytest.mark.parametrize(
    "case",
    [case if case in FEW else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
    ids=lambda case: "-".join(map(str, case)),
)
def test_logits_are_those_of_the_numbers_that_the_codes_mean(case: tuple, tmp_path: Path) -> None:  # type: ignore[type-arg]
    form, name, bits, group, symmetric, dtype = case
    made = write_checkpoint(tmp_path / "made", form, name, bits=bits, group=group, symmetric=symmetric, dtype=dtype)
    expected = reference(made)
    near, coarse = (load(str(made.folder), LoadOptions(activations=kind)) for kind in ("int15", "int8"))
    assert near.backend.shape_independent and near.packed and near.arithmetic.endswith("blocks, int15 activations")
    assert kl(expected, logits(near)) < 1e-6 and kl(expected, logits(near)) < kl(expected, logits(coarse)) / 10 < 0.01
    whole = load_unpacked(str(made.folder), LoadOptions("float32"))
    for parameter, number in made.reference.state_dict().items():
        assert torch.equal(whole.state_dict()[parameter], number), parameter
    assert not block_linears(whole)


@pytest.mark.parametrize("form", ["gptq", "awq"])
def test_a_zero_point_off_by_one_and_swapped_codes_change_the_logits(form: str, tmp_path: Path) -> None:
    made = write_checkpoint(tmp_path / "made", form, num_hidden_layers=1)
    expected, tensors = reference(made), made.tensors()
    name, digests = "model.layers.0.mlp.down_proj", set[str]()
    for key, change in (("qzeros", lambda words: words ^ 0x11111111), ("qweight", lambda words: words.roll(1, 0))):
        folder = made.change(tensors | {f"{name}.{key}": change(tensors[f"{name}.{key}"])})
        loaded = load(folder, LoadOptions(activations="int15"))
        digests.add(loaded.backend.weights_digest())
        assert kl(expected, logits(loaded)) > 1e-4
    loaded = load(made.change(tensors), LoadOptions(activations="int15"))
    assert kl(expected, logits(loaded)) < 1e-6
    assert len(digests | {loaded.backend.weights_digest()}) == 3  # receipts tell them apart


def test_every_weight_stays_as_the_checkpoint_has_it(gptq: Made) -> None:
    loaded = load(str(gptq.folder), LoadOptions())
    assert loaded.arithmetic == "F16+int4 group 64 blocks, int8 activations"
    assert not [module for module in loaded.model.modules() if type(module) in (torch.nn.Linear, torch.nn.Embedding)]
    tied = loaded.model.get_output_embeddings().parts[0]
    assert tied is loaded.model.get_input_embeddings().part and tied.block.name == "F16"
    assert torch.equal(tied.rows(torch.arange(9)), gptq.reference.lm_head.weight[:9])


@pytest.mark.parametrize("activations", mostly_slow(["int8", "int15"], "int8"))
def test_texts_are_the_same_with_speculation_and_in_batches(activations: str, gptq: Made) -> None:
    decoder = SpeculativeDecoder(str(gptq.folder), activations=activations, max_batch_size=3)
    assert decoder.reproducible and f"{activations} activations" in repr(decoder)
    for params in (SamplingParams(max_tokens=30), SamplingParams(max_tokens=30, temperature=0.8, seed=3)):
        plain = [decoder.using("none").generate(prompt, params).token_ids for prompt in PROMPTS]
        for length in (1, 6, 15):
            other = decoder.using("ngram", num_draft_tokens=length)
            assert [result.token_ids for result in other.generate(PROMPTS, params)] == plain
            assert other.generate(PROMPTS[0], params).token_ids == plain[0]
    assert len({tuple(text) for text in plain}) == len(PROMPTS)


def test_a_forward_has_the_same_bits_at_every_width(gptq: Made) -> None:
    loaded = load(str(gptq.folder), LoadOptions())
    whole = logits(loaded)
    for width in range(1, 17):
        starts = range(0, 40 - width, width)
        found = [loaded.backend.forward(IDS[:, at : at + width], [at], first_slot=0, logits=True) for at in starts]
        assert torch.equal(torch.cat(found, 1), whole[:, : width * len(found)]), width
    assert not torch.equal(whole[:, 0], whole[:, 1])


def test_other_precisions_and_fast_false_unpack_it(gptq: Made, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "slipstream"):
        for options in (LoadOptions("bfloat16", fast=False), LoadOptions(fast=False)):
            loaded = load(str(gptq.folder), options)
            assert not block_linears(loaded.model) and loaded.model.dtype == BRAIN and not loaded.arithmetic
    assert not [record for record in caplog.records if "unpacked" in record.message]
    with pytest.raises(UsageError, match=r"not computed in its own blocks: dtype='bfloat16' unpacks it; allowed"):
        load(str(gptq.folder), LoadOptions("bfloat16", activations="int15"))


def test_without_kernels_it_is_unpacked_with_one_warning(
    gptq: Made, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SLIPSTREAM_KERNELS", "off")
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(str(gptq.folder), LoadOptions())
    said = [record.message for record in caplog.records if "unpacked" in record.message]
    assert said == [f"{gptq.folder} is unpacked to bfloat16, which rounds its weights: SLIPSTREAM_KERNELS is off"]
    assert not block_linears(loaded.model) and kl(reference(gptq), logits(loaded).float()) < 0.05


def test_act_order_is_unpacked_with_one_warning(own: Made, caplog: pytest.LogCaptureFixture) -> None:
    tensors, name = own.tensors(), "model.layers.0.self_attn.q_proj"
    order = torch.randperm(256, generator=torch.Generator().manual_seed(1))
    tensors[f"{name}.g_idx"] = tensors[f"{name}.g_idx"][order]
    folder = own.change(tensors)
    with caplog.at_level(logging.WARNING, "slipstream"):
        loaded = load(folder, LoadOptions())
    said = [record.message for record in caplog.records if "unpacked" in record.message]
    assert (
        len(said) == 1 and f"tensor '{name}.weight' has groups of inputs that are not successive (act-order)" in said[0]
    )
    groups = order // 64
    zeros, scales = (tensors[f"{name}.{key}"] for key in ("qzeros", "scales"))
    first = [(int(tensors[f"{name}.qweight"][i // 8, 0]) >> 4 * (i % 8)) & 15 for i in range(256)]  # of output 0
    own_zero = [(int(word) & 15) + 1 for word in zeros[:, 0]]
    expected = [(first[i] - own_zero[groups[i]]) * float(scales[groups[i], 0]) for i in range(256)]
    found = load_unpacked(folder, LoadOptions("float32")).model.layers[0].self_attn.q_proj.weight[0]
    assert torch.equal(found, torch.tensor(expected)) and loaded.model.dtype == BRAIN


def test_nothing_of_the_makers_libraries_is_imported(gptq: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for library in ("gptqmodel", "optimum", "awq", "compressed_tensors", "torchao"):
        monkeypatch.setitem(sys.modules, library, None)  # importing it fails
    assert block_model.check_kernels() is None and load(str(gptq.folder), LoadOptions()).arithmetic
