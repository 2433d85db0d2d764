"""The drafter "model": a draft model, and sessions that skip part of a long prompt or of the vocabulary."""

from slipstream.drafters.model.model_drafter import (
    MIN_DRAFT_PROB,
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
    "MIN_DRAFT_PROB",
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
