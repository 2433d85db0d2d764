"""Backends whose rounding depends on the shape of the forward in a way that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.reproducibility.calibration import Calibration, calibrate
from slipstream.reproducibility.shape_trials import WIDTHS

BATCH = 8
BIT = 2.0**-30  # far below the tolerance of any comparison
Deviates = Callable[[int, int, Tensor, int], Tensor | bool]


def never(rows: int, width: int, columns: Tensor, length: int) -> bool:
    return False


class RoundingBackend:
    """Whole-number logits of the cached tokens, off by a bit where `deviates(rows, width, columns, length)`.

    columns: [width] the places of tokens in the forward; length: how many cached positions are read.
    """

    vocab_size, device = 7, torch.device("cpu")

    def __init__(self, deviates: Deviates = never, max_length: int = 1000) -> None:
        self.attended_unit, self.max_length, self.deviates = 1, max_length, deviates
        self.slots = torch.zeros(0, 0, dtype=torch.float64)
        self.shapes: list[tuple[int, int]] = []

    def reserve(self, rows: int, length: int) -> None:
        old = self.slots
        self.slots = old.new_zeros(max(rows, old.shape[0]), max(length, old.shape[1]))
        self.slots[: old.shape[0], : old.shape[1]] = old

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        rows, width = tokens.shape
        if logits:
            self.shapes.append((rows, width))
        length = -(-(max(starts) + width) // self.attended_unit) * self.attended_unit
        off = BIT * torch.as_tensor(self.deviates(rows, width, torch.arange(width), length), dtype=torch.float64)
        out = torch.zeros(rows, width, self.vocab_size, dtype=torch.float64)
        for row, start in enumerate(starts):
            slot = self.slots[first_slot + row]
            slot[start : start + width] = tokens[row].double() + 1
            sums = slot.cumsum(0)[start : start + width]
            out[row] = sums[:, None] * torch.arange(3, 3 + self.vocab_size) % 11
            out[row] += off[:, None] if off.ndim else off
        return out

    def copy(self, source: int, destination: int, length: int) -> None:
        self.slots[destination, :length] = self.slots[source, :length]


def calibration_of(deviates: Deviates, max_length: int = 1000) -> Calibration:
    return calibrate(RoundingBackend(deviates, max_length), BATCH)


def widths_without(*widths: int) -> tuple[int, ...]:
    return tuple(width for width in WIDTHS if width not in widths)


class ReadsLess(RoundingBackend):
    """Rounds differently where it reads one of the lengths `odd` instead of whole slots.

    prompts: whether prompts agree that read less than whole slots.
    """

    def __init__(self, odd: tuple[int, ...], prompts: bool = True) -> None:
        super().__init__()
        self.attended_lengths, self.odd, self.prompts = tuple[int, ...](), odd, prompts

    def attended_length_agrees(self, widths: Sequence[int], read: int, whole: int) -> bool:
        assert set(WIDTHS) <= set(widths) and read <= whole and whole % self.attended_unit == 0
        return read not in self.odd

    def forward(self, tokens: Tensor, starts: list[int], *, first_slot: int, logits: bool) -> Tensor:
        out = super().forward(tokens, starts, first_slot=first_slot, logits=logits)
        end = max(starts) + tokens.shape[1]
        read = next((read for read in self.attended_lengths if read >= end), 0)
        differs = read in self.odd or (
            not self.prompts and bool(self.attended_lengths) and tokens.shape[1] > max(WIDTHS)
        )
        return out + BIT * differs
