"""The parts of `SpeculativeDecoder`: loaded models with their caches, and the engine of its settings."""
