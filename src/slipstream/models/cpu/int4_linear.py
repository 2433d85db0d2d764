"""4-bit linear layers for few tokens, computed by `csrc/int4.c`.

The specification is the `nn.Linear` of the rounded weights.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from slipstream.models.cpu.c_structs import GROUP, PANEL, RECORD
from slipstream.models.cpu.compressed_linear import KernelLinear
from slipstream.models.cpu.huge_pages import HugePages, SmallPages

ROWS = 4096  # outputs laid out at a time, so that the copies stay small
MOST, MOST_BY_TILES = 16, 64  # tokens up to which these products are the fastest, without and with AMX
WORDS = 512  # bytes of codes in a record; scales and offsets follow


class Int4Linear(KernelLinear):
    """An `nn.Linear` whose weights are 4-bit steps with a bfloat16 scale and offset per group of inputs."""

    def __init__(
        self, codes: Tensor, steps: Tensor, bias: Tensor | None, library: Any, memory: HugePages | None = None
    ) -> None:
        """codes: uint8 [out, in], 0 to 15; steps: [out, in / 32, 2], scale and offset: code * scale + offset.

        bias: bfloat16 or None. out_features and in_features must be multiples of 16 and 32. memory: for the weights.
        """
        super().__init__()
        self.out_features, self.in_features = codes.shape
        panels, groups = -(-self.out_features // PANEL), self.in_features // GROUP
        data = (memory or SmallPages()).zeros(panels * groups * RECORD).view(panels, groups, RECORD)
        for i in range(0, len(codes), ROWS):
            data[i // PANEL : (i + ROWS) // PANEL] = _records(codes[i : i + ROWS], steps[i : i + ROWS])
        self._set_weights(library, 4, (data, None, None, None, None if bias is None else bias.detach()))
        self.most = MOST_BY_TILES if hasattr(library, "multiply_int4_by_tiles") else MOST
        self._records = data

    def rows(self, outputs: Tensor) -> Tensor:
        """[N, in] bfloat16: the rounded weights of some outputs [N], read back from the records."""
        panel, within = outputs // PANEL, outputs % PANEL
        words = self._records[..., :WORDS].unflatten(2, (8, 16, 2, 2))  # quad, o, i, byte; as `_records` has them
        own = words[panel, :, :, within % 16].permute(0, 1, 2, 4, 3)  # ..., byte (the pair), i
        codes = torch.where((within < 16).view(-1, 1, 1, 1, 1), own & 15, own >> 4).flatten(2)
        factors = self._records[..., WORDS:].view(torch.bfloat16).unflatten(2, (2, PANEL))[panel, :, :, within].float()
        return (codes * factors[..., :1] + factors[..., 1:]).flatten(1).to(torch.bfloat16)


def _records(codes: Tensor, steps: Tensor) -> Tensor:
    """Data as int4.c reads it: [panels, groups, RECORD]."""
    rest, groups = -len(codes) % PANEL, steps.shape[1]
    codes, steps = pad(codes, (0, 0, 0, rest)), pad(steps, (0, 0, 0, 0, 0, rest)).to(torch.bfloat16)
    # output = side * 16 + o and input = group * 32 + quad * 4 + pair * 2 + i, as int4.c has them
    cells = codes.view(-1, 2, 16, groups, 8, 2, 2).permute(0, 3, 4, 2, 6, 5, 1).flatten(5)  # ..., [o, i, pair and side]
    low, high = cells[..., 0] | cells[..., 1] << 4, cells[..., 2] | cells[..., 3] << 4
    words = torch.stack([low, high], -1).flatten(2)
    factors = steps.view(-1, PANEL, groups, 2).permute(0, 2, 3, 1).contiguous().view(torch.uint8).flatten(2)
    return torch.cat([words, factors], 2)
