"""The drafter "model": a draft model, and the sessions in which it reads and scores less than everything."""

from slipstream.drafters.model.model_drafter import (
    REPRODUCIBLE,
    TRAITS,
    Line,
    ModelDrafter,
    PathBelow,
    Stop,
    TokenBelow,
    WhilePays,
    build,
    comb,
    extended,
    record_of,
    stop_for,
)

__all__ = [
    "REPRODUCIBLE",
    "TRAITS",
    "Line",
    "ModelDrafter",
    "PathBelow",
    "Stop",
    "TokenBelow",
    "WhilePays",
    "build",
    "comb",
    "extended",
    "record_of",
    "stop_for",
]
