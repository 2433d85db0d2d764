"""All decoder layers of a model in one call, between its own embedding and its own output layer.

What Python does for each layer, and the model around them, is a sixth to a fifth of a small model's time for one token.
The specification is the model's own forward over its compiled layers, with whose logits those of a stack are compared
before it is used.
"""

from __future__ import annotations

import ctypes
import inspect
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from slipstream.models.cpu.c_structs import StackedLayerStruct
from slipstream.models.cpu.kernel_build import address
from slipstream.models.cpu.layer_calls import LayerCalls, PreparedForward, rotation
from slipstream.models.decoder.cache import RaggedCache
from slipstream.models.decoder.fused_layer import FusedLayer, RootMeanSquare, Rope, UnknownLayerError

AROUND = {"rotary_emb", "layers", "norm"}  # the children of the module that calls the layers
STATIC = frozenset(("default", "linear", "llama3", "yarn"))  # kinds of RoPE whose angles depend on the position alone


class Rotations:
    """The cosines and sines of a model's positions, of each kind of layer that has its own.

    Where they depend on the position alone they are computed once for many positions.
    """

    def __init__(self, module: nn.Module, kinds: Sequence[str]) -> None:
        """kinds: of layers, each once."""
        types = getattr(module, "rope_type", None)
        self._module = module
        self._options: list[dict[str, str]] = [{}]
        if "layer_type" in inspect.signature(type(module).forward).parameters:
            self._options = [{"layer_type": kind} for kind in kinds]
        named = set(types.values()) if isinstance(types, dict) else {types}
        self._is_static, self._known = named <= STATIC, list[Rope]()

    def __len__(self) -> int:
        return len(self._options)

    def at(self, positions: Tensor, hidden: Tensor, most: int) -> list[Rope]:
        """Cosines and sines [B, W, size] of each kind at positions [B, W] below `most`, in the type of hidden states
        [B, W, H]."""
        if not self._is_static:
            return [self._of(hidden, positions, options) for options in self._options]
        if not self._known or len(self._known[0][0]) < most or self._known[0][0].dtype != hidden.dtype:
            every = torch.arange(most)[None]
            found = [self._of(hidden, every, options) for options in self._options]
            self._known = [(cosines[0], sines[0]) for cosines, sines in found]
        size = hidden.shape[:2]
        return [
            (cosines[positions].expand(*size, -1), sines[positions].expand(*size, -1)) for cosines, sines in self._known
        ]

    def _of(self, hidden: Tensor, positions: Tensor, options: dict[str, str]) -> Rope:
        cosines, sines = self._module(hidden, positions, **options)
        return cosines, sines


