"""What the tests of the drafter "layer_skip" share: a decoder, and the same drafts by Hugging Face's own means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from slipstream import SpeculativeDecoder
from slipstream.models.hf.prepared_inputs import cache_name


def decoder_of(model: Any, drafter: str = "none", **settings: Any) -> SpeculativeDecoder:
    """Three rows at a time, four draft tokens, forwards of any shape."""
    chosen = {"max_batch_size": 3, "num_draft_tokens": 4, "acceptance": "match", "reproducible": False} | settings
    if drafter == "none":  # a length is only kept for drafters that come with `using`
        return SpeculativeDecoder(model, drafter="ngram", **chosen).using("none")
    return SpeculativeDecoder(model, drafter=drafter, **chosen)


@contextmanager
def left_out(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """All but `layers` hand on what they got, by hooks."""
    (blocks,) = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    skipped = [block for i, block in enumerate(blocks) if i not in layers]
    hooks = [block.register_forward_hook(lambda _, inputs, out: inputs[0]) for block in skipped]
    yield
    for hook in hooks:
        hook.remove()


def by_hugging_face(model: Any, layers: Sequence[int], text: list[int], steps: int) -> list[int]:
    """Greedy tokens of some layers on Hugging Face's own cache, which the whole model filled with the text."""
    cache, said = {cache_name(model) or "": DynamicCache(config=model.config)}, list(text)
    with torch.inference_mode():
        model(input_ids=torch.tensor([text[:-1]]), use_cache=True, **cache)
        with left_out(model, layers):
            for _ in range(steps):
                out = model(input_ids=torch.tensor([said[-1:]]), use_cache=True, **cache)
                said.append(int(out.logits[0, -1].argmax()))
    return said[len(text) :]
