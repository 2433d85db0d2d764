"""The activations of gated feed-forward parts: which of them kernels compute, and PyTorch's by many threads."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Activation = tuple[float, float]  # slope and cubic term of x * sigmoid(slope * x + cubic * x^3)
SILU, GELU = (1.0, 0.0), (math.sqrt(8 / math.pi), 0.044715 * math.sqrt(8 / math.pi))
CLOSE = 0.01  # relative difference from one of these; the module's outputs are bfloat16

SINGLE, GRAIN = 16384, 32768  # numbers that one thread takes in any operator, and each of several in most
VECTORS = 64  # numbers that they take at a time at most; what is left of a thread's share is rounded otherwise


def activated(act: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """act(x) of x [..., size], each row with the bits that it has alone, by however many threads.

    Where shares would end within a vector, whole rows are shared out instead, and the rest goes to one thread.
    """
    threads, size, count = torch.get_num_threads(), x.shape[-1], x.numel()
    shares = {threads, min(threads, -(-count // GRAIN))}  # GELU has as many as there are threads
    whole = size % VECTORS == 0 and all(-(-count // share) % VECTORS == 0 for share in shares)
    if x.device.type != "cpu" or threads == 1 or count <= SINGLE or whole:
        return act(x)
    rows = x.flatten(0, -2)
    shared = len(rows) - len(rows) % threads
    shared = shared if shared * size >= threads * GRAIN else 0
    step = max(1, SINGLE // size)
    parts = [act(rows[:shared])] if shared else []
    parts += [act(rows[first : first + step]) for first in range(shared, len(rows), step)]
    return torch.cat(parts).view(x.shape)


def recognise_activation(act: Callable[[Tensor], Tensor]) -> Activation | str:
    """Slope and cubic term of an activation, or why it has none."""
    x = torch.linspace(-9, 9, 1001, dtype=torch.float32).to(torch.bfloat16)
    expected, exact = act(x.clone()).float(), x.float()
    for slope, cubic in (SILU, GELU):
        computed = exact * torch.sigmoid(slope * exact + cubic * exact**3)
        if torch.allclose(computed, expected, rtol=CLOSE, atol=1e-4):
            return slope, cubic
    return f"the activation {type(act).__name__} is neither SiLU nor GELU by its tanh formula"
