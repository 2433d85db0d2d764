"""A Hugging Face model with some of its decoder layers only: the same weights, the same memory, its own forward.

The decoder layers are found by structure: the one `nn.ModuleList` with an entry per layer whose entries run in order,
once each. A layer that is left out is replaced by one that hands its input on, so that every other layer keeps its
number, its attention type and its place in the memory. Of the modules on the way to that list only the table of
children is copied, everything else is shared; the model itself stays as it is.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.cuda.graph_memory import Bucket
from slipstream.models.cuda.graph_store import Capturer, CudaCapturer, GraphStore, Rerun
from slipstream.models.hf.backend import HFBackend

IDENTIFYING = 64  # rows of the embedding that take part in a model's digest


def layer_subset_model(whole: HFBackend, layers: Sequence[int]) -> HFBackend:
    """The given layers of a model, on its memory."""
    subset = make_layer_subset(whole.model, num_decoder_layers(whole), layers)
    return LayerSubsetGraphed(whole, subset) if isinstance(whole, GraphedBackend) else LayerSubsetHF(whole, subset)


def num_decoder_layers(backend: HFBackend) -> int:
    """How many layers the model's configuration says it has."""
    count: int = backend.model.config.get_text_config().num_hidden_layers
    return count


def digest(backend: HFBackend) -> str:
    """Of a model's weights: the embedding's first rows and the norms, which packing and fusing leave alone."""
    norms = [p for name, p in backend.model.named_parameters() if p.dim() == 1 and name.endswith("weight")]
    made = hashlib.sha256(f"{num_decoder_layers(backend)} layers".encode())
    for weight in (backend.model.get_input_embeddings().weight[:IDENTIFYING], *norms):
        made.update(weight.detach().float().cpu().numpy().tobytes())
    return made.hexdigest()[:20]


class LayerSubsetHF(HFBackend):
    """A model's twin on the model's own memory; everything but the twin is looked up in `whole` at every use."""

    def __init__(self, whole: HFBackend, subset: Any) -> None:
        self._whole, self.model = whole, subset

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def reserve(self, rows: int, length: int) -> None:
        """Grow the common memory."""
        self._whole.reserve(rows, length)


class LayerSubsetGraphed(GraphedBackend):
    """The same with graphs of its own, dropped when the common memory has moved. capturer: as in `GraphedBackend`."""

    def __init__(self, whole: GraphedBackend, subset: Any, capturer: Capturer | None = None) -> None:
        self._whole, self.model = whole, subset
        self._place = whole._aimed.shape
        if capturer is None:
            capturer = CudaCapturer(whole.device) if whole.device.type == "cuda" else Rerun()
        self._graphs = GraphStore(f"{type(subset).__name__} (some layers)", capturer)
        if whole._graphs.reason is not None:
            self._graphs.disable(whole._graphs.reason)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def reserve(self, rows: int, length: int) -> None:
        """Grow the common memory."""
        self._whole.reserve(rows, length)

    def _bucket(self, starts: Sequence[int], width: int, end: int) -> Bucket | None:
        if self._place != self._aimed.shape:
            self._graphs.clear()
            self._place = self._aimed.shape
        return super()._bucket(starts, width, end)


class Skip(nn.Module):
    """Stands where a layer was left out: hands its input on, in the form the layer would.

    extra: how many further outputs the layer has beside its hidden states, None if it returns them bare. Whatever else
    the model asks of the layer, its attention type say, the layer itself answers.
    """

    def __init__(self, layer: nn.Module, extra: int | None) -> None:
        super().__init__()
        self._layer, self._extra = (layer,), extra

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_layer"][0], name)

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The hidden states [B, W, H] as they came."""
        hidden = inputs[0] if inputs else options["hidden_states"]
        return hidden if self._extra is None else (hidden, *[None] * self._extra)


def make_layer_subset(model: Any, count: int, layers: Sequence[int]) -> Any:
    """The model with the given layers only; two forwards of two tokens make sure that it runs just these."""
    path, decoder = _decoder_layers(model, count)
    extra = _outputs_beside(model, decoder)
    kept = nn.ModuleList(layer if i in layers else Skip(layer, extra) for i, layer in enumerate(decoder))
    subset = _with_child(model, path.split("."), kept)
    expected = [decoder[i] for i in layers]
    if (seen := _order(subset, decoder)) != expected:
        raise _refusal(model, f"of {len(expected)} layers kept, {len(seen)} ran: something wraps its forward")
    return subset


def _with_child(module: Any, path: Sequence[str], child: nn.Module) -> Any:
    """A copy of a module that differs in one descendant; everything else is shared."""
    made = copy(module)
    made.__dict__["_modules"] = dict(module._modules)
    inner = child if len(path) == 1 else _with_child(module._modules[path[0]], path[1:], child)
    made._modules[path[0]] = inner
    return made


def _decoder_layers(model: Any, count: int) -> tuple[str, nn.ModuleList]:
    """Where the list of decoder layers is, and the list."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == count
    }
    if not lists:
        raise _refusal(model, f"it has no list of {count} layers")
    found = [(name, layers) for name, layers in lists.items() if _order(model, layers) == list(layers)]
    if len(found) != 1:
        raise _refusal(model, f"{len(found)} of its lists of {count} modules run in order, once each")
    return found[0]


def _outputs_beside(model: Any, layers: Iterable[nn.Module]) -> int | None:
    """What layers return beside their hidden states: None if these come bare, else the number of further outputs."""
    forms: set[int | None] = set()

    def look(layer: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
        hidden = inputs[0] if inputs else options.get("hidden_states")
        first = output[0] if isinstance(output, tuple) else output
        if not (isinstance(hidden, Tensor) and isinstance(first, Tensor) and hidden.shape == first.shape):
            raise _refusal(model, f"{type(layer).__name__} does not map hidden states to hidden states")
        forms.add(len(output) - 1 if isinstance(output, tuple) else None)

    hooks = [layer.register_forward_hook(look, with_kwargs=True) for layer in layers]
    try:
        _two_tokens(model)
    finally:
        for hook in hooks:
            hook.remove()
    if len(forms) != 1:
        raise _refusal(model, "its layers differ in what they return")
    return forms.pop()


def _order(model: Any, layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Which of these layers run in a forward of two tokens, in order."""
    seen: list[nn.Module] = []
    hooks = [layer.register_forward_pre_hook(lambda module, _: seen.append(module)) for layer in layers]
    try:
        _two_tokens(model)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.inference_mode()
def _two_tokens(model: Any) -> None:
    try:
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64, device=model.device), use_cache=False)
    except (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError) as error:
        raise _refusal(model, f"a forward of two tokens fails: {error}") from error


def _refusal(model: Any, reason: str) -> UsageError:
    return UsageError(
        f"drafter='layer_skip': the layers of {type(model).__name__} cannot be told: {reason}; allowed: models whose decoder "
        "layers are one nn.ModuleList used in order, or another drafter"
    )
