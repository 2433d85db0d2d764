"""What to compare with: Hugging Face's own `generate`, and logits in full precision."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import UsageError
from slipstream.models.loaded import Loaded, LoadOptions
from slipstream.sampling.params import SamplingParams


def plain_model(loaded: Loaded, options: LoadOptions) -> Any:
    """The target as transformers loads it: its own object, or a second copy if ours has packed weights."""
    if loaded.model is None:
        raise UsageError(f"target {loaded.name!r} is no Hugging Face model, so there is no `generate` to compare with")
    if not loaded.packed:
        return loaded.model
    from slipstream.models.hf.weights import load_model

    return load_model(loaded.name, options)[1].eval()


def full_precision_model(loaded: Loaded, options: LoadOptions) -> Any:
    """A float32 copy of the target."""
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


def generate(model: Any, tokens: list[int], params: SamplingParams) -> list[int]:
    """Greedy Hugging Face `generate`, the penalties and ends of `params` included: the new token ids."""
    if params.temperature > 0:
        raise UsageError("comparing with Hugging Face `generate` is for greedy decoding; allowed: temperature=0")
    ids = torch.tensor([tokens], device=model.device)
    ends = [] if params.ignore_eos else _ids(model.generation_config.eos_token_id)
    out: Tensor = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=params.max_tokens,
        min_new_tokens=params.min_tokens or None,
        repetition_penalty=params.repetition_penalty,
        eos_token_id=[*ends, *params.stop_token_ids] or None,
        pad_token_id=ends[0] if ends else 0,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    return out[0, len(tokens) :].tolist()


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)
