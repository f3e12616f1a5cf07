"""Prompts that are longer than a model, or a server, takes."""

from __future__ import annotations

from linexport.errors import UsageError


class ContextLengthError(UsageError):
    """A prompt with more tokens than the model, or the server, takes."""


def too_long(count: int, most: int) -> str:
    """Return in words that a prompt is longer than a server takes."""
    return f"The prompt has {count} tokens; this server takes at most {most}."
