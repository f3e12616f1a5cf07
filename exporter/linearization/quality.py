"""Which linear forms are better than the mean of the values, on rows that nothing was fitted to.

    replaced where      error < uniform_error, and margin >= ``MARGIN`` standard errors

Both errors are of the same queries: each row is one sample of their ratio. Without the margin
a form that is as bad as the mean would be called better half of the time. With a locality they are
distances from exact masked attention; after distillation, of outputs of the projection, which was
learned as well.
"""

from __future__ import annotations

from collections.abc import Sequence

from linexport.manifest.linearization_records import AttentionRow

MARGIN = 3.0
"""One chance in 700 that a form as bad as the mean passes."""


def undecided(margin: float | None) -> bool:
    """The rows do not tell which error is the smaller."""
    return margin is not None and abs(margin) < MARGIN


def no_better(row: AttentionRow) -> bool:
    """A form was made, and attending to all keys alike does as well."""
    found = row.judged_errors
    if found is None:
        return False
    return not found[0] < found[1] or (row.margin is not None and row.margin < MARGIN)


def why_kept(row: AttentionRow) -> str:
    """The reason for which ``no_better`` leaves a layer as it is."""
    found = row.judged_errors
    assert found is not None
    size = row.features if row.pseudo_keys is None else row.pseudo_keys
    form = row.map if row.pseudo_keys is None else "pseudo-keys"
    after = " after distillation" if row.distilled_error is not None else ""
    by_chance = found[0] < found[1]
    chance = f" beyond chance ({row.margin:.1f} standard errors)" if by_chance else ""
    data = ", more rows of data" if by_chance else ""
    return (
        f"{form} with M = {size:,} has an error of {found[0]:.3g} on held-out rows{after}, no "
        f"better than the mean of the values, {found[1]:.3g}{chance}. Another map{data} or more "
        f"features may do{'' if after else ', or --distil'}; --force replaces it all the same"
    )


def replaced(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """Rows whose form is in the model."""
    return [row for row in rows if row.reason is None]


def judged_no_better(rows: Sequence[AttentionRow]) -> list[AttentionRow]:
    """Rows whose form was made and left out."""
    return [row for row in rows if row.reason is not None and no_better(row)]
