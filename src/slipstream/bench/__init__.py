"""Measuring speed so that it can be trusted: arms in turn on the same prompts, texts compared, every round recorded."""
