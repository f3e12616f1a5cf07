"""Records of feature maps: what each says of itself, and how near and how fast it was measured."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class MapDescription:
    """A map as it describes itself.

    Attributes:
        map: its name.
        kernel: formula of phi(q) . phi(k).
        exactness: of the features as an estimate of that kernel.
        features: M with default options at one head width; None with a ``note``.
        positive: phi >= 0.
        kernel_positive: phi(q) . phi(k) >= 0.
        causal: False for a map that normalises keys over the whole sequence.
        error: formula of its theoretical error; "0" for an exact one.
        regime: when to use it.
        failure: how it fails where it does.
        options: their defaults.
        note: why it cannot be made, or what it warns of.
    """

    map: str
    kernel: str
    exactness: str
    features: int | None
    positive: bool
    kernel_positive: bool
    causal: bool
    error: str
    regime: str
    failure: str
    options: dict[str, Any]
    note: str | None


@dataclass(frozen=True, kw_only=True)
class MapAccuracy:
    """Errors of one map, over draws where it is random; None where not finite or not measured.

    Attributes:
        kernel_error: of phi(q) . phi(k), relative to the kernel's root mean square.
        kernel_error_predicted: by its theory; None for a fitted map.
        output_error: of attention with the map, relative to softmax attention.
        output_error_worst: of the worst draw.
        smallest_denominator: in absolute value.
        cancellation: smallest denominator, relative to the sum of absolute values it is made of.
        negative_denominators: part of all denominators.
        reason: why something is None.
    """

    kernel_error: float | None = None
    kernel_error_predicted: float | None = None
    output_error: float | None = None
    output_error_worst: float | None = None
    smallest_denominator: float | None = None
    cancellation: float | None = None
    negative_denominators: float | None = None
    reason: str | None = None


@dataclass(frozen=True, kw_only=True)
class MapRow(MapAccuracy):
    """One map at one number of features.

    Attributes:
        map: its name.
        options: that it was made with.
        features: M; None where it could not be made.
        exactness: see ``MapDescription``; so are ``positive`` and ``kernel``.
        us_per_token: median microseconds of a layer.
        bytes_per_token: peak memory of one run.
        state_bytes: of a layer's state; None where the map could not be made.
        frontier: nearer to softmax than a mean, and no other map is both nearer and faster.
    """

    map: str
    options: dict[str, Any]
    features: int | None
    exactness: str
    positive: bool
    kernel: str
    us_per_token: float | None = None
    bytes_per_token: float | None = None
    state_bytes: int | None = None
    frontier: bool = False


@dataclass(frozen=True, kw_only=True)
class PlanRow(MapRow):
    """One map with as many features as a promise on its error takes.

    Attributes:
        needed: M that the promise takes; by the inequality it may be more than ``features``. None
            where no M is known to keep it.
        expected_error: bound on the mean kernel error with ``features``, by Jensen's inequality;
            None of a simulation.
        simulated: draws that a simulation shows the promise with; None where there are none.
        kept: of them, those with no larger error.
        fits: the promise holds, and the output error is within its limit.
    """

    needed: int | None = None
    expected_error: float | None = None
    simulated: int | None = None
    kept: int | None = None
    fits: bool = False


@dataclass(frozen=True, kw_only=True)
class MapMeasurement:
    """Report on feature maps, with what they were measured on.

    Attributes:
        kind: names the kind of report.
        linexport: version that measured.
        source: of queries, keys and values.
        d: width of a head.
        value_dim: width of its values.
        length: tokens.
        heads: number of heads looked at.
        layer_heads: heads of the layer that was timed.
        causal: every token attends to those before it only.
        seed: of random queries, keys and maps.
        draws: of each random map that was measured.
        threads: of the timed sessions, 0 for the runtime's choice.
        uniform_error: of attention to all keys alike.
        environment: machine and versions.
    """

    kind: str
    linexport: str
    source: str
    d: int
    value_dim: int
    length: int
    heads: int
    layer_heads: int
    causal: bool
    seed: int
    draws: int
    threads: int
    uniform_error: float
    environment: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MapComparison(MapMeasurement):
    """Feature maps and softmax attention, measured on the same queries, keys and values.

    Attributes:
        rows: one for each map and number of features.
        maps: what the maps say of themselves.
    """

    kind: Literal["map_comparison"] = "map_comparison"
    rows: tuple[MapRow, ...]
    maps: tuple[MapDescription, ...]


@dataclass(frozen=True, kw_only=True)
class MapPlan(MapMeasurement):
    """How many features of each map keep an error with a probability, and the cheapest.

    Attributes:
        quantity: what the error is of: "output" of attention, relative to softmax attention, or the
            map's "kernel", root mean square over the pairs.
        method: "simulation" by draws of the map, or "inequality" from the kernel's variance.
        confidence: with which a simulation shows the probability; None of the inequality.
        error: the largest.
        absolute: a kernel error is not relative to the root mean square of the kernel.
        probability: of no larger one, over the draws of a map.
        output_error: largest measured error of the output that fits, relative to softmax attention.
        most_features: largest M that fits.
        pairs: of queries and keys that the promise is about.
        rows: one for each map; those that fit first, by time.
        chosen: name of the fastest map that fits; None: none does.
    """

    kind: Literal["map_plan"] = "map_plan"
    quantity: str
    method: str
    confidence: float | None
    error: float
    absolute: bool
    probability: float
    output_error: float
    most_features: int
    pairs: int
    rows: tuple[PlanRow, ...]
    chosen: str | None
