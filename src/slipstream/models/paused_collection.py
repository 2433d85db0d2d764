"""Python's garbage collector, paused while modules are imported and models loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """No collection of cycles inside the block.

    Importing PyTorch and transformers makes millions of objects that stay; looking through them over and over takes a
    seventh of the time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
