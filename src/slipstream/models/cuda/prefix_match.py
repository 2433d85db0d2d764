"""Greedy verification on the device: how much of a draft is the model's own choice, and the token after it."""

from __future__ import annotations

import torch
from torch import Tensor


def matching_prefix(tokens: Tensor, chosen: Tensor, counts: Tensor, lengths: Tensor, width: int) -> Tensor:
    """Longest matching prefix; the specification is `acceptance.match`.

    tokens: [B, W], of which row i ends at counts[i] with a draft of `width` columns, lengths[i] of them proposed;
    chosen: [B, W], the model's own token after each. Returns [B, 2]: draft tokens accepted, and the token after them.
    """
    steps = torch.arange(width + 1, device=tokens.device)
    index = (counts - width - 1).clamp(min=0)[:, None] + steps
    own, draft = chosen.gather(1, index), tokens.gather(1, index[:, 1:])
    agree = (own[:, :width] == draft) & (steps[:width] < lengths[:, None])
    accepted = agree.long().cumprod(1).sum(1)
    return torch.stack([accepted, own.gather(1, accepted[:, None])[:, 0]], dim=1)
