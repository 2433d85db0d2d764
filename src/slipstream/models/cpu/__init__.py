"""Linear layers and decoder layers for CPUs, compiled kernels included, and thread placement."""
