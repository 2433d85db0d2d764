"""Messages of loading a model: that long work begins, and that something runs slower than it could.

Long work happens once per machine: models are converted, kernels compiled, forwards measured.
`logging.getLogger("slipstream").setLevel(logging.WARNING)` silences that.
"""

from __future__ import annotations

import logging
import sys
from functools import cache

log = logging.getLogger("slipstream")


def is_silenced() -> bool:
    """Whether the user wants warnings only."""
    return log.level > logging.INFO


def announce(message: str) -> None:
    """Say that long work begins, in one line: in the log where it is set up for that, else on standard error.

    Without this a script or a notebook would stand still for a minute and not say why.
    """
    if log.isEnabledFor(logging.INFO) and log.hasHandlers():
        log.info(message)
    elif not is_silenced() and sys.stderr is not None:
        print(f"slipstream: {message}", file=sys.stderr, flush=True)


@cache
def warn_slower(reason: str) -> None:
    """Warn, once per process and reason, that a faster way of computing cannot be used. The results are the same."""
    log.warning("slower than it could be: %s", reason)
