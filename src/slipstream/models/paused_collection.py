"""Python's garbage collector, paused while modules are imported and models loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 10_000  # objects: the collector looks through fewer in a fraction of a millisecond


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the garbage collector inside the block; objects made there count as old afterwards.

    Importing PyTorch and transformers creates millions of permanent objects. Collections during an import would take a
    seventh of its time, and the first one afterwards, which scans all young objects, a fifth of a second.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        # moves all objects to the oldest generation; skipped if the program has frozen some, which it would unfreeze
        if gc.get_count()[0] > MANY and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        gc.enable()
