"""A digest of all that the text of a request with a seed depends on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from slipstream.core.kv_slots import Shapes
from slipstream.models.backend_capabilities import LayerSubsets
from slipstream.models.loaded import Loaded
from slipstream.tokenization.tokenizer import TokenizerDetails
from slipstream.version import __version__


def fingerprint_of(target: Loaded, shapes: Shapes) -> str:
    """Equal for decoders that give the same bytes for the same request and seed: weights, tokenizer, chat template,
    ends of texts, forward shapes and versions.
    """
    backend = target.backend
    weights = backend.weights_digest() if isinstance(backend, LayerSubsets) else target.name
    tokenizer = target.tokenizer
    parts = (
        target.fingerprint,
        weights,
        tokenizer.digest() if isinstance(tokenizer, TokenizerDetails) else type(tokenizer).__name__,
        target.end_ids,
        replace(shapes, alone=(), totals=()),  # which of the shapes that agree are used is a matter of speed
        backend.device.type,
        torch.__version__,
        __version__,
    )
    return "slip-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
