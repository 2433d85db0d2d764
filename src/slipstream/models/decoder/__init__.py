"""A decoder's parts that fast forwards share, on any device: layers, attention, KV cache and recurrent states."""
