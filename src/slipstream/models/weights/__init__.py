"""Locates and reads the files of models, without making modules or kernels."""
