"""Captured CUDA graphs: a forward, a draft or a verification replayed in one launch."""
