"""CUDA: a forward, a draft or a verification replayed in one launch, and decoder layers of few kernels."""
