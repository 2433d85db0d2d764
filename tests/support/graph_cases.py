"""An eager and a captured backend of one tiny model, side by side."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.models.cuda.graph_backend import GraphedBackend
from slipstream.models.hf.backend import HFBackend
from tests.support.fake_cuda_graph import Tape
from tests.support.tiny_models import VOCAB, shared

MODELS = ("llama", "qwen2", "gpt2", "gemma3")
PROMPT = 24
STARTS = [24, 17, 22, 12]  # rows whose later positions may be overwritten, as padding does in eager forwards


class Case:
    """An eager and a captured backend of one model, with the same prompts in four slots."""

    def __init__(self, name: str, tape: Any = None, seed: int = 0, length: int = 60, **limits: int) -> None:
        self.tape, self.generator = tape or Tape(), torch.Generator().manual_seed(seed)
        self.eager, self.graphed = HFBackend(shared(name)), GraphedBackend(shared(name), self.tape, **limits)
        for slot in range(4):
            prompt = self.tokens(1, PROMPT)
            for backend in (self.eager, self.graphed):
                backend.reserve(4, length)
                backend.forward(prompt, [0], first_slot=slot, logits=False)

    def number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=self.generator))

    def tokens(self, rows: int, width: int) -> Tensor:
        return torch.randint(3, VOCAB, (rows, width), generator=self.generator)

    def starts(self, rows: int) -> list[int]:
        return torch.randint(PROMPT // 2, PROMPT + 1, (rows,), generator=self.generator).tolist()

    def both(self, tokens: Tensor, starts: list[int], first_slot: int = 0) -> tuple[Tensor, Tensor]:
        eager, graphed = (
            backend.forward(tokens, starts, first_slot=first_slot, logits=True)
            for backend in (self.eager, self.graphed)
        )
        return eager, graphed
