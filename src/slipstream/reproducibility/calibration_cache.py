"""Which forward shapes a decoder keeps to: calibrated once per machine, model and precision, then remembered."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from dataclasses import asdict

import torch

from slipstream.core.cache_state import EXACT_FIT, Shapes
from slipstream.errors import UsageError
from slipstream.models.cache_folder import cache_folder
from slipstream.models.cpu.processor import processor
from slipstream.models.loaded import Loaded
from slipstream.reproducibility.calibration import Calibration, calibrate

log = logging.getLogger("slipstream")

VERSION = 12  # of what calibration tries; what an earlier one found is not used
AFFORDABLE = 0.25  # "auto" keeps to agreeing shapes if a plain step takes at most this share longer


def choose_shapes(loaded: Loaded, reproducible: bool | str, max_batch_size: int) -> tuple[Shapes, Calibration | None]:
    """The forward shapes to keep to, by the `reproducible` setting and what agrees on this machine."""
    if reproducible is False:
        return EXACT_FIT, None
    found = remembered(loaded, max_batch_size)
    if not found.agrees:
        if reproducible is True:
            raise UsageError(
                f"reproducible=True, but no set of forward shapes agrees to the bit for {loaded.name!r} here; "
                "allowed: 'auto' or False"
            )
        log.info("no forward shapes agree to the bit here: texts may differ in near-ties")
        return EXACT_FIT, found
    if reproducible == "auto" and found.cost > AFFORDABLE:
        log.info("forwards fit their tokens: keeping to shapes that agree would cost %.0f%%", 100 * found.cost)
        return EXACT_FIT, found
    return found.shapes, found


def remembered(loaded: Loaded, max_batch_size: int) -> Calibration:
    """The calibration of this machine, model and precision from the cache, or a new one, which is then remembered."""
    backend = loaded.backend
    machine = (
        f"{platform.machine()} {processor().model_name} torch {torch.__version__} threads {torch.get_num_threads()}"
    )
    if backend.device.type == "cuda":
        machine += f" {torch.cuda.get_device_name(backend.device)}"
    identity = f"v{VERSION} {machine} {loaded.fingerprint} batches to {max_batch_size}"
    file = cache_folder() / "calibration" / f"{hashlib.sha256(identity.encode()).hexdigest()[:20]}.json"
    if file.exists():
        values = json.loads(file.read_text())
        times = {int(width): ms for width, ms in values["milliseconds"].items()}
        widths, together, lengths = (tuple(values[name]) for name in ("widths", "together", "attended_lengths"))
        totals = {int(total): ms for total, ms in values["totals"].items()}
        return Calibration(widths, values["attended_unit"], times, values["prompts"], together, lengths, totals)
    log.info("calibrating forward shapes for %s on this machine (once) ...", loaded.name)
    found = calibrate(backend, max_batch_size)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.write_text(json.dumps({**asdict(found), "identity": identity}, indent=2))
    partial.rename(file)
    return found
