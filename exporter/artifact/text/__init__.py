"""The text side of an artifact: tokenizers, templates, sampling, stop strings, pictures."""
