"""What `slipstream verify` runs: does speculative decoding generate exactly what the target alone would?"""
