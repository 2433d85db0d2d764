"""The drafter "layer_skip": some of the target's own layers draft for it (self-speculation)."""

from slipstream.drafters.layer_skip.drafter import TRAITS, USAGE, build

__all__ = ["TRAITS", "USAGE", "build"]
