"""Python's garbage collector, paused while modules are imported and models loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
        if not gc.get_freeze_count():  # unfrozen objects join the oldest generation, and none is looked at
            gc.freeze()
            gc.unfreeze()
        gc.enable()
