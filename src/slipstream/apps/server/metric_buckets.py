"""The upper bounds of histograms: vLLM's, finer between tokens, since a round commits several."""

from __future__ import annotations

FIRST_TOKEN = tuple(
    ms / 1000
    for ms in (
        1,
        5,
        10,
        20,
        40,
        60,
        80,
        100,
        250,
        500,
        750,
        1000,
        2500,
        5000,
        7500,
        10000,
        20000,
        40000,
        80000,
        160000,
        640000,
        2.56e06,
    )
)
BETWEEN = tuple(
    ms / 1000
    for ms in (
        1,
        2.5,
        5,
        10,
        25,
        50,
        75,
        100,
        150,
        200,
        300,
        400,
        500,
        750,
        1000,
        2500,
        5000,
        7500,
        10000,
        20000,
        40000,
        80000,
    )
)
WHOLE = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
TOKENS = tuple(m * 10**e for e in range(6) for m in (1, 2, 5))
PER_STEP = (1, *(2**e for e in range(3, 15)))
