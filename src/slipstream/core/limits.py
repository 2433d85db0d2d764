"""The longest draft. Imports nothing, so that options are checked without loading PyTorch."""

MAX_DRAFT_TOKENS = 64  # of one row in one round
