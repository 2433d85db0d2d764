"""The upper bounds of histograms, seconds or tokens: vLLM's, finer between tokens, since a round commits several."""

from __future__ import annotations

_SLOW = (0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_SLOW, 160, 640, 2560)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SLOW)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
PER_STEP = (1, *(2**e for e in range(3, 15)))
