"""A Hugging Face model with only some of its decoder layers: the same weights, its own forward.

The decoder layers are found by structure: the one `nn.ModuleList` with an entry per layer whose entries run in order,
once each. A skipped layer is replaced by one that returns its input, so every other layer keeps its number, its
attention type and its place in the KV cache. Only the modules that contain that list are copied, without their
children; everything else is shared, and the model itself does not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.models.cpu.block_linear import block_linears
from slipstream.models.cpu.structs import LANES

DIGEST_ROWS = 64  # rows of the embedding that enter a model's digest


def digest(model: Any) -> str:
    """A digest of a model's weights: the embedding's first rows and the norms, which packing and fusing do not change.

    For quantized weights it includes the first outputs of each layer, since a model can be quantized in many ways.
    """
    norms = [p for name, p in model.named_parameters() if p.dim() == 1 and name.endswith("weight")]
    digested = hashlib.sha256(f"{model.config.get_text_config().num_hidden_layers} layers".encode())
    for weight in (model.get_input_embeddings().weight[:DIGEST_ROWS], *norms):
        digested.update(weight.detach().float().cpu().numpy().tobytes())
    for part in (part for linear in block_linears(model) for part in linear.parts):
        digested.update(part.data[: len(part.data) // -(-part.outputs // LANES)].numpy().tobytes())
    return digested.hexdigest()[:20]


def kinds(model: Any, windows: Sequence[int | None]) -> list[Hashable]:
    """A description of each layer: its modules' classes and sizes, and the window of its attention.

    Raises `UsageError` where the layers are not found.
    """
    _, layers = decoder_layers(model, len(windows))
    return [(window, _modules(layer)) for layer, window in zip(layers, windows, strict=True)]


def _modules(layer: nn.Module) -> Hashable:
    return tuple(
        (
            name,
            type(module).__name__,
            tuple(getattr(module, size, None) for size in ("in_features", "out_features")),
            tuple((tuple(p.shape), p.dtype) for p in module.parameters(recurse=False)),
        )
        for name, module in layer.named_modules()
    )


class Skip(nn.Module):
    """Replaces a skipped layer: returns its input, shaped as the layer's output.

    extra: number of outputs after the hidden states in a tuple; None if the layer returns a tensor. Attributes that a
    model reads from its layers, such as the type of attention, are the layer's own.
    """

    def __init__(self, layer: nn.Module, extra: int | None) -> None:
        super().__init__()
        self._extra = extra
        attributes = self.__dict__
        for name, value in layer.__dict__.items():
            if not name.startswith("_") and name != "forward":
                attributes.setdefault(name, value)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Returns the hidden states [B, W, H] unchanged."""
        hidden = inputs[0] if inputs else options["hidden_states"]
        return hidden if self._extra is None else (hidden, *[None] * self._extra)


def make_layer_subset(model: Any, count: int, layers: Sequence[int]) -> Any:
    """The model with the given layers only; two forwards of two tokens check that exactly these run."""
    path, decoder = decoder_layers(model, count)
    if shares_keys(model):
        raise _refusal(model, "some layers read keys and values of others")
    extra = _outputs_beside(model, decoder)
    chosen = nn.ModuleList(layer if i in layers else Skip(layer, extra) for i, layer in enumerate(decoder))
    subset = _with_child(model, path.split("."), chosen)
    expected = [decoder[i] for i in layers]
    if (seen := _order(subset, decoder)) != expected:
        raise _refusal(model, f"of {len(expected)} layers chosen, {len(seen)} ran: something wraps its forward")
    return subset


def _with_child(module: Any, path: Sequence[str], child: nn.Module) -> Any:
    """A copy of a module that differs in one descendant; everything else is shared."""
    changed = copy(module)
    changed.__dict__["_modules"] = dict(module._modules)
    inner = child if len(path) == 1 else _with_child(module._modules[path[0]], path[1:], child)
    changed._modules[path[0]] = inner
    return changed


def shares_keys(model: Any) -> bool:
    """True if some of a model's layers read the keys and values of others."""
    return "reuse" in (getattr(model.config.get_text_config(), "kv_sharing_modes", None) or ())


def decoder_layers(model: Any, count: int) -> tuple[str, nn.ModuleList]:
    """The path of the list of decoder layers, and the list."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise _refusal(model, f"it has no list of {count} layers")
    in_order = [(name, layers) for name, layers in lists.items() if _order(model, layers) == list(layers)]
    if len(in_order) != 1:
        raise _refusal(model, f"{len(in_order)} of its lists of {count} modules run in order, once each")
    return in_order[0]


def _outputs_beside(model: Any, layers: Iterable[nn.Module]) -> int | None:
    """The number of outputs that layers return after the hidden states; None if they return a single tensor."""
    forms: set[int | None] = set()

    def note_form(layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        hidden = inputs[0] if inputs else options.get("hidden_states")
        first = output[0] if isinstance(output, tuple) else output
        if not (isinstance(hidden, Tensor) and isinstance(first, Tensor) and hidden.shape == first.shape):
            raise _refusal(model, f"{type(layer).__name__} does not map hidden states to hidden states")
        forms.add(len(output) - 1 if isinstance(output, tuple) else None)

    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_hook(note_form, with_kwargs=True))
        _run_two_tokens(model)
    if len(forms) != 1:
        raise _refusal(model, "its layers differ in what they return")
    return forms.pop()


def _order(model: Any, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Those of these layers that run in a forward of two tokens, in the order in which they run."""
    seen: list[nn.Module] = []
    with ExitStack() as hooks:
        for layer in layers:
            hooks.enter_context(layer.register_forward_pre_hook(lambda module, _: seen.append(module)))
        _run_two_tokens(model)
    return seen


@torch.inference_mode()
def _run_two_tokens(model: Any) -> None:
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise _refusal(model, f"a forward of two tokens fails: {error}") from error


def _refusal(model: Any, reason: str) -> UsageError:
    return UsageError(
        f"the layers of {type(model).__name__} cannot be found: {reason}; allowed with draft heads and "
        "drafter='layer_skip': models whose decoder layers are one nn.ModuleList used in order"
    )
