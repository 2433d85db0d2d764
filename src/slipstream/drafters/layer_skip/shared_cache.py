"""Some layers of the target as a draft model: a session on the target's own memory, and the choice that is remembered.

Nothing is computed twice to get ready: the chosen layers read the target's keys and values of the committed tokens.
What they write stands at positions that the verification of the same round writes again, in every layer and before it
reads them; so the target's forwards see only what the target itself wrote.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path

from torch import Tensor

from slipstream.core.cache_state import EXACT_FIT
from slipstream.core.interfaces import Backend
from slipstream.core.session import InputBatch, Session
from slipstream.core.types import Row
from slipstream.errors import UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.layer_subset import check_layers, identity, layer_subset, num_layers

SHARE = 0.75  # of the layers


@dataclass
class SharedCacheSession(Session):
    """Scores drafts with some layers of `whole`'s model, from what `whole`'s memory holds of the committed tokens.

    It serves to draft: a draft begins with a call without draft tokens, and everything it wrote is forgotten by the
    next. `whole` must score the rows, or nothing, in between.
    """

    whole: Session = field(kw_only=True)

    def __post_init__(self) -> None:
        self._debug = self.whole._debug  # one memory, one ledger

    @staticmethod
    def of(whole: Session, layers: Sequence[int]) -> SharedCacheSession:
        """The given layers, from 0 on and rising, of a session's model."""
        return SharedCacheSession(layer_subset(whole.backend, layers), EXACT_FIT, whole=whole)

    def reserve(self, rows: int, length: int) -> None:
        """Make room in the common memory."""
        self.whole.reserve(rows, length)

    def forget(self) -> None:
        """Drop what the common memory holds."""
        self.whole.forget()

    def _input_batch(self, rows: Sequence[Row], draft: Tensor, keep: int) -> InputBatch:
        if not draft.shape[1]:  # a new draft begins where the target's memory ends
            self.whole.prefill(rows)
            self.slot_states[:] = map(copy, self.whole.slot_states)
        return super()._input_batch(rows, draft, keep)


def remembered_layers(backend: Backend) -> tuple[int, ...] | None:
    """The layers a search has found best for this model, or None if there was none."""
    file = layers_file(backend)
    if not file.exists():
        return None
    try:
        layers = tuple(int(i) for i in json.loads(file.read_text())["layers"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"layers file {str(file)!r} cannot be read: {error!r}; allowed: delete it") from error
    check_layers(layers, num_layers(backend))
    return layers


def default_layers(backend: Backend) -> tuple[int, ...]:
    """The layers to draft with where nobody chose: those remembered, else the first `SHARE` of them."""
    return remembered_layers(backend) or first_share(num_layers(backend))


def first_share(count: int) -> tuple[int, ...]:
    """The first `SHARE` of `count` layers, at least one and, of several, not all."""
    return tuple(range(max(1, min(count - 1, round(SHARE * count)))))


def parse_layers(text: str, backend: Backend) -> tuple[int, ...]:
    """ "8" are the first 8 layers, "0-7,12" the numbers 0 to 7 and 12; of a model that has them."""
    count = num_layers(backend)
    if text.isdigit():
        if not 1 <= int(text) <= count:
            raise UsageError(f"drafter='layer_skip:{text}'; allowed: from 1 to {count} layers")
        return tuple(range(int(text)))
    spans = [part.partition("-") for part in text.split(",")]
    layers = tuple(i for first, _, last in spans for i in range(int(first), int(last or first) + 1))
    check_layers(layers, count)
    return layers


def remember_layers(backend: Backend, layers: Sequence[int], note: str) -> Path:
    """Keep a choice of layers for this model in the cache folder; returns the file."""
    check_layers(layers, num_layers(backend))
    file = layers_file(backend)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"layers": list(layers), "note": note}) + "\n")
    return file


def layers_file(backend: Backend) -> Path:
    """Where the choice of layers for a model is kept."""
    return cache_folder() / "layers" / f"{identity(backend)}.json"
