"""Recurrent layers on the slots of a cache: states that may be gone back from, a few tokens at a time."""
