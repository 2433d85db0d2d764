"""A digest of all that the text of a request with a seed depends on."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

import slipstream
from slipstream.models.backend_capabilities import LayerSubsets
from slipstream.text.tokenizer import TokenizerDetails
from slipstream.wiring.model_holder import ModelHolder


def fingerprint_of(decoder: ModelHolder) -> str:
    """Equal for decoders that give the same bytes for the same request and seed: weights, tokenizer, chat template,
    ends of texts, forward shapes and versions.
    """
    target = decoder.target
    backend = target.backend
    weights = backend.weights_digest() if isinstance(backend, LayerSubsets) else target.name
    tokenizer = target.tokenizer
    parts = (
        target.fingerprint,
        weights,
        tokenizer.digest() if isinstance(tokenizer, TokenizerDetails) else type(tokenizer).__name__,
        target.end_ids,
        replace(decoder.shapes, alone=(), totals=()),  # which of the shapes that agree are used is a matter of speed
        backend.device.type,
        torch.__version__,
        slipstream.__version__,
    )
    return "slip-" + hashlib.sha256(repr(parts).encode()).hexdigest()[:16]
