"""The advisor: finds which drafter, draft length and draft model pay off on this machine and these prompts, if any."""
