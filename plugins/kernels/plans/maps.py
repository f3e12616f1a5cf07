"""Which feature maps there are kernels for."""

from __future__ import annotations

from linexport.errors import UnsupportedModelError

ELEMENTWISE = ("identity", "relu", "elu1", "exp")
WIDENING = ("taylor2", "quadratic", "favor+")
"""Maps with more features than components."""


def known(kind: str) -> None:
    """Raise UnsupportedModelError where kernels do not compute the map."""
    if kind not in ELEMENTWISE + WIDENING:
        raise UnsupportedModelError(
            f"No kernel computes the feature map {kind!r}; there are kernels for "
            f"{', '.join(ELEMENTWISE + WIDENING)}."
        )
