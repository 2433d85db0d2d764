"""How rows of different length share a forward, where models can do without padding."""
