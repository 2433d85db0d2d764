"""All layers in one call give the model's own logits in every forward; some models keep their own forward."""

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from slipstream.models.backend_capabilities import RowSegment
from slipstream.models.cpu.compiled_layers import LayerStack
from slipstream.models.decoder.around_layers import Rotations
from slipstream.models.decoder.families import plan_of
from slipstream.models.hf.backend import HFBackend
from slipstream.models.hf.fast_forwards import fuse_layers
from slipstream.models.hf.trials import OwnLogits
from tests.support.markers import needs_kernels
from tests.support.tiny_models import fast
from tests.support.tiny_models import ragged_logits as logits

NAMES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")

pytestmark = needs_kernels


def stacked(name: str, **config: Any) -> HFBackend:
    """A backend whose heads have 64 numbers, for which attention is compiled too."""
    return fast(name, torch.bfloat16, head_dim=64, **config)


@pytest.mark.parametrize("name", NAMES)
def test_a_token_has_the_same_bits_in_every_forward(name: str) -> None:
    backend = stacked(name)
    assert backend.stack is not None
    backend.reserve(3, 64)
    tokens = torch.randint(0, backend.vocab_size, (1, 12), generator=torch.Generator().manual_seed(3))
    whole = backend.forward(tokens, [0], first_slot=0, logits=True)[0]
    single = [backend.forward(tokens[:, i : i + 1], [i], first_slot=1, logits=True)[0, 0] for i in range(12)]
    assert torch.equal(whole, torch.stack(single))
    segments = [RowSegment(1, 12, 1), RowSegment(2, 0, 12)]
    ragged = backend.forward_ragged(torch.cat([tokens[0, :1], tokens[0]]), segments, widths=(1, 2, 4, 8, 16))
    assert torch.equal(ragged[1:], whole)
    kept = backend.answer(tokens, 0, slot=0, columns=torch.tensor([2, 7]))[0]
    assert torch.equal(kept, whole[[2, 7]])


class Operators(TorchDispatchMode):
    """Counts PyTorch's operators."""

    num_called = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_called += 1
        return function(*args, **(kwargs or {}))


def test_a_forward_of_one_token_takes_few_operators_of_pytorch() -> None:
    """While weights stream through the processor's caches, each operator takes tens of microseconds."""
    backend = stacked("llama")
    backend.reserve(1, 64)
    token = torch.ones(1, 1, dtype=torch.int64)
    backend.forward(token, [0], first_slot=0, logits=True)
    with Operators() as operators:
        backend.forward(token, [1], first_slot=0, logits=True)
    assert operators.num_called <= 20


@pytest.mark.parametrize("name", NAMES)
def test_kept_hidden_states_enter_and_leave_the_layers_as_in_the_models_own_forward(name: str) -> None:
    backend, plain = stacked(name), HFBackend(stacked(name).model)
    layers = [0, 1, backend.num_layers]
    tokens = torch.randint(0, backend.vocab_size, (1, 9), generator=torch.Generator().manual_seed(5))
    kept = []
    for runner in (backend, plain):
        runner.reserve(1, 16)
        runner.forward(tokens[:, :4], [0], first_slot=0, logits=True)  # before any are kept
        runner.keep_hidden_states(layers)
        runner.forward(tokens[:, :6], [0], first_slot=0, logits=False)
        runner.forward(tokens[:, 6:], [6], first_slot=0, logits=True)
        states = runner.hidden_states(layers, 0, 0, 9)
        assert states is not None
        kept.append(states)
    assert backend.stack is not None and plain.stack is None
    assert torch.equal(*kept)


def test_the_cache_can_grow_and_be_released() -> None:
    backend = stacked("llama")
    tokens = torch.randint(0, backend.vocab_size, (1, 6), generator=torch.Generator().manual_seed(4))
    backend.reserve(1, 16)
    first = backend.forward(tokens, [0], first_slot=0, logits=True)
    backend.reserve(2, 2000)
    longer = backend.forward(tokens[:, 5:], [5], first_slot=0, logits=True)
    assert torch.equal(longer[:, -1], first[:, -1])
    backend.release()
    assert all(layer.keys is None for layer in backend.cache.layers)
    backend.reserve(1, 16)
    assert torch.equal(backend.forward(tokens, [0], first_slot=0, logits=True), first)


