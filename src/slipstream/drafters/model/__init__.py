"""The drafter "model": a draft model, and the sessions in which it reads and scores less than everything."""

from slipstream.drafters.model.model_drafter import (
    REPRODUCIBLE,
    TRAITS,
    ModelDrafter,
    PathBelow,
    Stop,
    TokenBelow,
    WhilePays,
    annotated,
    build,
    stop_for,
)

__all__ = [
    "REPRODUCIBLE",
    "TRAITS",
    "ModelDrafter",
    "PathBelow",
    "Stop",
    "TokenBelow",
    "WhilePays",
    "annotated",
    "build",
    "stop_for",
]
