"""The drafter "suffix": what most often followed the longest suffix seen before (SuffixDecoding)."""

from slipstream.drafters.suffix.suffix_drafter import TRAITS, SuffixDrafter, build

__all__ = ["TRAITS", "SuffixDrafter", "build"]
