"""Draft heads: small networks that read a target's hidden states and propose its next tokens.

`head_kinds` recognizes published heads, `head_files` and `head_tensors` read them, `network` computes a head, and
`head_backend` gives it slots and a KV cache, so that it drafts as a draft model does.
"""
