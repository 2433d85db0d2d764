"""What `SpeculativeDecoder` is put together from: loaded models with their caches, and the engine of its settings."""
