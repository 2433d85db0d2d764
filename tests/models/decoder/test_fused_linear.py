"""Linear layers that share an input are computed in one product, with the same logits in every kind of model."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slipstream.models.cpu.packed_linear import PackedLinear, pack
from slipstream.models.decoder.fused_linear import FusedLinear, FusedOutput, called_by_none, fuse, linear_calls
from slipstream.models.notices import warn_slower
from tests.support.tiny_models import ARCHITECTURES, fresh

GROUPS = {
    "llama": 4,
    "llama-eager": 4,
    "qwen2": 4,
    "qwen3": 4,
    "mistral": 4,
    "gemma3": 6,
    "gpt2": 0,
    "phi3": 0,
    "olmo2": 4,
}


def logits(model: Any, tokens: Tensor) -> Tensor:
    with torch.inference_mode():
        model_logits: Tensor = model(input_ids=tokens).logits
    return model_logits


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_fused_model_gives_the_models_own_logits(name: str) -> None:
    model = fresh(name)
    tokens = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    expected = logits(model, tokens)
    assert fuse(model) == GROUPS[name]
    assert torch.allclose(logits(model, tokens), expected, atol=1e-4)
    pack(model)
    assert torch.allclose(logits(model, tokens), expected, atol=1e-4)
    assert not any(type(module) is nn.Linear for module in model.modules())


def test_fusing_joins_query_key_value_and_gate_up_and_frees_their_weights() -> None:
    model = fresh("llama")
    count = sum(p.numel() for p in model.parameters())
    fuse(model)
    layer = model.model.layers[0]
    assert [type(getattr(layer.self_attn, f"{name}_proj")) for name in "qkvo"] == [*[FusedOutput] * 3, nn.Linear]
    mlp = [type(getattr(layer.mlp, f"{name}_proj")) for name in ("gate", "up", "down")]
    assert mlp == [FusedOutput, FusedOutput, nn.Linear]
    assert sum(p.numel() for p in model.parameters()) == count
    assert [tuple(m.joint.weight.shape) for m in model.modules() if type(m) is FusedLinear][:2] == [(64, 32), (96, 32)]
    pack(model)
    assert sum(type(m) is PackedLinear for m in model.modules()) == 2 * (2 + 2) + 1


def test_a_group_is_packed_before_the_next_is_fused() -> None:
    model = fresh("llama")
    tokens = torch.randint(1, 50, (1, 7), generator=torch.Generator().manual_seed(1))
    expected, alive, alive_counts = logits(model, tokens), [], []

    def keep(linear: nn.Linear) -> nn.Module:
        alive.append(weakref.ref(linear.weight))
        alive_counts.append(sum(weight() is not None for weight in alive))
        return PackedLinear(linear)

    assert fuse(model, keep) == len(alive_counts) == GROUPS["llama"]
    assert set(alive_counts) == {1}
    assert all(type(m.joint) is PackedLinear for m in model.modules() if type(m) is FusedLinear)
    assert torch.allclose(logits(model, tokens), expected, atol=1e-4)


class CallsInOrder(nn.Module):
    """Calls its layers in a given order."""

    def __init__(self, order: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(8, 4), nn.Linear(8, 6), nn.Linear(8, 4)
        self.order = order

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        x = torch.arange(16.0).view(2, 8).cos()
        y = x + 1
        inputs = {"x": x, "y": y}
        return torch.cat([getattr(self, name[0])(inputs[name[1]]) for name in self.order], dim=-1)


@pytest.mark.parametrize(
    ("order", "groups"),
    [
        (["ax", "bx", "cx"], 1),
        (["ax", "bx", "cy"], 1),
        (["ax", "by", "cx"], 1),  # with one other call in between, as in latent attention
        (["ax", "ay", "bx"], 0),  # called twice
        (["cx", "bx", "ay"], 1),
    ],
)
def test_only_nearby_calls_with_the_same_tensor_are_fused(order: list[str], groups: int) -> None:
    model = CallsInOrder(order).requires_grad_(False)
    expected = model(torch.zeros(1))
    assert fuse(model) == groups
    assert torch.allclose(model(torch.zeros(1)), expected, atol=1e-6)


def test_fused_layers_are_right_in_other_orders_and_with_other_inputs() -> None:
    model = CallsInOrder(["ax", "bx", "cx"]).requires_grad_(False)
    plain = copy.deepcopy(model)
    fuse(model)
    for order in (["cx", "bx", "ax"], ["ax", "by", "cx"], ["by"], ["ay", "ax", "cy", "bx"]):
        model.order = plain.order = order
        assert torch.allclose(model(torch.zeros(1)), plain(torch.zeros(1)), atol=1e-6)


def test_a_finished_product_is_dropped() -> None:
    model = CallsInOrder(["ax", "bx", "cx"]).requires_grad_(False)
    fuse(model)
    model(torch.zeros(1))
    assert model.a.fused._last is None


def test_a_model_that_refuses_the_trial_keeps_its_layers_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Refusing(CallsInOrder):
        def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
            raise ValueError("needs more than ids")

    warn_slower.cache_clear()
    assert fuse(Refusing(["ax"])) == 0
    assert (
        "Refusing keeps its linear layers separate: a forward of two tokens fails: needs more than ids" in caplog.text
    )


class ReadsItsWeight(nn.Module):
    """A layer around a linear one that reads the dtype of its weight, as adapters do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.to(self.inner.weight.dtype))
        return out


def test_layers_with_hooks_or_with_weights_that_others_read_are_not_fused() -> None:
    model = fresh("llama")
    tokens = torch.randint(1, 50, (2, 7), generator=torch.Generator().manual_seed(1))
    for layer in model.model.layers:
        layer.self_attn.q_proj = ReadsItsWeight(layer.self_attn.q_proj)
        layer.self_attn.o_proj = ReadsItsWeight(layer.self_attn.o_proj)
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, inputs, output: 2 * output)
    expected = logits(model, tokens)
    calls = linear_calls(model)
    unfusable = called_by_none(model, calls)
    names = {name for name, module in model.named_modules() if module in unfusable}
    assert names == {f"model.layers.{i}.self_attn.{name}_proj.inner" for i in (0, 1) for name in "qo"}
    fuse(model, calls=calls)
    pack(model, leave=unfusable)
    unfused = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    assert unfused == names | {"model.layers.0.mlp.up_proj"}
    assert torch.allclose(logits(model, tokens), expected, atol=1e-4)
