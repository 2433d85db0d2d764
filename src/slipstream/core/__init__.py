"""The algorithm: draft, verify, accept, commit. Imports nothing of Slipstream but itself and `errors`."""
