"""Random numbers keyed by (seed, position), draws by an exponential race, and the argmax of every greedy choice.

A row draws the same numbers whichever rows share its batch and wherever it stands among them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import reduce

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# noise values computed at once: as many as fit into a processor's cache, as many as fill a GPU
HOST_BLOCK, DEVICE_BLOCK = 1 << 16, 1 << 25
SPARSE = 4  # if fewer than one in this many tokens are possible, noise is computed for those alone
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1, _MIX2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1


def argmax(scores: Tensor) -> Tensor:
    """Index of the maximum over V; ties take the first. [..., V] -> [...] int64, as `torch.argmax(scores, -1)`.

    On a CPU NumPy's argmax takes a tenth of the time, which saves a tenth of a small model's round.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    exact = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores  # NumPy has no bfloat16
    return torch.from_numpy(np.asarray(exact.detach().numpy().argmax(-1)))


Words = NDArray[np.uint64]


class Stream(IntEnum):
    """The decision that a random number is for; numbers of different streams are independent."""

    TOKEN = 1  # the token at a position
    DRAFT = 2  # a draft model's own draw
    KEEP = 3  # how many draft tokens are kept


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def key(*parts: int) -> int:
    """A 64-bit key from whole numbers; each part is mixed in by one SplitMix64 step."""
    return reduce(absorbed, parts, 0)


def absorbed(state: int, part: int) -> int:
    """A key with one more part mixed in: `key(a, b)` is absorbed(key(a), b)."""
    state = (state ^ (part & _MASK)) + _GOLDEN & _MASK
    state = (state ^ state >> 30) * _MIX1 & _MASK
    state = (state ^ state >> 27) * _MIX2 & _MASK
    return state ^ state >> 31


def absorb(state: Words, part: Words) -> Words:
    """`absorbed` for many keys at once. Both broadcast."""
    mixed = (state ^ part) + np.uint64(_GOLDEN)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX2)
    return mixed ^ (mixed >> np.uint64(31))


def words(values: Sequence[int]) -> Words:
    """[N] 64-bit words of whole numbers, modulo 2**64."""
    return np.array([value & _MASK for value in values], dtype=np.uint64)


def uniform(bits: int) -> float:
    """A number in [0, 1) from the upper 53 of 64 bits."""
    return (bits >> 11) * 2.0**-53


@dataclass(frozen=True)
class WarpOptions:
    """Options that shape a distribution after the logits processors: temperature > 0, others as in `SamplingParams`."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def removes_tokens(self) -> bool:
        """True if tokens lose all probability because others are likelier."""
        return self != WarpOptions(self.temperature)


class Race:
    """Draws from distributions over V tokens by an exponential race: argmin E_v / p_v wins, with E_v keyed noise.

    The winner has distribution p exactly (the minimum of independent exponentials of rates p_v). Two distributions
    raced with the same key agree as often as Gumbel-coupled draws do, and a token with p_v = 0 never wins. E_v is a
    function of the key and of v alone, so it need not be computed for tokens that cannot win.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        steps = np.arange(1, vocab_size + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        self._steps = torch.from_numpy(steps.view(np.int64)).to(device)
        self._at_once = max(1, (HOST_BLOCK if device.type == "cpu" else DEVICE_BLOCK) // vocab_size)

    def noise(self, bits: int, tokens: Tensor | None = None) -> Tensor:
        """[V] float32 standard exponential variables of this key, or those of some tokens alone."""
        return _exponential((self._steps if tokens is None else self._steps[tokens]) + _signed(bits & _MASK))

    def draw(self, probs: Tensor, keys: Sequence[int] | Tensor) -> Tensor:
        """One token per distribution. probs: [N, V] float32, rows need not be normalized -> [N] int64.

        keys: N of them, whole numbers or an int64 tensor of their bits on the device of `probs`.
        """
        bits = keys if isinstance(keys, Tensor) else self.bits(words(keys))
        blocks = zip(torch.split(probs, self._at_once), torch.split(bits, self._at_once), strict=True)
        winners = [argmax(self.speeds(distributions, block_bits)) for distributions, block_bits in blocks]
        return torch.cat(winners) if winners else probs.new_empty(0, dtype=torch.int64)

    def sure_winner(self, scores: Tensor, bits: int, options: WarpOptions) -> int | None:
        """The token that `draw` would return for scores [V], if a cheaper computation is certain of it, else None."""
        return None

    def speeds(self, probs: Tensor, bits: Tensor, token_ids: Tensor | None = None) -> Tensor:
        """[N, V] p_v / E_v; the greatest wins. bits: [N] keys, on the device of `probs`.

        token_ids: [V] of the probabilities; None for 0, 1, 2, ...
        """
        steps = self._steps if token_ids is None else self._steps[token_ids]
        if probs.device.type == "cpu":
            possible = np.flatnonzero(probs.detach().numpy() > 0)
            if len(possible) * SPARSE < probs.numel():
                index, flat = torch.from_numpy(possible), probs.new_zeros(probs.numel())
                noise = _exponential(steps[index % probs.shape[1]] + bits[index // probs.shape[1]])
                flat[index] = probs.reshape(-1)[index] / noise
                return flat.view_as(probs)
        return probs / _exponential(steps + bits[:, None])

    def leaders(
        self, scores: Tensor, temperatures: Tensor, bits: Tensor | None, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The `count` fastest tokens of each row, the fastest first, and each one's share of the sum of all speeds.

        scores: [N, V]; the distribution is softmax(scores / temperature). temperatures: [N]; a race at 0 has
        no noise, and its speeds are softmax(scores). bits: [N] keys, None if all are without noise. token_ids: [V] of
        the scores; None for 0, 1, 2, ... Tokens and shares are [N, count].
        """
        is_noisy = temperatures[:, None] > 0
        warped = scores.float() / torch.where(is_noisy, temperatures[:, None].clamp(min=1e-30), 1.0)
        probs = warped.softmax(-1).nan_to_num_(0.0)
        speeds = remaining = probs
        if bits is not None:
            speeds = remaining = torch.where(is_noisy, self.speeds(probs, bits, token_ids), probs)
        tokens = [argmax(speeds)]
        for _ in range(1, count):
            remaining = remaining.scatter(1, tokens[-1][:, None], -1.0)  # below impossible tokens
            tokens.append(argmax(remaining))
        leaders = torch.stack(tokens, 1)
        shares = speeds.gather(1, leaders) / speeds.sum(-1, keepdim=True).clamp(min=1e-30)
        return leaders if token_ids is None else token_ids[leaders], shares

    def bits(self, keys: Words) -> Tensor:
        """Keys as an int64 tensor on the race's device, sent without waiting for the device."""
        return torch.from_numpy(keys.view(np.int64)).to(self._steps.device, non_blocking=True)


def _exponential(z: Tensor) -> Tensor:
    """Standard exponential variables, float32, from 64-bit words, which are overwritten."""
    z ^= (z >> 30).bitwise_and_((1 << 34) - 1)
    z *= _signed(_MIX1)
    z ^= (z >> 27).bitwise_and_((1 << 37) - 1)
    z *= _signed(_MIX2)
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    # half a step above the lower edge, so that 0 cannot appear; the upper clamp keeps log1p finite
    u = (z >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).add_(0.5).to(torch.float32).mul_(2.0**-53)
    return u.clamp_(max=1 - 2.0**-24).neg_().log1p_().neg_()
