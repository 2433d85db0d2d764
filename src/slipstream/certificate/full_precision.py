"""The target in float32: the referee that tells a tie from a bug."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from slipstream.models.loaded import Loaded, LoadOptions


def full_precision_model(loaded: Loaded, options: LoadOptions) -> Any:
    """A float32 copy of the target; the target itself where it is that already."""
    if loaded.plain_model is None:
        from slipstream.models.hf.block_loading import load_unpacked

        wanted = replace(options, dtype="float32", rounding=loaded.rounding)
        return load_unpacked(loaded.source or loaded.name, wanted)
    if loaded.model.dtype == torch.float32 and not loaded.model.training:
        return loaded.model
    return copy.deepcopy(loaded.model).float().eval()


@torch.inference_mode()
def last_logits(model: Any, tokens: list[int], count: int = 1) -> Tensor:
    """[count, V] float32 logits after the last `count` of `tokens`, by one forward without a cache."""
    ids = torch.tensor([tokens], device=model.device)
    logits: Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=count).logits
    return logits[0, -count:].float()
