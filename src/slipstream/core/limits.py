"""Limits that every part of the package keeps to. Needs neither PyTorch nor any other module."""

MAX_DRAFT_TOKENS = 64  # of one row in one round
