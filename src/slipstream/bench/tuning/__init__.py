"""The advisor: which drafter, draft length and draft model pay on this machine and these prompts, if any does."""
