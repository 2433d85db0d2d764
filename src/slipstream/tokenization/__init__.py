"""Tokenizers: text to token ids and back, chat templates, the bytes of tokens, and what two vocabularies share."""
