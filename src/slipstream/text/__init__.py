"""Between text and token ids: tokenizers, chat templates, incremental text, stop strings, prompts, results."""
