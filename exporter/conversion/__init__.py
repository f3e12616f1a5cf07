"""A source becomes a checked artifact, and an artifact is checked again."""
