"""Shared by the tests of "layer_skip": a decoder, and the same drafts by Hugging Face's own means."""

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
    """A decoder of three rows at a time and four draft tokens, with forwards of any shape."""
    options = {"max_batch_size": 3, "num_draft_tokens": 4, "acceptance": "match", "reproducible": False} | settings
    if drafter == "none":  # a draft length is kept only for drafters set by `using`
        return SpeculativeDecoder(model, drafter="ngram", **options).using("none")
    return SpeculativeDecoder(model, drafter=drafter, **options)


@contextmanager
def left_out(model: Any, layers: Sequence[int]) -> Iterator[None]:
    """Makes all layers but `layers` pass on their inputs, by hooks."""
    (blocks,) = (m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1)
    skipped = [block for i, block in enumerate(blocks) if i not in layers]
    hooks = [block.register_forward_hook(lambda _, inputs, out: inputs[0]) for block in skipped]
    yield
    for hook in hooks:
        hook.remove()


def by_hugging_face(model: Any, layers: Sequence[int], text: list[int], steps: int) -> list[int]:
    """Greedy tokens of some layers, on Hugging Face's cache, which the whole model has filled with the text."""
    cache, tokens = {cache_name(model) or "": DynamicCache(config=model.config)}, list(text)
    with torch.inference_mode():
        model(input_ids=torch.tensor([text[:-1]]), use_cache=True, **cache)
        with left_out(model, layers):
            for _ in range(steps):
                outputs = model(input_ids=torch.tensor([tokens[-1:]]), use_cache=True, **cache)
                tokens.append(int(outputs.logits[0, -1].argmax()))
    return tokens[len(text) :]
