"""The options of a job over Ray, in addition to its lines and models."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

from slipstream.errors import SlipstreamError, UsageError, setting


@dataclass(frozen=True, kw_only=True)
class RayOptions:
    """The cluster, the number of engines, and each engine's share of the hardware."""

    ray: str = setting("", "run the job on this Ray cluster: auto, HOST:PORT, ray://HOST:PORT, or local")
    ray_actors: str = setting("1", "engines, each with the models in its memory: N, or MIN-MAX as the cluster allows")
    ray_cpus: float = setting(1.0, "CPUs of each engine; it computes with as many threads")
    ray_gpus: float = setting(0.0, "GPUs of each engine")

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[1-9]\d{0,4}(-[1-9]\d{0,4})?", self.ray_actors) or self.actors[0] > self.actors[1]:
            raise UsageError(f"ray_actors={self.ray_actors!r}; allowed: a number, or MIN-MAX, e.g. 2 or 1-8")
        for name, least in (("ray_cpus", 0.01), ("ray_gpus", 0.0)):
            if not least <= getattr(self, name) <= 1e4:
                raise UsageError(f"{name}={getattr(self, name)}; allowed: {least:g} to 10000")
        if not self.ray and any(getattr(self, f.name) != f.default for f in fields(self)):
            raise UsageError("ray_actors, ray_cpus or ray_gpus without ray; allowed: with --ray ADDRESS")

    @property
    def actors(self) -> tuple[int, int]:
        low, _, high = self.ray_actors.partition("-")
        return int(low), int(high or low)


def ray_module() -> object:
    """The module `ray`; SlipstreamError if it is not installed."""
    try:
        import ray
        import ray.data
    except ImportError as error:
        raise SlipstreamError(f"--ray needs {error.name}; run: pip install 'ray[data,serve]'") from error
    return ray
