"""Packed experts give what transformers' own give, and only experts of that form are packed."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeConfig, Glm4MoeExperts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssConfig, GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralConfig, MixtralExperts

from slipstream.models.cpu.packed_linear import STACKED, PackedExperts, PackedLinear, are_packable, pack_experts
from tests.support.markers import needs_transformers

SIZES = {"hidden_size": 32, "num_experts_per_tok": 2}
GLM = Glm4MoeConfig(**SIZES, moe_intermediate_size=48, n_routed_experts=5)
MIXTRAL = MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=5, hidden_act="gelu")

STANDARD = needs_transformers("5.20", "how transformers marks experts of two products")


def experts_of(kind: type[nn.Module], config: object) -> nn.Module:
    experts = kind(config)
    generator = torch.Generator().manual_seed(0)
    for weight in experts.parameters():
        weight.data = torch.randn(weight.shape, generator=generator) * 0.1
    return experts.requires_grad_(False)


def inputs(count: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    experts = torch.rand(count, 5, generator=generator).topk(2).indices
    return torch.randn(count, 32, generator=generator), experts, torch.rand(count, 2, generator=generator)


@pytest.mark.parametrize(("kind", "config"), [(Glm4MoeExperts, GLM), (MixtralExperts, MIXTRAL)])
@pytest.mark.parametrize("count", [1, 7])
def test_each_token_goes_through_its_experts(kind: type[nn.Module], config: object, count: int) -> None:
    x, experts, shares = inputs(count)
    expected = experts_of(kind, config)(x, experts, shares)
    packed = PackedExperts(experts_of(kind, config), PackedLinear)
    assert torch.allclose(packed(x, experts, shares), expected, atol=1e-5)
    assert not torch.allclose(packed(x, (experts + 1) % 5, shares), expected, atol=1e-2)
    assert not torch.allclose(packed(x, experts, shares.flip(1)), expected, atol=1e-2)


@STANDARD
def test_packing_replaces_experts_and_frees_their_weights() -> None:
    model = nn.ModuleDict({"experts": experts_of(Glm4MoeExperts, GLM), "norm": nn.LayerNorm(32)})
    stacked = model["experts"]
    pack_experts(model, PackedLinear)
    assert isinstance(model["experts"], PackedExperts) and isinstance(model["norm"], nn.LayerNorm)
    assert all(getattr(stacked, name) is None for name in STACKED)


def test_experts_of_another_form_are_not_packed() -> None:
    biased = GptOssExperts(GptOssConfig(**SIZES, intermediate_size=48, num_local_experts=5))
    assert not are_packable(biased)
    assert not are_packable(nn.Linear(4, 4))


@STANDARD
def test_experts_of_two_products_are_packable() -> None:
    assert are_packable(experts_of(Glm4MoeExperts, GLM))
