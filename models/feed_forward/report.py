"""Form, cost and error of one replaced feed-forward layer."""

from __future__ import annotations

from dataclasses import dataclass

from linexport.models.feed_forward.powers import Power

FORMS = ("least-squares", "low-rank", "chebyshev", "bernstein", "taylor")


@dataclass(frozen=True)
class FeedForwardReport:
    """Form, cost and error of one replacement.

    Errors are mean squared distances |y^ - y|^2 over rows, summed over the outputs; y is the output
    of the linear layer after the activation where that is folded in.

    Attributes:
        form: one of ``FORMS``.
        activation: its name.
        degree: of the polynomials.
        folded: the linear layer after the activation is in the new one.
        rank: of a low-rank form; else None.
        powers: the feature map of each degree above 1.
        features: M, the width of Psi(x).
        multiply_adds: for one token, features and product.
        multiply_adds_before: of W x, and of the product after it where that is folded.
        parameters: numbers the layer stores.
        parameters_before: of what it replaces.
        error: on the held-out rows.
        relative_error: its root, as a share of the root mean square of y.
        bound: what the theory says E|y^ - y|^2 is at most, over the draws, for x whose
            t = W x + b lies in the intervals of the calibration data (Bernstein) or for the rows
            that it was computed from (Taylor); None without a theory.
        outside: share of the held-out t that lie outside those intervals.
        rounding: by how much float32 changes y, relative to y.
        table: of the cost, for people.
    """

    form: str
    activation: str
    degree: int
    folded: bool
    rank: int | None
    powers: tuple[Power, ...]
    features: int
    multiply_adds: int
    multiply_adds_before: int
    parameters: int
    parameters_before: int
    error: float
    relative_error: float
    bound: float | None
    outside: float
    rounding: float
    table: str
