"""The likeliest token, as every greedy choice makes it."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def argmax(scores: Tensor) -> Tensor:
    """The index of the greatest of each [..., V], of equals the first, as `torch.argmax` gives it; [...] int64.

    On processors NumPy's takes a tenth of the time, which is a tenth of a small model's round.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1)
    known = scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores
    return torch.from_numpy(np.asarray(known.detach().numpy().argmax(-1)))
