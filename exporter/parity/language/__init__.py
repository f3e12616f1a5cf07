"""Parity of language models: prompts, rows of a batch, layers, hidden states, images."""
