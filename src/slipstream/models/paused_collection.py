"""Python's garbage collector, paused while modules are imported and models loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # objects: as many are looked through in a fraction of a millisecond


@contextmanager
def paused_collection() -> Iterator[None]:
    """No collection of cycles inside the block; what it made counts as old afterwards.

    Importing PyTorch and transformers makes millions of objects that stay. Collections meanwhile take a seventh of the
    time, and the one right afterwards, which would look at all of them as young objects, a fifth of a second.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # this moves all objects to the oldest generation; counting frozen ones, if there are any, walks to each of them
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
