"""The target in float32: the referee that tells a tie from a bug."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from slipstream.models.loaded import Loaded, LoadOptions


def full_precision_model(loaded: Loaded, options: LoadOptions) -> Any:
    """A float32 copy of the target; the target itself where it is float32 and not packed."""
    if loaded.model.dtype == torch.float32 and not loaded.packed:
        return loaded.model
    if loaded.packed:
        from slipstream.models.hf.weights import load_model

        return load_model(loaded.name, LoadOptions("float32", options.device, False, options.extra))[1].eval()
    return copy.deepcopy(loaded.model).float().eval()


@torch.inference_mode()
def last_logits(model: Any, tokens: list[int], count: int = 1) -> Tensor:
    """[count, V] float32 logits after the last `count` of `tokens`, by one forward without a cache."""
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits
    return logits[0, -count:].float()
