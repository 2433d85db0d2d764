"""The activations of gated feed-forward parts that kernels compute."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Activation = tuple[float, float]  # slope and cubic term of x * sigmoid(slope * x + cubic * x^3)
SILU, GELU = (1.0, 0.0), (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))
CLOSE = 0.01  # relative difference from one of these; the module's outputs are bfloat16


def recognise_activation(act: Callable[[Tensor], Tensor]) -> Activation | str:
    """Slope and cubic term of an activation, or why it has none."""
    x = torch.linspace(-9, 9, 1001, dtype=torch.float32).to(torch.bfloat16)
    expected, exact = act(x.clone()).float(), x.float()
    for slope, cubic in (SILU, GELU):
        computed = exact * torch.sigmoid(slope * exact + cubic * exact**3)
        if torch.allclose(computed, expected, rtol=CLOSE, atol=1e-4):
            return slope, cubic
    return f"the activation {type(act).__name__} is neither SiLU nor GELU by its tanh formula"