def test_a_model_that_computes_more_around_its_layers_keeps_its_own_forward() -> None:
    backend = fast("llama", torch.bfloat16, fused=False, head_dim=64)
    model: Any = backend.model
    forward = model.forward

    def doubled(*inputs: Any, **options: Any) -> Any:
        output = forward(*inputs, **options)
        output.logits = 2 * output.logits
        return output

    model.forward = doubled
    fuse_layers(backend)
    assert backend.stack is None and backend.ragged


@pytest.mark.parametrize("cap", [30.0, 1000.0])
def test_capped_logits_stay_capped(cap: float) -> None:
    """Also where the cap changes logits by less than rounding."""
    backend, without = stacked("gemma3", final_logit_softcapping=cap), stacked("gemma3")
    assert backend.stack is not None and without.stack is not None
    capped = cap * torch.tanh(logits(without) / cap)
    assert (logits(backend) - capped).square().mean().sqrt() <= 0.01 * capped.std()


@pytest.mark.parametrize("place", ["embedding", "layer", "head"])
def test_a_model_that_changes_values_between_its_parts_keeps_its_own_forward(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = fast("llama", torch.bfloat16, fused=False, head_dim=64)
    model: Any = backend.model
    part = {"embedding": model.model.layers[0], "layer": model.model.layers[1], "head": model.lm_head}[place]
    call = type(part).__call__

    def louder(self: Any, hidden: Tensor, *inputs: Any, **options: Any) -> Any:
        return call(self, hidden * 1.02 if self is part else hidden, *inputs, **options)

    monkeypatch.setattr(type(part), "__call__", louder)
    fuse_layers(backend)
    assert backend.stack is None and backend.ragged


def test_layers_whose_attention_is_not_compiled_are_called_one_by_one() -> None:
    backend = fast("llama", torch.bfloat16, head_dim=608)
    assert backend.stack is None and backend.ragged


def test_a_stack_that_computes_other_logits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(self: LayerStack, tokens: Tensor, *rest: Any) -> Tensor:
        return torch.ones(*tokens.shape, self._model.config.vocab_size, dtype=torch.bfloat16)

    monkeypatch.setattr(LayerStack, "logits", ones)
    assert fast("llama", torch.bfloat16, head_dim=64).stack is None


def test_a_stack_is_compared_with_the_layers_it_is_made_of() -> None:
    """Differences of layers add up, so the reference is the layers, not the model's logits, which are wrong here."""
    backend = fast("llama", torch.bfloat16, fused=False, head_dim=64)
    own_logits = OwnLogits(backend)
    own_logits.passed.add("fused layers")
    own_logits.logits = 2 * own_logits.logits[0], own_logits.logits[1]
    fuse_layers(backend, own_logits)
    assert backend.stack is not None


class Angles(torch.nn.Module):
    """Rotation angles, some of which depend on the number of positions."""

    def __init__(self, rope_type: str) -> None:
        super().__init__()
        self.rope_type, self.calls = rope_type, 0

    def forward(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        self.calls += 1
        angles = positions[..., None].float() / (positions.max() if self.rope_type == "dynamic" else 7.0)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


@pytest.mark.parametrize(("rope_type", "calls"), [("default", 1), ("dynamic", 2), ("longrope", 2)])
def test_rotations_are_kept_where_they_depend_on_the_position_alone(rope_type: str, calls: int) -> None:
    module = Angles(rope_type)
    plan = plan_of(transformers.LlamaConfig(num_hidden_layers=1), [None])
    rotations, hidden = Rotations(module, ["full_attention"], plan), torch.zeros(1, 3, 8)
    for positions in (torch.tensor([[4, 5, 9]]), torch.tensor([[1, 2, 3]])):
        ((cosines, sines),) = rotations.ropes(positions, hidden, 16)
        expected = module(hidden, positions)
        assert torch.equal(cosines, expected[0]) and torch.equal(sines, expected[1])
    assert module.calls - 2 == calls
    rotations.ropes(torch.tensor([[30]]), torch.zeros(1, 1, 8), 64)
    assert module.calls - 2 == calls + 1
