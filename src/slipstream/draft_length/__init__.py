"""How many tokens to draft: policies, what rounds cost, what drafts have brought."""
