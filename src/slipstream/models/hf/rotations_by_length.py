"""Rotations that depend on the length of the text: longrope rotates all keys of a long text differently.

transformers decides by the largest position in the whole call, so it would rotate a short text differently in a batch
with a long one, or with a draft that crosses the limit. Here the length of its own text decides for each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import UsageError
from slipstream.models.hf.prepared_inputs import cache_name, prepared_name
from slipstream.models.hf.thresholds import longest_text, thresholds

Rotation = tuple[Tensor, Tensor]  # cosines and sines [B, W, D]
PROBE = 4  # positions
# for each token of the current forward, True in long texts: [B, 1] or [1, W]; None: decide by the largest position
_IS_LONG: ContextVar[Tensor | None] = ContextVar("is_long", default=None)


class RotationsByLength:
    """Replaces the `forward` of a model's rotary module. switch: a text of more tokens than this is long."""

    def __init__(self, module: nn.Module, switch: int) -> None:
        self._module, self.switch = module, switch

    def __call__(self, x: Tensor, position_ids: Tensor, **options: Any) -> Rotation:
        """The rotations for each text's length; for callers other than `HFBackend`, the module's own."""
        is_long = _IS_LONG.get()
        if is_long is None:
            return _own(self._module, x, position_ids, options)
        short = _own(self._module, x, position_ids.clamp(max=self.switch - 1), options)
        if not bool(is_long.any()):
            return short
        long = _beside(self._module, x, position_ids, self.switch, options)
        of_long = is_long[..., None].to(short[0].device)
        cosines, sines = (torch.where(of_long, *both) for both in zip(long, short, strict=True))
        return cosines, sines


@contextmanager
def texts_are_long(is_long: Tensor | None) -> Iterator[None]:
    """Set which texts are long for the forwards inside the block; see `_IS_LONG`."""
    token = _IS_LONG.set(is_long)
    try:
        yield
    finally:
        _IS_LONG.reset(token)


def rotate_by_length(model: Any) -> int | None:
    """Make a model's rotations depend on each text's own length; returns the largest length of a short text.

    Returns None if they depend only on a token's position. It tries the rotary modules around the positions that the
    configuration names.
    """
    switches = set()
    for module in model.modules():
        if "position_ids" not in inspect.signature(type(module).forward).parameters or not hasattr(module, "rope_type"):
            continue
        forward = module.__dict__.get("forward")
        if forward is None and (switch := _switch(model, module)) is not None:
            forward = module.forward = RotationsByLength(module, switch)
        if isinstance(forward, RotationsByLength):
            switches.add(forward.switch)
    if len(switches) > 1:
        raise UsageError(
            f"model {type(model).__name__} is not supported: its rotations change at {sorted(switches)} tokens; "
            "allowed: one such number"
        )
    return next(iter(switches), None)


def _switch(model: Any, module: nn.Module) -> int | None:
    """The first position that changes the rotations of earlier positions in the same call; None if there is none."""
    config = model.config.get_text_config()
    end = longest_text(config) or 0
    x = torch.zeros(1, 1, 1, dtype=model.dtype, device=model.get_input_embeddings().weight.device)
    positions = torch.arange(PROBE, device=x.device)[None]
    kinds = sorted(set(getattr(config, "layer_types", None) or ("full_attention",)))
    by_kind = "layer_type" in inspect.signature(module.forward).parameters
    option_sets: list[dict[str, str]] = [{"layer_type": kind} for kind in kinds] if by_kind else [{}]
    for options in option_sets:
        try:
            alone = _own(module, x, positions, options)
            for position in thresholds(config, end)[:-1]:
                below, reached = (_beside(module, x, positions, far, options) for far in (position - 1, position))
                if _same(alone, below) and not _same(alone, reached):
                    return position
        except (RuntimeError, TypeError, ValueError, LookupError):  # positions or rotations of another shape
            continue
    return None


def drops_cache(model: Any, longest_short: int) -> bool:
    """True if `generate` rereads a text from its first token when it becomes long."""
    if (declared := getattr(model, "drops_cache", None)) is not None:  # of a planned model
        return bool(declared)
    from transformers import DynamicCache

    name, cache = cache_name(model), DynamicCache()
    key = torch.zeros(1, 1, longest_short, 1)
    cache.update(key, key, 0)  # only its length matters
    ids = torch.zeros(1, longest_short + 1, dtype=torch.int64)
    options = {prepared_name(model, name): cache} if name else {}
    try:
        inputs = model.prepare_inputs_for_generation(
            ids, next_sequence_length=1, attention_mask=torch.ones_like(ids), use_cache=True, **options
        )
    except (RuntimeError, TypeError, ValueError, LookupError, AttributeError):
        return False
    return bool(inputs["input_ids"].shape[1] > 1)


def _own(module: nn.Module, x: Tensor, positions: Tensor, options: dict[str, Any]) -> Rotation:
    cosines, sines = type(module).forward(module, x, positions, **options)
    return cosines, sines


def _beside(module: nn.Module, x: Tensor, positions: Tensor, far: int, options: dict[str, Any]) -> Rotation:
    """A module's own rotations of these positions in a call that also has a far one."""
    together = torch.cat([positions, torch.full_like(positions[..., :1], far)], -1)
    cosines, sines = _own(module, x, together, options)
    return cosines[..., :-1, :], sines[..., :-1, :]


def _same(first: Rotation, second: Rotation) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
