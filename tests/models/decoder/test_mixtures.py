"""A mixture of experts runs in one call, gives transformers' logits, and the same bits in every forward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.cpu.block_experts import experts_of
from slipstream.models.cpu.processor import ISA, NEEDED, processor
from slipstream.models.decoder.families import FAMILIES
from slipstream.models.decoder.mixtures import MIXTURES
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import difference
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.weights.gguf_configuration import described
from slipstream.models.weights.gguf_conversion import dequantized
from slipstream.models.weights.gguf_file import read_header
from tests.support.gguf_architectures import CASES, architecture, write_case
from tests.support.markers import mostly_exhaustive, needs_kernels
from tests.support.mixtures import FAMILIES as FAMILIES_OF_MIXTURES
from tests.support.mixtures import assert_drafts_change_no_text, mixture

pytestmark = [
    pytest.mark.slow,
    needs_kernels,
]
pytest.importorskip("gguf")

# by the names in gguf_architectures.py; with heads that the kernels compute
FILES = ("qwen3moe", "llama-mixtral", "olmoe", "granitemoe", "glm4moe", "gpt-oss", "qwen2moe")
FILES += ("deepseek2", "deepseek2-yarn", "deepseek2-joint")
SETTINGS: dict[str, dict[str, Any]] = {"glm4moe": {"head_dim": 64}}
METADATA = {"glm4moe": {"rope.dimension_count": 32}}
IDS = torch.randint(3, 250, (1, 96), generator=torch.Generator().manual_seed(2))
SPEED = Path(__file__).parents[3] / "docs" / "speed.md"
HERE = [name for name, flags in NEEDED.items() if set(flags) <= processor().flags and name != "amx"]


@pytest.fixture(scope="module")
def file_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny file in Q4_0 of each architecture."""

    @cache
    def file(name: str) -> Path:
        path, case = tmp_path_factory.mktemp(name) / "mixture.gguf", CASES[name]
        settings = case.settings | {"hidden_size": 128} | SETTINGS.get(name, {})
        write_case(path, architecture(name), replace(case, settings=settings), "Q4_0", **METADATA.get(name, {}))
        return path

    return file


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A tiny checkpoint in bfloat16 of each family."""

    @cache
    def folder(family: str) -> Path:
        path = tmp_path_factory.mktemp(family)
        heads = {} if "kv_lora_rank" in FAMILIES_OF_MIXTURES[family] else {"head_dim": 64}
        mixture(family, torch.bfloat16, hidden_size=256, **heads).save_pretrained(path)
        return path

    return folder


def stacked(source: Path, **options: Any) -> HFBackend:
    """The model's backend, which computes all layers in one call."""
    backend = load(str(source), LoadOptions(**options)).backend
    assert isinstance(backend, HFBackend) and backend.stack is not None and backend.shape_independent
    backend.reserve(9, 128)
    return backend


def logits(backend: HFBackend, count: int = 96) -> Tensor:
    return backend.forward(IDS[:, :count], [0], first_slot=0, logits=True)[0].float()


@pytest.mark.parametrize("name", FILES)
def test_a_file_computes_what_transformers_does_with_its_numbers(name: str, file_of: Callable[[str], Path]) -> None:
    header = read_header(file_of(name))
    with torch.inference_mode():
        expected = dequantized(header, described(header), torch.float32).eval()(input_ids=IDS).logits[0]
    computed = logits(stacked(file_of(name), activations="int15"))
    error = computed - expected
    print(f"{name}: largest difference {error.abs().max():.2g}, RMS {error.square().mean().sqrt():.2g}")
    assert difference(computed, expected) <= 0.01


def count_different(backend: HFBackend, whole: Tensor, widths: Any, rows: Any) -> int:
    """Of forwards of so many tokens and rows, those that give a token other bits than the forward of them all."""
    different = 0
    for slot in range(8):
        backend.forward(IDS, [0], first_slot=slot, logits=False)
    for count in rows:
        for width in widths:
            starts = [96 - width - i for i in range(count)]
            tokens = torch.cat([IDS[:, begin : begin + width] for begin in starts])
            computed = backend.forward(tokens, starts, first_slot=0, logits=True).float()
            expected = torch.stack([whole[begin : begin + width] for begin in starts])
            different += not torch.equal(computed, expected)
    return different


@pytest.mark.parametrize("name", FILES)
def test_a_token_has_the_same_bits_in_every_forward(name: str, file_of: Callable[[str], Path]) -> None:
    backend = stacked(file_of(name))
    whole = logits(backend)
    for threads, widths, rows in ((1, (1, 2, 7, 64), (1, 2)), (3, (5, 33), (8,)), (4, (1, 16), (3,))):
        torch.set_num_threads(threads)
        assert torch.equal(logits(backend), whole)
        assert count_different(backend, whole, widths, rows) == 0
    segments = [RowSegment(1, 0, 50), RowSegment(2, 0, 3), RowSegment(3, 0, 1)]
    tokens = torch.cat([IDS[0, :50], IDS[0, :3], IDS[0, :1]])
    side_by_side = backend.forward_ragged(tokens, segments, widths=None).float()
    assert torch.equal(side_by_side, torch.cat([whole[:50], whole[:3], whole[:1]]))


