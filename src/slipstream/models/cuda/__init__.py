"""CUDA: replays a forward, a draft or a verification in one launch, and computes decoder layers in few kernels."""
