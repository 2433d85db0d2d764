"""GGUF blocks in Triton kernels give the numbers of the gguf package; on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models.cpu.grouped_blocks import NotInBlocksError
from slipstream.models.cpu.structs import BY_NAME
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.stored_weights import KINDS, StoredLinear, Weight, fill_on_gpu, stored_weights
from slipstream.models.cuda.triton_layer import Product
from slipstream.models.decoder.planned_model import PlannedModel, planned_model
from slipstream.models.hf.backend import HFBackend
from slipstream.models.loaded import LoadOptions
from slipstream.models.planned_models import _load_on_gpu
from slipstream.models.quantized_models import QuantizedModel
from slipstream.models.weights.gguf_configuration import described, described_settings
from slipstream.models.weights.gguf_file import read_header
from slipstream.models.weights.gguf_tensors import GGUFTensors
from tests.models.cuda.test_triton_layer import DEVICE, ON_GPU, pytestmark  # noqa: F401
from tests.models.cuda.test_triton_layer_order import products_agree, sums_in_order  # noqa: F401
from tests.support.gguf_files import TOKENS, dequantized, random_blocks, write_model

INPUTS, OUTPUTS = 512, 70


def weight(kind: str, outputs: int = OUTPUTS, seed: int = 0) -> tuple[Weight, Tensor]:
    """Random blocks and the numbers that they stand for, float32."""
    raw = random_blocks(BY_NAME[kind], outputs, INPUTS, seed)
    return Weight(torch.from_numpy(raw).to(DEVICE), INPUTS, kind), dequantized(BY_NAME[kind], raw).to(DEVICE)


def plain(numbers: Sequence[Tensor]) -> nn.Linear:
    layer = nn.Linear(INPUTS, sum(map(len, numbers)), bias=False, device="meta")
    layer.weight = nn.Parameter(torch.cat(list(numbers)), requires_grad=False)
    return layer


@pytest.mark.parametrize("kind", KINDS)
def test_unpacked_rows_are_those_of_the_gguf_package_to_the_bit(kind: str) -> None:
    stored, expected = weight(kind)
    rows = torch.tensor([0, 3, 69, 3], device=DEVICE)
    assert torch.equal(stored.rows(rows, torch.float32), expected[rows])


def test_one_wrong_bit_is_noticed() -> None:
    stored, expected = weight("Q4_K")
    stored.data[5, 4] ^= 1  # in a scale
    rows = torch.arange(OUTPUTS, device=DEVICE)
    differing = (stored.rows(rows, torch.float32) != expected).any(1)
    assert differing.nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_bits_of_unpacked_weights_for_any_number_of_tokens(kind: str) -> None:
    stored, numbers = weight(kind)
    x = torch.randn(33, INPUTS, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    product, expected = Product([StoredLinear([stored], None)]), Product([plain([numbers])])
    assert torch.equal(product(x), expected(x))
    assert torch.equal(product(x, is_whole=True), expected(x, is_whole=True))
    assert torch.equal(product(x[7:8], is_whole=True), product(x, is_whole=True)[7:8])
    torch.testing.assert_close(product(x, is_whole=True), x @ numbers.T, rtol=1e-4, atol=1e-4)


def test_parts_of_several_types_are_one_product() -> None:
    kinds = ("Q4_K", "Q4_K", "Q6_K")
    pairs = [weight(kind, 48, seed) for seed, kind in enumerate(kinds)]
    bias = torch.arange(144.0, device=DEVICE)
    layer = StoredLinear([stored for stored, _ in pairs], bias)
    assert [part.kind for part in layer.weights] == ["Q4_K", "Q6_K"]
    x, expected = torch.randn(3, INPUTS).to(DEVICE), plain([numbers for _, numbers in pairs])
    expected.bias = nn.Parameter(bias)
    for out in (layer(x), Product([layer])(x, is_whole=True)):
        torch.testing.assert_close(out, expected(x), rtol=1e-4, atol=1e-4)


def loaded(file: Path) -> QuantizedModel:
    """The model of a file on the device, in float32 unless that is a GPU."""
    header = read_header(file)
    folder = described(header)
    model: Any = planned_model(described_settings(header, folder))
    assert isinstance(model, PlannedModel)
    tensors = GGUFTensors(header)
    fill_on_gpu(model, tensors, torch.device(DEVICE), torch.bfloat16 if ON_GPU else torch.float32)
    tensors.check_unused()
    return QuantizedModel(str(folder), model.eval(), True)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [("llama", "Q4_K"), ("qwen2", "Q8_0"), ("qwen3", "Q6_K"), ("gemma3", "Q5_K")],
)
def test_a_file_is_computed_from_its_blocks(name: str, kinds: str, tmp_path: Path) -> None:
    file = tmp_path / "it.gguf"
    shape: dict[str, Any] = {"num_hidden_layers": 2}
    if name == "gemma3":
        shape = {"tie_word_embeddings": True, "num_hidden_layers": 3, "query_pre_attn_scalar": 64}
    own = write_model(file, name, kinds, **shape)
    tensors = GGUFTensors(read_header(file))
    for parameter, numbers in own.named_parameters():
        numbers.data = tensors.values(parameter, tuple(numbers.shape))
    quantized = loaded(file)
    prepared = _load_on_gpu(str(file), LoadOptions(), object(), quantized)
    assert prepared is not None and isinstance(prepared.backend, GraphedBackend) and prepared.backend.shape_independent
    stored = stored_weights(quantized.model)
    assert len(stored) == 4 * own.config.num_hidden_layers + 1 and {weight.kind for weight in stored} == {kinds}
    tokens = torch.randint(0, TOKENS, (2, 9), generator=torch.Generator().manual_seed(0))
    logits = []
    for backend, device in ((HFBackend(own), "cpu"), (prepared.backend, DEVICE)):
        backend.reserve(2, 600)
        backend.forward(tokens[:, :6].to(device), [0, 0], first_slot=0, logits=False)
        logits.append(backend.forward(tokens[:, 6:].to(device), [6, 6], first_slot=0, logits=True).float().cpu())
    close = 0.05 if ON_GPU else 1e-4
    torch.testing.assert_close(logits[1], logits[0], rtol=close, atol=close * float(logits[0].abs().max()))


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    write_model(tmp_path / "it.gguf", "qwen2", "Q4_K")
    prepared: Any = _load_on_gpu("it.gguf", LoadOptions(), object(), loaded(tmp_path / "it.gguf"))
    digest = prepared.backend.weights_digest()
    assert digest == prepared.backend.weights_digest()
    stored_weights(prepared.model)[-2].data[0, 20] ^= 1
    assert digest != prepared.backend.weights_digest()


def test_types_without_a_kernel_are_refused_by_name(tmp_path: Path) -> None:
    write_model(tmp_path / "it.gguf", "llama", "Q3_K")
    with pytest.raises(NotInBlocksError, match="is of type Q3_K; on a GPU: Q8_0, Q4_0, Q4_K, Q5_K, Q6_K"):
        loaded(tmp_path / "it.gguf")
