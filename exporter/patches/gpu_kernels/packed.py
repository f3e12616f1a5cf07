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
            "cu_seqlens, as layers of fla do where they are given an attention_mask. Give the "
            "model a batch of sequences, and leave the mask out."
        )
