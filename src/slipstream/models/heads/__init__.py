"""Draft heads: small networks that read a target's hidden states and propose its next tokens.

`head_files` reads what others publish, `network` computes it, `head_backend` gives it slots and a KV cache, so that a
head drafts as a draft model does.
"""
