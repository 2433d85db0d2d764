"""A draft model's sampled tokens on a GPU, drawn by one graph instead of some forty operators.

The captured operators are those of `Race`, so the tokens are the same to the bit.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.core.rng import Race
from slipstream.models.cuda.graph_store import Capturer, CudaCapturer, GraphStore


class CapturedRace(Race):
    """A race whose `leaders` are captured, one graph per number of rows; temperatures and keys are inputs."""

    def __init__(self, vocab_size: int, device: torch.device, capturer: Capturer | None = None) -> None:
        """capturer: by default CUDA graphs."""
        super().__init__(vocab_size, device)
        self._graphs = GraphStore("sampling", CudaCapturer(device) if capturer is None else capturer)
        self._inputs: dict[Any, tuple[Tensor, Tensor, Tensor]] = {}

    def leaders(
        self, scores: Tensor, temperatures: Tensor, bits: Tensor | None, count: int, token_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if bits is None or token_ids is not None:
            return super().leaders(scores, temperatures, bits, count, token_ids)
        key = scores.shape, scores.dtype, count
        if key not in self._inputs:
            self._inputs[key] = torch.empty_like(scores), torch.empty_like(temperatures), torch.empty_like(bits)
        inputs = self._inputs[key]
        for buffer, values in zip(inputs, (scores, temperatures, bits), strict=True):
            buffer.copy_(values)
        out = self._graphs.run(key, partial(self._in_one_tensor, *inputs, count))
        if out is None:
            return super().leaders(scores, temperatures, bits, count)
        return out[0].long(), out[1].float()

    def _in_one_tensor(self, scores: Tensor, temperatures: Tensor, bits: Tensor, count: int) -> Tensor:
        """[2, N, count] float64, in which tokens and shares are exact."""
        return torch.stack([part.double() for part in super().leaders(scores, temperatures, bits, count)])
