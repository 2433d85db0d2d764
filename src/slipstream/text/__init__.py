"""From prompts to rows, and from rounds to results: text that arrives token by token, stop strings, statistics."""
