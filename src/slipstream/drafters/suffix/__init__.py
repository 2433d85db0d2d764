"""The drafter "suffix": what most often followed the longest suffix seen before (SuffixDecoding)."""

from slipstream.drafters.suffix.drafter import SuffixDrafter, build

__all__ = ["SuffixDrafter", "build"]