@pytest.mark.parametrize("source", ["file", "folder"])
def test_bits_depend_neither_on_width_nor_on_rows_nor_on_threads(
    source: str, file_of: Callable[[str], Path], folder_of: Callable[[str], Path]
) -> None:
    backend = stacked(file_of("qwen3moe") if source == "file" else folder_of("qwen3_moe"))
    whole = logits(backend)
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert count_different(backend, whole, (1, 2, 3, 5, 8, 9, 16, 17, 33, 64), (1, 3, 8)) == 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("isa", HERE[1:])
@pytest.mark.parametrize("name", mostly_exhaustive(FILES, "qwen3moe", "gpt-oss", "deepseek2"))
def test_all_instructions_give_the_same_bits(
    name: str, isa: str, file_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = logits(stacked(file_of(name)))
    monkeypatch.setenv(ISA, isa)
    backend = stacked(file_of(name))
    assert torch.equal(logits(backend), whole)
    assert count_different(backend, whole, (1, 8, 9), (1, 3)) == 0


@pytest.mark.exhaustive
def test_experts_that_are_added_in_another_order_give_other_bits(tmp_path: Path) -> None:
    """The negative control: the same experts under other numbers."""
    model, order, computed = mixture("qwen3_moe", hidden_size=128, head_dim=32), torch.arange(8).flip(0), []
    for folder in ("model", "renumbered"):
        model.bfloat16().save_pretrained(tmp_path / folder)
        computed.append(logits(stacked(tmp_path / folder, rounding="int4")))
        for layer in model.model.layers:
            for tensor in (layer.mlp.gate.weight, layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
                tensor.data = tensor.data[order]
    assert difference(*computed) < 0.05 and not torch.equal(*computed)


def test_a_forced_choice_is_used_in_one_call(folder_of: Callable[[str], Path]) -> None:
    loaded = load(str(folder_of("qwen3_moe")), LoadOptions())
    backend: Any = loaded.backend
    backend.reserve(1, 128)
    blocks, whole = experts_of(loaded.model), logits(backend, 5)
    assert backend.stack is not None
    before = blocks[0].reads.count
    for block in blocks:
        block.force(torch.tensor([[0, 1, 2]] * 5))
    assert not torch.equal(logits(backend, 5), whole)
    assert blocks[0].reads.count - before == 3 * len(blocks)
    with pytest.raises(ValueError, match="forced for 5 tokens; allowed: 4"):
        logits(backend, 4)
    for block in blocks:
        block.force(None)
    assert torch.equal(logits(backend, 5), whole)


IN_ONE_CALL = {"qwen2_moe", "qwen3_moe", "olmoe", "mixtral", "granitemoe", "gpt_oss", "glm4_moe", "ernie4_5_moe"}
IN_ONE_CALL |= {"deepseek_v2", "deepseek_v3", "glm4_moe_lite", "flex_olmo", "minimax_m2", "granitemoeshared"}
IN_ONE_CALL |= {"granitemoe_swa", "solar_open", "dots1", "exaone_moe", "hy_v3", "afmoe", "mellum", "hunyuan_v1_moe"}
ELSEWHERE = {
    "qwen3_5_moe_text",
    "qwen3_next",
    "lfm2_moe",
    "granitemoehybrid",
    "gemma4_text",
}  # tried in test_hybrids.py


def test_the_mixtures_that_run_in_one_call_are_those_of_the_documentation() -> None:
    computed, others = MIXTURES.keys() & FAMILIES.keys(), MIXTURES.keys() - FAMILIES.keys()
    print(f"in one call: {', '.join(sorted(computed))}; the experts alone: {', '.join(sorted(others))}")
    assert computed == IN_ONE_CALL | ELSEWHERE and not others
    assert f"{len(computed)} families" in SPEED.read_text(encoding="utf-8")


@pytest.mark.parametrize("family", mostly_exhaustive(sorted(IN_ONE_CALL), "gpt_oss", "qwen2_moe"))
def test_drafts_change_no_text_of_a_checkpoint(family: str, folder_of: Callable[[str], Path]) -> None:
    stacked(folder_of(family))
    assert_drafts_change_no_text(str(folder_of(family)))


@pytest.mark.parametrize("name", mostly_exhaustive(FILES, "glm4moe"))
def test_drafts_change_no_text_of_a_file(name: str, file_of: Callable[[str], Path]) -> None:
    stacked(file_of(name))
    assert_drafts_change_no_text(str(file_of(name)))
