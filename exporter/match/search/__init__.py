"""Searches for attention in a graph, each for a kind of notation, and what is in their way."""
