"""`generate(..., custom_generate=slipstream.custom_generate)`: Slipstream inside Hugging Face `generate`."""
