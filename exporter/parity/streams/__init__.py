"""Compare streams with whole sequences: pieces, carried states, sequences side by side."""
