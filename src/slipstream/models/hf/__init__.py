"""Hugging Face models. The only package beside `integrations.transformers` that imports transformers."""
