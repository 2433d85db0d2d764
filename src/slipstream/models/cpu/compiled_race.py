"""`Race` in C (`csrc/race.c`): it finds the few tokens that can win, and computes the noise only of those.

Nearly always the raw scores determine the winner, so their distribution need not be computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.core.rng import Race, WarpOptions, argmax, words
from slipstream.models.cpu.kernel_libraries import address, block_kernels, kernels

FEWEST = 4096  # smallest vocabulary for which loading the kernel pays off
DTYPES = (torch.bfloat16, torch.float32)  # of scores that the kernel reads


class CompiledRace(Race):
    """A race on the CPU. The winners of `draw` are those of `Race` to the bit; `leaders` rounds differently."""

    def __init__(self, vocab_size: int, library: Any) -> None:
        super().__init__(vocab_size, torch.device("cpu"))
        self._library = library
        self._contenders = torch.empty(vocab_size, dtype=torch.int64)
        self._probs = torch.empty(vocab_size, dtype=torch.float32)

    def sure_winner(self, scores: Tensor, bits: int, options: WarpOptions) -> int | None:
        if scores.dtype not in DTYPES or scores.shape != self._probs.shape or not scores.is_contiguous():
            return None
        row, is_bfloat16, spaces = address(scores), scores.dtype == torch.bfloat16, (self._probs, self._contenders)
        temperature, top_k, top_p, min_p = vars(options).values()  # fails if `WarpOptions` gets a new option
        cut, pointers = (top_k, top_p, min_p), map(address, spaces)
        winner = self._library.race_winner(
            row, is_bfloat16, len(scores), bits, max(temperature, 1e-30), *cut, *pointers
        )
        return None if winner < 0 else int(winner)

    def draw(self, probs: Tensor, keys: Sequence[int] | Tensor) -> Tensor:
        if probs.shape[-1] != len(self._contenders):
            raise ValueError(f"probs: {probs.shape[-1]} tokens; allowed: {len(self._contenders)}")
        bits = keys if isinstance(keys, Tensor) else self.bits(words(keys))
        pairs = zip(probs.detach().float().contiguous(), bits.tolist(), strict=True)
        return torch.tensor([self._winner(row, key) for row, key in pairs], dtype=torch.int64)

    def leaders(
        self, scores: Tensor, temperatures: Tensor, bits: Tensor | None, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if count > 2 or scores.dtype not in DTYPES:
            return super().leaders(scores, temperatures, bits, count, token_ids)
        rows, is_bfloat16 = scores.contiguous(), scores.dtype == torch.bfloat16
        tokens, shares = torch.empty(len(rows), 2, dtype=torch.int64), torch.empty(len(rows), 2, dtype=torch.float32)
        keys = [0] * len(rows) if bits is None else bits.tolist()
        ids = None if token_ids is None else address(token_ids)
        for i, (temperature, key) in enumerate(zip(temperatures.tolist(), keys, strict=True)):
            row, results = address(rows[i]), (address(tokens[i]), address(shares[i]))
            self._library.race_leaders(row, is_bfloat16, rows.shape[1], ids, temperature, key, *results)
        return tokens[:, :count], shares[:, :count]

    def _winner(self, probs: Tensor, bits: int) -> int:
        count = self._library.race_contenders(address(probs), len(probs), bits, address(self._contenders))
        contenders = self._contenders[:count]
        if len(contenders) == 1:
            return int(contenders)
        if not len(contenders):  # no probability is above zero
            return int(argmax(probs))
        return int(contenders[int(argmax(probs[contenders] / self.noise(bits, contenders)))])


def race(vocab_size: int, device: torch.device, in_blocks: bool = False) -> Race:
    """The fastest race on a device. in_blocks: use the kernels for quantized files, which the target has loaded."""
    library = None
    if device.type == "cpu" and vocab_size >= FEWEST:
        library = block_kernels() if in_blocks else kernels()
    return Race(vocab_size, device) if library is None else CompiledRace(vocab_size, library)