class LayerStack:
    """A model's forward, its decoder layers in one call."""

    def __init__(self, model: Any, layers: Sequence[FusedLayer]) -> None:
        """layers: all of the model's, compiled. Raises `UnknownLayerError` with the reason where it cannot be done."""
        ops = [layer.ops for layer in layers if isinstance(layer.ops, LayerCalls)]
        if len(ops) < len(layers):
            raise UnknownLayerError("they are not all compiled")
        inner = _caller_of(model, len(layers))
        self._model, self._ops, self._specs = model, ops, [layer.spec for layer in layers]
        self._functions, self._norm = ops[0].functions, ops[0].norm(RootMeanSquare(inner.get_submodule("norm")))
        of_layers = getattr(model.config.get_text_config(), "layer_types", None) or ["full_attention"] * len(layers)
        kinds = sorted(set(of_layers))
        self._rotations = Rotations(inner.get_submodule("rotary_emb"), kinds)
        which = [kinds.index(kind) if len(self._rotations) > 1 else 0 for kind in of_layers]
        self._structs = (StackedLayerStruct * len(layers))(
            *(
                StackedLayerStruct(one.this, None, None, 0, spec.window or 0, kind, spec.scaling)
                for one, spec, kind in zip(ops, self._specs, which, strict=True)
            )
        )
        self._cached: list[ReferenceType[Tensor]] = []  # the keys whose addresses the structs have
        self._scratch = dict[int, int]()  # by tokens

    def logits(self, tokens: Tensor, positions: Tensor, cache: RaggedCache, keep: int | Tensor) -> Tensor | None:
        """[B, W', vocabulary] of tokens [B, W] at these positions; None where the layers are not computed whole.

        keep: of which columns; 0 of all, 1 of the last.
        """
        hidden: Tensor = self._model.get_input_embeddings()(tokens)
        if not all(one.takes(hidden) for one in self._ops) or not self._point_to(cache, hidden):
            return None
        hidden, ready = hidden.contiguous(), self._ops[0].prepared(cache, hidden)
        self._compute(hidden, positions, ready, cache.shape[1])
        kept = (hidden[:, -keep:] if isinstance(keep, int) else hidden[:, keep]).contiguous()
        normed, size = torch.empty_like(kept), kept.shape[-1]
        norm = ctypes.addressof(self._norm)
        self._functions.normalise(norm, kept.data_ptr(), kept.numel() // size, size, normed.data_ptr())
        found: Tensor = self._model.get_output_embeddings()(normed)
        return found

    def _point_to(self, cache: RaggedCache, hidden: Tensor) -> bool:
        """Give the structs the addresses of the cache's keys and values; whether these are of the right type."""
        there = [cache.layers[spec.index].keys for spec in self._specs]
        if self._cached and all(
            keys is not None and keys is known() for keys, known in zip(there, self._cached, strict=True)
        ):
            return True
        self._cached = []
        for one, spec, struct in zip(self._ops, self._specs, self._structs, strict=True):
            keys, values = one.cached(cache, spec, hidden)
            if keys.dtype != hidden.dtype:
                self._cached = []
                return False
            struct.keys, struct.values, struct.length = keys.data_ptr(), values.data_ptr(), keys.shape[2]
            self._cached.append(ref(keys))
        return True

    def _compute(self, hidden: Tensor, positions: Tensor, ready: PreparedForward, most: int) -> None:
        tokens = hidden.numel() // hidden.shape[-1]
        ropes = [rotation(rope, hidden, rope[0].shape[-1]) for rope in self._rotations.at(positions, hidden, most)]
        pointers = (ctypes.c_void_p * (2 * len(ropes)))(*(address(part) for rope in ropes for part in rope))
        if tokens not in self._scratch:
            self._scratch[tokens] = max(one.scratch(tokens) for one in self._ops)
        scratch = ready.space(self._scratch[tokens])
        self._functions.all_layers(
            ctypes.addressof(self._structs),
            len(self._ops),
            ctypes.addressof(ready.struct),
            hidden.data_ptr(),
            tokens,
            ctypes.addressof(pointers),
            scratch.data_ptr(),
        )


def _caller_of(model: Any, count: int) -> nn.Module:
    """The module that calls the layers."""
    inner = next((module for module in model.modules() if dict(module.named_children()).keys() >= AROUND), None)
    if inner is None or len(inner.get_submodule("layers")) != count:
        raise UnknownLayerError(f"no module has {', '.join(sorted(AROUND))} and these layers")
    found: nn.Module = inner
    return found


@torch.inference_mode()
def check_around(model: Any, layers: Sequence[nn.Module]) -> None:
    """Raise `UnknownLayerError` where a model computes anything between its embedding, layers, norm and output layer.

    A forward of two tokens shows it: each is given the bits that the one before it returned.
    """
    norm = _caller_of(model, len(layers)).get_submodule("norm")
    chain = [model.get_input_embeddings(), *layers, norm, model.get_output_embeddings()]
    passed: list[tuple[nn.Module, Tensor, Tensor]] = []

    def look(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        into = inputs[0] if inputs else options.get("hidden_states")
        passed.append((module, into if isinstance(into, Tensor) else torch.empty(0), output))

    hooks = [module.register_forward_hook(look, with_kwargs=True) for module in chain]
    try:
        ids = torch.tensor([[1, 0]], device=model.device)
        logits = model(input_ids=ids, use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if [module for module, _, _ in passed] != chain:
        raise UnknownLayerError(
            "its embedding, layers, norm and output layer do not run one after the other, once each"
        )
    given = [*(into for _, into, _ in passed[1:]), logits]
    for (module, _, output), into in zip(passed, given, strict=True):
        if not isinstance(output, Tensor) or not torch.equal(output, into.to(output.dtype)):
            raise UnknownLayerError(f"it changes what {type(module).__name__} returns")
