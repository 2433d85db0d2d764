"""The surroundings of a model's decoder layers: rotations, a second embedding, and a check that nothing else runs."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.models.decoder.fused_layer import Rope, angles, decoder_module
from slipstream.models.decoder.plan import DecoderPlan, UnknownLayerError

STATIC = frozenset(
    ("default", "linear", "llama3", "yarn", "proportional")
)  # types of RoPE whose angles depend only on the position


class Rotations:
    """A model's rotary cosines and sines by position, for each type of layer that has its own.

    If they depend only on the position, they are computed once and then read from a table.
    """

    def __init__(self, module: nn.Module | None, kinds: Sequence[str], plan: DecoderPlan) -> None:
        """module: None if no layer rotates. kinds: the distinct types of the model's layers."""
        rope_types = getattr(module, "rope_type", None)
        self._module, self._plan = module, plan
        self._options: list[dict[str, str]] = [] if module is None else [{}]
        if module is not None and "layer_type" in inspect.signature(type(module).forward).parameters:
            self._options = [{"layer_type": kind} for kind in kinds]
        distinct_types = set(rope_types.values()) if isinstance(rope_types, dict) else {rope_types}
        self._is_static, self._table = distinct_types <= STATIC, list[Rope]()

    def __len__(self) -> int:
        return len(self._options)

    def ropes(self, positions: Tensor, hidden: Tensor, max_positions: int) -> list[Rope]:
        """Cosines and sines [B, W, rotated] of each kind, as `angles` makes them for hidden states [B, W, H].

        positions: [B, W], all below `max_positions`.
        """
        if not self._is_static:
            return self.computed(hidden, positions)
        if not self._table or len(self._table[0][0]) < max_positions or self._table[0][0].dtype != hidden.dtype:
            positions_in_order = torch.arange(max_positions)[None]
            self._table = [(cosines[0], sines[0]) for cosines, sines in self.computed(hidden, positions_in_order)]
        return [(cosines[positions], sines[positions]) for cosines, sines in self._table]

    def computed(self, hidden: Tensor, positions: Tensor) -> list[Rope]:
        """The result of `ropes`, computed by the model's own module instead of read from the table."""
        module: Any = self._module
        ropes = (module(hidden, positions, **options) for options in self._options)
        return [angles(rope, positions, hidden.dtype, self._plan.layers[0]) for rope in ropes]


def layer_rotations(model: Any, inner: nn.Module, plan: DecoderPlan) -> tuple[Rotations, list[int]]:
    """The rotations of a model's layers, and for each layer the index of its own. inner: see `decoder_module`."""
    layer_types = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * len(plan.layers)
    rotating = [kind for kind, layer in zip(layer_types, plan.layers, strict=True) if layer.rotated]
    kinds = sorted(set(rotating or layer_types))
    rotations = Rotations(inner.get_submodule(plan.rotary) if plan.rotates else None, kinds, plan)
    return rotations, [kinds.index(kind) if len(rotations) > 1 and kind in kinds else 0 for kind in layer_types]


def layer_inputs(
    inner: nn.Module, plan: DecoderPlan, tokens: Tensor, entering: Tensor, norm: Callable[[Tensor], Tensor]
) -> Tensor:
    """Each layer's numbers from a second embedding, [B, W, layers, numbers], for tokens [B, W].

    inner: see `decoder_module`; entering: [B, W, H], the first layer's input; norm: computes the plan's norm.
    """
    second: Any = plan.second_embedding
    projected = inner.get_submodule(second.projection)(entering) * second.projected
    embedded = inner.get_submodule(second.embedding)(tokens)
    shape = len(plan.layers), second.size
    inputs: Tensor = (norm(projected.unflatten(-1, shape)) + embedded.unflatten(-1, shape)) * second.factor
    return inputs


@torch.inference_mode()
def check_nothing_between(model: Any, layers: Sequence[nn.Module], plan: DecoderPlan) -> None:
    """Raise `UnknownLayerError` where a model's embedding, layers, norm and output layer are not connected as planned.

    In a forward of two tokens, each of these modules must receive exactly the bits that the one before it returned; the
    first layer and the caller must receive what `plan` makes of them, up to rounding, and each layer its numbers from a
    second embedding.
    """
    inner = decoder_module(model, plan)
    norm = inner.get_submodule(plan.last_norm)
    chain = [model.get_input_embeddings(), *layers, norm, model.get_output_embeddings()]
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    received: list[Any] = []

    def record(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        entering = inputs[0] if inputs else options.get("hidden_states")
        calls.append((module, entering if isinstance(entering, Tensor) else torch.empty(0), output))
        received.extend(x for x in inputs[1:] if x is not None)

    with ExitStack() as hooks:
        for module in chain:
            hooks.enter_context(module.register_forward_hook(record, with_kwargs=True))
        ids = torch.tensor([[1, 0]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits
    if [module for module, _, _ in calls] != chain:
        raise UnknownLayerError(
            "its embedding, layers, norm and output layer do not run one after the other, once each"
        )
    inputs_of_next = [*(entering for _, entering, _ in calls[1:]), logits]
    planned = {chain[0]: plan.enter, chain[-1]: plan.finish}
    for (module, _, output), entering in zip(calls, inputs_of_next, strict=True):
        expected = planned[module](output) if module in planned else output
        if not isinstance(expected, Tensor) or expected.shape != entering.shape:
            raise UnknownLayerError(f"it changes the shape of what {type(module).__name__} returns")
        rounding = 0.0 if expected is output else 2 * torch.finfo(expected.dtype).eps
        if not torch.allclose(expected, entering.to(expected.dtype), rtol=rounding, atol=0.0):
            raise UnknownLayerError(f"it changes what {type(module).__name__} returns")
    if plan.second_embedding is not None:
        own_norm = inner.get_submodule(plan.second_embedding.norm)
        for_layers = layer_inputs(inner, plan, ids, calls[1][1], own_norm).unbind(2)
        if len(received) != len(for_layers) or not all(map(torch.equal, received, for_layers)):
            raise UnknownLayerError("it gives its layers different numbers from its second embedding")
