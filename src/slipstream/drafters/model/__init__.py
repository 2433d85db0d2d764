"""The drafter "model": a draft model, and sessions that skip part of a long prompt or of the vocabulary."""

from slipstream.drafters.model.model_drafter import TRAITS, ModelDrafter, PathBelow, TokenBelow, WhilePays, build

__all__ = ["TRAITS", "ModelDrafter", "PathBelow", "TokenBelow", "WhilePays", "build"]
