"""Compiled layers against the operators they stand for, and when there are none."""

import pytest
import torch
from torch import Tensor

from slipstream.backends import native
from slipstream.backends.fused import fuse
from slipstream.backends.hf import HFBackend
from slipstream.backends.lean import LeanLayer, Parts
from slipstream.backends.native_parts import GELU, SILU, NativeParts, fits
from slipstream.backends.quantised import OWN, quantise, rounded
from slipstream.backends.shortcuts import TOLERANCE
from tiny import fast, fresh
from tiny import ragged_logits as logits

NAMES = ("llama", "qwen2", "qwen3", "mistral", "gemma3")

pytestmark = pytest.mark.skipif(
    native.kernels() is None, reason="needs a C compiler and a processor with AVX-512 and bfloat16"
)


def layers(backend: HFBackend) -> list[LeanLayer]:
    found = (module.__dict__.get("forward") for module in backend.model.modules())
    return [forward for forward in found if isinstance(forward, LeanLayer)]


def compiled(name: str) -> HFBackend:
    """Heads of 32, which the kernels take."""
    return fast(name, torch.bfloat16, head_dim=32)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def turns(tokens: int, size: int) -> tuple[Tensor, Tensor]:
    angles = torch.linspace(0, 9, tokens)[:, None] / torch.arange(1, size // 2 + 1)
    both = torch.cat([angles, angles], -1)[None]
    return both.cos().bfloat16(), both.sin().bfloat16()


@pytest.mark.parametrize("name", NAMES)
def test_logits_are_those_of_the_models_own_layers(name: str) -> None:
    own, made = fast(name, torch.bfloat16, lean=False, head_dim=32), compiled(name)
    assert layers(made) and all(type(layer.parts) is NativeParts for layer in layers(made))
    expected, got = logits(own), logits(made)
    assert (expected - got).abs().max() <= 0.05 * expected.abs().max()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [0.1, 10.0, 3000.0])
def test_parts_are_those_of_the_operators(name: str, scale: float) -> None:
    """To a few roundings of bfloat16, small activations and such as overflow an exponential."""
    made = layers(compiled(name))[0].parts
    own: Parts = made._parts
    hidden, found = numbers(1, 11, 32, scale=scale), numbers(1, 11, own.heads * own.size, seed=1, scale=scale)
    with torch.inference_mode():
        pairs = [*zip(own.enter(hidden, *turns(11, 32)), made.enter(hidden, *turns(11, 32)), strict=True)]
        pairs.append((own.leave(hidden, found), made.leave(hidden, found)))
    for expected, got in pairs:
        assert expected.shape == got.shape
        assert (expected.float() - got.float()).abs().max() <= 0.02 * expected.float().abs().max()
    assert not torch.equal(pairs[2][0], hidden)  # a layer does something


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_a_token_gets_the_same_bits_whatever_tokens_are_beside_it(name: str) -> None:
    made = layers(compiled(name))[0].parts
    hidden, found = numbers(1, 40, 32), numbers(1, 40, made.heads * 32, seed=1)
    cos, sin = turns(40, 32)
    with torch.inference_mode():
        heads, left = made.enter(hidden, cos, sin)[0], made.leave(hidden, found)
        for first, last in ((0, 1), (7, 8), (3, 11), (5, 25)):
            some = slice(first, last)
            assert torch.equal(made.enter(hidden[:, some], cos[:, some], sin[:, some])[0], heads[:, :, some])
            assert torch.equal(made.leave(hidden[:, some], found[:, some]), left[:, some])
            as_rows = made.leave(hidden[0, some, None], found[0, some, None])
            assert torch.equal(as_rows[:, 0], left[0, some])


def test_the_activation_is_recognised_by_what_it_computes() -> None:
    assert fits(layers(compiled("llama"))[0].parts._parts) == SILU
    assert fits(layers(compiled("gemma3"))[0].parts._parts) == GELU


def test_other_layers_keep_their_operators() -> None:
    assert all(type(layer.parts) is Parts for layer in layers(fast("llama", torch.bfloat16)))  # heads of 8
    assert all(type(layer.parts) is Parts for layer in layers(fast("llama", torch.float32, head_dim=32)))
    parts = layers(compiled("llama"))[0].parts._parts
    parts.act = torch.nn.ReLU()
    assert fits(parts) is None


def test_kernels_that_compute_something_else_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NativeParts, "leave", lambda self, hidden, found: torch.zeros_like(hidden))
    backend = compiled("llama")
    assert layers(backend) and all(type(layer.parts) is Parts for layer in layers(backend))
    monkeypatch.undo()
    expected = logits(fast("llama", torch.bfloat16, lean=False, head_dim=32))
    assert (expected - logits(backend)).abs().max() <= TOLERANCE[torch.bfloat16] * expected.abs().max()


def test_quantised_layers_are_compiled_for_few_tokens_and_keep_their_operators_for_many() -> None:
    model = fresh("llama", dtype=torch.bfloat16, head_dim=32, intermediate_size=64)
    backend = HFBackend(model)
    fuse(model, lambda linear: rounded(linear, "int4"))
    quantise(model, "int4")
    backend.group_queries()
    backend.shorten_layers()
    assert all(type(layer.parts) is NativeParts for layer in layers(backend))
    made = layers(backend)[0].parts
    for tokens in (1, OWN, OWN + 1):
        hidden, found = numbers(1, tokens, 32), numbers(1, tokens, made.heads * 32, seed=1)
        with torch.inference_mode():
            expected, got = made._parts.leave(hidden, found).float(), made.leave(hidden, found).float()
        assert (expected - got).abs().max() <= 0.05 * expected.abs().max()
        assert tokens <= OWN or torch.equal(expected, got)
