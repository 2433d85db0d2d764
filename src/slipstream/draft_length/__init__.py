"""How many tokens to draft: policies, the costs of rounds, the acceptance of drafts."""
