"""Reading models: where their files are, and what is in them. Neither modules nor kernels are made here."""
