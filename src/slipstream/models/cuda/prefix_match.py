"""Greedy verification on the device: how much of a draft is the model's own choice, and the token after it."""

from __future__ import annotations

import torch
from torch import Tensor


def matching_prefix(tokens: Tensor, chosen: Tensor, counts: Tensor, lengths: Tensor, widths: Tensor) -> Tensor:
    """Longest matching prefix; the specification is `acceptance.match`.

    tokens: [B, W], of which row i ends at counts[i] with a draft of widths[i] columns, lengths[i] of them proposed;
    chosen: [B, W], the model's own token after each. Returns [B, 2]: draft tokens accepted, and the token after them.
    """
    last = tokens.shape[1] - 1
    steps = torch.arange(last + 1, device=tokens.device)
    index = ((counts - widths - 1).clamp(min=0)[:, None] + steps).clamp(max=last)
    own, draft = chosen.gather(1, index), tokens.gather(1, index[:, 1:])
    agree = (own[:, :last] == draft) & (steps[:last] < lengths[:, None])
    accepted = agree.long().cumprod(1).sum(1)
    return torch.stack([accepted, own.gather(1, accepted[:, None])[:, 0]], dim=1)
