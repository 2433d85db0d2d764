"""The drafter "layer_skip": some of the target's own layers draft for it (self-speculation)."""

from slipstream.drafters.layer_skip.layer_skip_drafter import TRAITS, USAGE, build

__all__ = ["TRAITS", "USAGE", "build"]
