"""Latent attention in the kernels: threads share its heads, and the cache keeps latents."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.core.trees import segments_of
from slipstream.models.cpu.latent_heads import latent_heads, latent_of
from slipstream.models.decoder import families
from slipstream.models.decoder.plan import LatentPlan
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.trials import difference
from slipstream.models.load import load
from slipstream.models.loaded import LoadOptions
from slipstream.models.plain_models import load_unpacked
from tests.models.decoder.test_families import save_model
from tests.support.markers import needs_kernels

pytestmark = needs_kernels
LONG = 600  # positions: two stretches of attention
IDS = torch.randint(3, 320, (1, LONG), generator=torch.Generator().manual_seed(6))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    @cache
    def folder(name: str, heads: int = 8) -> str:
        path = tmp_path_factory.mktemp(name)
        changes = dict.fromkeys(("num_attention_heads", "num_key_value_heads"), heads)
        save_model(name, path, max_position_embeddings=2 * LONG, num_hidden_layers=2, mlp_layer_types=None, **changes)
        return str(path)

    return folder


def stacked(folder: str, **options: Any) -> HFBackend:
    backend = load(folder, LoadOptions(**options)).backend
    assert isinstance(backend, HFBackend) and backend.stack is not None and backend.shape_independent
    backend.reserve(2, 2 * LONG)
    return backend


def logits(backend: HFBackend, start: int, end: int, slot: int = 0) -> Tensor:
    return backend.forward(IDS[:, start:end], [start], first_slot=slot, logits=True)[0]


@pytest.mark.parametrize(
    ("heads", "rounding"),
    [(8, "none"), (8, "int4"), pytest.param(130, "int4", marks=pytest.mark.slow)],  # 130: more than may share a key
)
def test_long_texts_have_the_same_bits_on_any_number_of_threads(
    heads: int, rounding: str, folder_of: Callable[..., str]
) -> None:
    backend = stacked(folder_of("deepseek_v3", heads), rounding=rounding)
    whole = logits(backend, 0, LONG)
    for threads in (1, 2, 3, 4):
        torch.set_num_threads(threads)
        for width in (1, 3):
            assert torch.equal(logits(backend, LONG - width, LONG), whole[-width:]), (threads, width)


def test_a_long_text_has_the_models_own_logits(folder_of: Callable[..., str]) -> None:
    folder = folder_of("glm4_moe_lite")
    with torch.inference_mode():
        exact, own = (
            load_unpacked(folder, LoadOptions(dtype))(input_ids=IDS).logits[0].float()
            for dtype in ("float32", "bfloat16")
        )
    computed = logits(stacked(folder), 0, LONG).float()
    error = computed - exact
    print(f"largest difference {error.abs().max():.2g}, RMS {error.square().mean().sqrt():.2g}")
    assert difference(computed, exact) <= 1.2 * difference(own, exact) < 0.05


def test_the_cache_keeps_a_latent_and_a_rotated_part_for_all_heads(folder_of: Callable[..., str]) -> None:
    backend = stacked(folder_of("deepseek_v2"))
    logits(backend, 0, 20)
    layer = backend.cache.layers[0]
    assert layer.keys is not None and layer.values is not None
    assert (layer.keys.shape[1::2], layer.values.shape[1::2]) == ((1, 64), (1, 32))


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite"])
def test_branches_of_a_tree_have_the_bits_of_texts(name: str, folder_of: Callable[..., str]) -> None:
    backend = stacked(folder_of(name))
    first = IDS[0, :40]
    backend.forward(first[None], [0], first_slot=0, logits=False)
    root, left, right, after = 7, 11, 12, 13
    tokens = torch.tensor([root, left, right, after])
    segments = segments_of(0, 40, 41, (-1, -1, 1))
    computed = backend.forward_tree(tokens, segments, widths=None)
    for slot_tokens, rows in (((root, left), (0, 1)), ((root, right, after), (0, 2, 3))):
        text = torch.cat([first, torch.tensor(slot_tokens)])
        alone = backend.forward(text[None], [0], first_slot=1, logits=True)[0, 40:]
        assert torch.equal(computed[list(rows)], alone)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"scaling": 0.3}, {"rotates_pairs": False}])
def test_other_scores_than_the_models_are_noticed(
    change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The negative control."""
    save_model("deepseek_v2", tmp_path)
    assert load(str(tmp_path), LoadOptions()).backend.stack is not None
    plan_of = families.FAMILIES["deepseek_v2"]
    monkeypatch.setitem(families.FAMILIES, "deepseek_v2", lambda *given: plan_of(*given).with_layers(**change))
    monkeypatch.setattr("slipstream.models.hf.trials.read_measured", lambda *_: None)  # tried again
    assert load(str(tmp_path), LoadOptions()).backend.stack is None


def test_matrices_of_heads_are_the_layers() -> None:
    plan = LatentPlan(4, 64, 32, 96, "kv_b_proj", "kv_a_layernorm", None, None)
    layer = nn.Linear(64, plan.shape[0], bias=False)
    assert torch.equal(plan.joined(*plan.parts(layer.weight.data)), layer.weight.data)


def test_sizes_that_the_kernels_do_not_take_keep_the_models_own_layer(tmp_path: Path) -> None:
    save_model("deepseek_v3", tmp_path, qk_nope_head_dim=48)
    loaded = load(str(tmp_path), LoadOptions())
    assert not latent_heads(loaded.model) and latent_of(loaded.model.config, "layers.0.self_attn.kv_b_proj") is None
    backend = loaded.backend
    assert isinstance(backend, HFBackend) and backend.stack is None
    backend.reserve(1, 64)
    computed = backend.forward(IDS[:, :60], [0], first_slot=0, logits=True).float()
    with torch.inference_mode():
        own = load_unpacked(str(tmp_path), LoadOptions("float32"))(input_ids=IDS[:, :60]).logits
    assert difference(computed, own) < 0.05
