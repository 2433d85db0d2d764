"""Rotary angles by position, for the types of scaling in `around_layers.STATIC` and for LongRoPE.

The specification is transformers' `modeling_rope_utils`; results are equal to the bit, since operations run in its
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

LONGROPE = "longrope"


class RotaryAngles(nn.Module):
    """Cosines and sines of each type of layer."""

    def __init__(
        self, parameters: Mapping[str, Mapping[str, Any]], sizes: Mapping[str, int], *, is_complex: bool = False
    ) -> None:
        """By type of layer. parameters: as in a configuration's `rope_parameters`; sizes: of a head.

        is_complex: the model turns complex numbers, whose cosines and sines PyTorch rounds differently.
        """
        super().__init__()
        self.rope_type = {kind: str(settings["rope_type"]) for kind, settings in parameters.items()}
        self._is_complex = is_complex
        self._scaled = {kind: frequencies(settings, sizes[kind]) for kind, settings in parameters.items()}
        self._long = {
            kind: (settings["original_max_position_embeddings"], frequencies(settings, sizes[kind], is_long=True)[0])
            for kind, settings in parameters.items()
            if settings["rope_type"] == LONGROPE
        }

    def compute_on(self, device: torch.device) -> None:
        """Move to this device."""
        self._scaled = {kind: (turns.to(device), factor) for kind, (turns, factor) in self._scaled.items()}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B, W, rotated] at positions [B, W], in the type of x; both halves have the same angles."""
        frequencies, factor = self._scaled[layer_type]
        first_of_long, of_long = self._long.get(layer_type, (math.inf, frequencies))
        if self._long and int(position_ids.max()) >= first_of_long:  # as transformers; see `rotations_by_length`
            frequencies = of_long
        half = position_ids[..., None].float() * frequencies
        if self._is_complex:
            turns = torch.polar(torch.ones_like(half), half) * factor
            cosines, sines = (torch.cat((part, part), -1).to(x.dtype) for part in (turns.real, turns.imag))
            return cosines, sines
        angles = torch.cat((half, half), -1)
        return (angles.cos() * factor).to(x.dtype), (angles.sin() * factor).to(x.dtype)


def frequencies(settings: Mapping[str, Any], size: int, *, is_long: bool = False) -> tuple[Tensor, float]:
    """The angle per position of each pair of numbers, [rotated / 2], and a factor for cosines and sines.

    is_long: of long texts, with LongRoPE.
    """
    rotated = int(size * settings.get("partial_rotary_factor", 1.0))
    periods = settings["rope_theta"] ** (torch.arange(0, rotated, 2, dtype=torch.float) / rotated)
    kind = settings["rope_type"]
    if kind == "yarn":
        return _yarn(settings, periods, rotated)
    if kind == LONGROPE:
        factor, original = settings["factor"], settings["original_max_position_embeddings"]
        usual = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        divisors = torch.tensor(settings["long_factor" if is_long else "short_factor"])
        return 1.0 / (divisors * periods), settings.get("attention_factor", usual)
    if kind == "proportional":  # a head is rotated as a whole, its last pairs by nothing
        periods = settings["rope_theta"] ** (torch.arange(0, rotated // 2 * 2, 2, dtype=torch.float) / size)
        return pad(1.0 / periods, (0, size // 2 - len(periods))) / settings.get("factor", 1.0), 1.0
    unscaled = 1.0 / periods
    if kind == "llama3":
        return _llama3(settings, unscaled), 1.0
    return unscaled / (settings["factor"] if kind == "linear" else 1.0), 1.0


def _llama3(settings: Mapping[str, Any], frequencies: Tensor) -> Tensor:
    """Llama 3.1 (arXiv 2407.21783): stretches only waves that are long relative to the original context."""
    factor, original = settings["factor"], settings["original_max_position_embeddings"]
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    lengths = 2 * math.pi / frequencies
    is_long, is_short = lengths > original / low, lengths < original / high
    scaled = torch.where(is_long, frequencies / factor, frequencies)
    kept = (original / lengths - low) / (high - low)
    between = (1 - kept) * scaled / factor + kept * scaled
    return torch.where(~is_short & ~is_long, between, scaled)


def _yarn(settings: Mapping[str, Any], periods: Tensor, rotated: int) -> tuple[Tensor, float]:
    """YaRN (arXiv 2309.00071, section 3.2): frequencies below a ramp are divided by the factor."""
    factor, original = settings["factor"], settings["original_max_position_embeddings"]

    def place(turns: float) -> float:
        """The index of the frequency that makes this many turns within the original context."""
        return (rotated * math.log(original / (turns * 2 * math.pi))) / (2 * math.log(settings["rope_theta"]))

    first, last = place(settings.get("beta_fast") or 32), place(settings.get("beta_slow") or 1)
    if settings.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, rotated - 1)
    last += 0.001 if first == last else 0
    ramp = torch.clamp((torch.arange(rotated // 2, dtype=torch.float32) - first) / (last - first), 0, 1)
    kept = 1 - ramp
    frequencies = 1.0 / (factor * periods) * (1 - kept) + 1.0 / periods * kept
    attention, scale, all_scale = (settings.get(name) for name in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention is None and scale and all_scale:
        attention = _magnitude(factor, scale) / _magnitude(factor, all_scale)
    elif attention is None:
        attention = _magnitude(factor)
    return frequencies, float(attention)


def _magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0
