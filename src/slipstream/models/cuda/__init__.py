"""On CUDA: a forward, a draft or a verification replayed in one launch, and layers of few kernels."""
