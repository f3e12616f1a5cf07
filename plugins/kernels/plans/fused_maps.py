"""Which feature maps there are kernels for."""

from __future__ import annotations

from linexport.errors import UnsupportedModelError

ELEMENTWISE = ("identity", "relu", "elu1", "exp")
PAIRS = ("taylor2", "quadratic")
"""Maps of products of components, whose features kernels keep in float32."""

WIDENING = (*PAIRS, "favor+")
"""Maps with more features than components."""


def known(kind: str) -> None:
    """Raise UnsupportedModelError where kernels do not compute the map."""
    if kind not in ELEMENTWISE + WIDENING:
        raise UnsupportedModelError(
            f"No kernel computes the feature map {kind!r}; there are kernels for "
            f"{', '.join(ELEMENTWISE + WIDENING)}."
        )
