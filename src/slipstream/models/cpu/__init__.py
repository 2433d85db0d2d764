"""Linear layers and decoder layers for CPUs, the kernels that compute them, and the placement of threads."""
