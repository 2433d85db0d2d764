"""What `slipstream verify` runs: whether speculative decoding says exactly what the target alone would."""
