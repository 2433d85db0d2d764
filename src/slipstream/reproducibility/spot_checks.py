"""A few trials of a backend that says forward shapes change no bit: what its kernels guarantee needs no search.

The guarantee is one of structure, so it fails in every shape of some kind or in none. One shape of each kind is tried:
every width by itself, forwards that build on each other, ragged batches, and the ends of a prompt's longest chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from slipstream.reproducibility.shape_trials import Trials

CONSECUTIVE = (1, 5)  # widths whose forwards are tried one after the other, to see what each leaves to the next
TOGETHER = 3  # width of batches of every size
TOTAL = 19  # tokens of a ragged forward: an odd number, as all are allowed then

Check = Callable[[], bool]


def spot_checks(trials: Trials) -> list[Check]:
    """Checks that all hold if the shape changes no bit; the trials must have a reference."""
    alone = [partial(trials.agrees_alone, width, once=width not in CONSECUTIVE) for width in trials.widths]
    ragged = [partial(trials.total_agrees, TOTAL, trials.widths)] if trials.totals([TOTAL], trials.widths) else []
    return [*alone, partial(trials.agrees_in_batches, TOGETHER), *ragged, trials.longest_chunk_agrees]
