"""What speculation should gain: costs of a round, acceptance, the formula, and a simulation that checks it."""
