"""The drafter "token_recycling": what the target ranked highest after a context is drafted when that comes again."""

from slipstream.drafters.token_recycling.token_recycling_drafter import TRAITS, USAGE, TokenRecyclingDrafter, build

__all__ = ["TRAITS", "USAGE", "TokenRecyclingDrafter", "build"]
