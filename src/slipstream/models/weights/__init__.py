"""Reading models: where their files are, and what stands in them. No modules and no kernels are made here."""
