"""Checks that speculative decoding generates exactly what the target alone would; `slipstream verify` runs them."""
