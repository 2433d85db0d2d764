"""Random numbers keyed by what they are for, never by who else is in the batch.

Every number is a hash of (the request's seed, a stream, absolute position, ...), so that it depends neither on the
batch nor on the order of arrival. The generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 15).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


class Stream(IntEnum):
    """What a random number decides; numbers of different streams are independent."""

    TOKEN = 1  # the token at a position
    DRAFT = 2  # a draft model's own draw
    KEEP = 3  # how many draft tokens are kept


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def key(*parts: int) -> int:
    """A 64-bit key from whole numbers; each part is mixed in by one SplitMix64 step."""
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + _GOLDEN & _MASK
        state = (state ^ state >> 30) * _MIX1 & _MASK
        state = (state ^ state >> 27) * _MIX2 & _MASK
        state ^= state >> 31
    return state


def uniform(bits: int) -> float:
    """A number in [0, 1) from the upper 53 of 64 bits."""
    return (bits >> 11) * 2.0**-53


class Race:
    """Draws from laws over V tokens by an exponential race: the winner is argmin E_v / p_v, with E_v keyed noise.

    The winner has law p exactly (the minimum of independent exponentials of rates p_v). Two laws raced with the same
    key agree as often as Gumbel-coupled draws do, and a token with p_v = 0 never wins.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        steps = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._steps = torch.from_numpy(steps.view(np.int64)).to(device)

    def noise(self, bits: int) -> Tensor:
        """[V] float32 standard exponential variables of this key."""
        z = self._steps + _signed(bits)
        z ^= (z >> 30) & ((1 << 34) - 1)
        z *= _signed(_MIX1)
        z ^= (z >> 27) & ((1 << 37) - 1)
        z *= _signed(_MIX2)
        z ^= (z >> 31) & ((1 << 33) - 1)
        # half a step above the lower edge, so that 0 cannot appear; the upper clamp keeps log1p finite
        u = ((z >> 11) & ((1 << 53) - 1)).to(torch.float64).add_(0.5).mul_(2.0**-53).to(torch.float32)
        return torch.log1p(-u.clamp_(max=1 - 2.0**-24)).neg_()

    def draw(self, probs: Tensor, keys: Sequence[int]) -> Tensor:
        """One token per law. probs: [N, V] float32, rows need not be normalised; keys: N of them -> [N] int64."""
        winners = [torch.argmax(law / self.noise(bits)) for law, bits in zip(probs, keys, strict=True)]
        return torch.stack(winners) if winners else probs.new_empty(0, dtype=torch.int64)
