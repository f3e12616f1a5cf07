"""The error with which a search leaves what looked like attention."""


class NotAttentionError(Exception):
    """A condition failed on what looked like attention; the text says which."""
