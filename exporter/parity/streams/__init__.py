"""Streams beside whole sequences: pieces, carried states, sequences side by side."""
