"""How much of a long prompt a draft model reads."""
