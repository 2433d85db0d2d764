"""The parts of a decoder that all devices share: layers, attention, KV cache and recurrent states."""
