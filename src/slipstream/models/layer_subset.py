"""Some layers of a loaded model as a backend of their own, on the model's memory, which both read and write."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slipstream.core.interfaces import Backend
from slipstream.errors import UsageError
from slipstream.models.toy import ToyBackend

if TYPE_CHECKING:
    from slipstream.models.hf.backend import HFBackend


def num_layers(backend: Backend) -> int:
    """How many layers there are to choose from; for the toy, how many lengths of context it mixes."""
    if isinstance(backend, ToyBackend):
        return backend._order + 1
    from slipstream.models.hf.decoder_layers import num_decoder_layers

    return num_decoder_layers(_model(backend))


def identity(backend: Backend) -> str:
    """A name that another model would not have: a digest of its weights."""
    if isinstance(backend, ToyBackend):
        return f"toy-{backend._order}"
    from slipstream.models.hf.decoder_layers import digest

    return digest(_model(backend))


def layer_subset(backend: Backend, layers: Sequence[int]) -> Backend:
    """A backend of the given layers of a model.

    layers: numbers from 0 on, rising. Raises `UsageError` where the model's layers cannot be told.
    """
    check_layers(layers, num_layers(backend))
    if isinstance(backend, ToyBackend):
        return LayerSubsetToy(backend, layers)
    from slipstream.models.hf.decoder_layers import layer_subset_model

    return layer_subset_model(_model(backend), layers)


def _model(backend: Backend) -> HFBackend:
    from slipstream.models.hf.backend import HFBackend  # here, because the toy does without transformers

    if not isinstance(backend, HFBackend):
        raise UsageError(
            f"drafter='layer_skip': {type(backend).__name__} has no layers; allowed: Hugging Face models, toy"
        )
    return backend


def check_layers(layers: Sequence[int], count: int) -> None:
    """Refuse layers that a model of `count` layers does not have, or not in this order."""
    if not layers or list(layers) != sorted(set(layers)) or layers[0] < 0 or layers[-1] >= count:
        raise UsageError(f"layers {list(layers)}; allowed: at least one of 0 to {count - 1}, each once, rising")


class LayerSubsetToy(ToyBackend):
    """The toy with some lengths of context only; everything else is `whole`'s own."""

    def __init__(self, whole: ToyBackend, layers: Sequence[int]) -> None:
        self._whole, self._distributions = whole, {}
        kept = {context: counts for context, counts in whole._counts.items() if len(context) in layers}
        self._counts = defaultdict(lambda: defaultdict(int), kept)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def reserve(self, rows: int, length: int) -> None:
        """Grow the common memory."""
        self._whole.reserve(rows, length)
