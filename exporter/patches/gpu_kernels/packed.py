"""Sequences of their own lengths in one row, with the ends of each in ``cu_seqlens``."""

from __future__ import annotations

from linexport.errors import UnsupportedModelError


def refuse_packed(cu_seqlens: object) -> None:
    """Refuse a call with the ends of several sequences.

    Raises:
        UnsupportedModelError: there are such ends.
    """
    if cu_seqlens is not None:
        raise UnsupportedModelError(
            "A kernel of the model takes several sequences in one row, with their ends in "
            "cu_seqlens. Give the model a batch of sequences: layers of fla take an "
            "attention_mask for the padding of its rows."
        )
