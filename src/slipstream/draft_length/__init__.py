"""The choice of draft lengths: policies, the costs of rounds, the acceptance of drafts."""
