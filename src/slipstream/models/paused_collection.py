"""Python's garbage collector, paused while modules are imported and models loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # objects: as many are looked through in a fraction of a millisecond


@contextmanager
def paused_collection() -> Iterator[None]:
    """No collection of cycles inside the block; what it made counts as old afterwards.

    Importing PyTorch and transformers makes millions of objects that stay; looking through them over and over takes a
    seventh of the time, and once as young objects, right afterwards, a fifth of a second.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # unfrozen objects join the oldest generation, and none is looked at; to count frozen ones each is walked to
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
