"""What speculation should gain: what a round costs, how far drafts get, and the formula over both."""
