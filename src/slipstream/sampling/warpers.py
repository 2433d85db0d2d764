"""Temperature, top-k, top-p and min-p: from scores to a distribution, sorting no more than necessary.

Top-p by its definition sorts the whole vocabulary (`keep_top_p_sorted`, the specification). Only the likeliest tokens
decide, so on the CPU the likeliest few are selected, then more, until they reach the wanted probability. The result is
the specification's to the bit: a position is sorted after all where rounding could decide, or where the cut falls
between tokens of equal score, which only the sort orders. Other devices sort everything, because reading a tensor
before the end of the round would wait for the device.

Shapes: N positions, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from slipstream.core.rng import WarpOptions

NEVER = float("-inf")
SELECTED = (64, 512, 4096)  # likeliest tokens looked at, in turn
ROUNDING = 2e-5  # cumulative probabilities this close to top_p are left to the specification


class Highest(NamedTuple):
    """The highest scores of each position, descending, and their tokens: [N, count] each."""

    values: Tensor
    tokens: Tensor


class Warp:
    """The options as a function from scores to distributions."""

    def __init__(self, options: WarpOptions, device: torch.device) -> None:
        self.options = options
        self._temperature = torch.tensor([max(options.temperature, 1e-30)], dtype=torch.float32, device=device)
        self._top_p = torch.tensor([options.top_p], dtype=torch.float32, device=device)
        self._uses_top_p = bool(torch.tensor(options.top_p, dtype=torch.float32, device="cpu") < 1)

    def __call__(self, scores: Tensor) -> Tensor:
        """The distribution at each position. scores: [..., V] float32, not changed -> [..., V] float32."""
        best = scores.amax(-1, keepdim=True)
        warped = (scores - best.masked_fill_(torch.isneginf(best), 0.0)).div_(self._temperature).flatten(0, -2)
        highest = None
        if self.options.top_k:
            count = min(self.options.top_k, warped.shape[-1])
            highest = Highest(*warped.topk(min(count + self._uses_top_p, warped.shape[-1]), dim=-1))
            warped = torch.where(warped < highest.values[:, count - 1 : count], NEVER, warped)
        if self._uses_top_p and warped.device.type == "cpu":
            warped = keep_top_p_selected(warped, self._top_p, highest)
        elif self._uses_top_p:
            warped = keep_top_p_sorted(warped, self._top_p)
        if self.options.min_p:
            probs = warped.softmax(-1)
            warped = torch.where(probs < self.options.min_p * probs.amax(-1, keepdim=True), NEVER, warped)
        return warped.softmax(-1).view(scores.shape)


def keep_top_p_sorted(scores: Tensor, top_p: Tensor) -> Tensor:
    """The fewest highest scores whose probabilities reach `top_p`, at least one; the others become -inf.

    scores: [N, V]; top_p: [1] below 1. The specification, and what Hugging Face `generate` does.
    """
    ascending, order = scores.sort(dim=-1)
    removed = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    removed[..., -1] = False
    return scores.masked_fill(removed.scatter(-1, order, removed), NEVER)


def keep_top_p_selected(scores: Tensor, top_p: Tensor, highest: Highest | None = None) -> Tensor:
    """`keep_top_p_sorted` with a sort only for positions whose likeliest tokens do not decide.

    highest: if top-k has removed all other scores already, those that are left.
    """
    probs, undecided = scores.softmax(-1), torch.arange(len(scores))
    least = scores.new_empty(len(scores), 1)
    if highest is not None:
        least, is_decided = _least_kept(highest, probs, top_p)
        undecided = undecided[~is_decided]
    for count in SELECTED:
        if not len(undecided) or count > scores.shape[1] // 4:
            break
        least_kept, is_decided = _least_kept(Highest(*scores[undecided].topk(count, dim=-1)), probs[undecided], top_p)
        least[undecided] = least_kept
        undecided = undecided[~is_decided]
    result = torch.where(scores < least, NEVER, scores)
    if len(undecided):
        result[undecided] = keep_top_p_sorted(scores[undecided], top_p)
    return result


def _least_kept(highest: Highest, probs: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest score that top-p keeps [N, 1], and whether the highest scores suffice to decide that [N]."""
    likely = probs.gather(-1, highest.tokens).double()
    above = likely.cumsum(-1) - likely  # the probability of all higher scores
    inside = above < top_p
    inside[:, 0] = True
    kept = inside.sum(-1, keepdim=True)
    count = likely.shape[1]
    least = highest.values.gather(-1, kept - 1)
    splits = highest.values.gather(-1, kept.clamp(max=count - 1)) == least  # tokens of equal score, or no token beyond
    clear = ((above[:, 1:] - top_p).abs() > ROUNDING).all(-1)
    return least, clear & (kept < count)[:, 0] & ~splits[:, 0]
