"""Ray: batch jobs over many machines, and the server's application as a Ray Serve deployment.

Importing this package does not import Ray; calling one of its functions does.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "run_ray_job": "slipstream.integrations.ray.ray_job",
    "RayOptions": "slipstream.integrations.ray.ray_options",
    "app": "slipstream.apps.server.ray_serve",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
