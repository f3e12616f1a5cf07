"""Error of a map against its own kernel, and of its attention against softmax; in float64.

    kernel error    rms(phi(q).phi(k) - kernel) / rms(kernel)    over pairs, and over the draws
    its prediction  sqrt(mean theoretical error) / rms(kernel)
    output error    |o - o_softmax| / |o_softmax|                over tokens and heads
    denominator     phi(q) . z, relative to the sum of |phi(q).phi(k)| that it is made of

All from the definition, as a masked product of all pairs, and not by the code that is exported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from linexport.manifest.map_records import MapAccuracy
from linexport.maps.attention_samples import HeadSamples
from linexport.models.feature_maps import FeatureMap
from linexport.models.feature_maps.base import ExponentialMap

Array = NDArray[np.float64]

TOKENS = 192
"""Queries of each head that are answered, spread evenly; all keys are attended to."""
PAIRS = 1500
LEAST = 1e-100
"""Sums below it have lost digits to underflow."""


@dataclass(frozen=True)
class SoftmaxReference:
    """Softmax attention to be approached, on some of the tokens.

    Attributes:
        samples: what it attends to.
        tokens: which queries are answered.
        mask: which keys each of them sees, (tokens, T).
        output: softmax's, (heads, tokens, d_v).
        uniform_error: of attending to every key alike.
    """

    samples: HeadSamples
    tokens: NDArray[np.int64]
    mask: NDArray[np.bool_]
    output: Array
    uniform_error: float


def reference(samples: HeadSamples) -> SoftmaxReference:
    """Softmax attention with 1/sqrt(d)."""
    length, d = samples.queries.shape[1:]
    tokens = np.unique(np.linspace(0, length - 1, min(TOKENS, length)).round().astype(int))
    mask = np.ones((len(tokens), length), bool)
    if samples.causal:
        mask = np.arange(length) <= tokens[:, None]
    scores = samples.queries[:, tokens] @ samples.keys.swapaxes(1, 2) / math.sqrt(d)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    output = weights @ samples.values / weights.sum(-1, keepdims=True)
    uniform = mask / mask.sum(-1, keepdims=True) @ samples.values
    return SoftmaxReference(samples, tokens, mask, output, _relative(uniform, output))


def judge(maps: Sequence[FeatureMap], against: SoftmaxReference) -> MapAccuracy:
    """The numbers above, over draws of one map: root mean squares, and the worst denominator.

    Those that came out as NaN or infinity are None, with a ``reason``.
    """
    outputs = [_output(module, against) for module in maps]
    errors = [o["error"] for o in outputs]
    found: dict[str, float | None] = {
        **_kernel(maps, against.samples),
        "output_error": _rms(errors),
        "output_error_worst": max(errors),
        "smallest_denominator": min((o["smallest"] for o in outputs), key=abs),
        "cancellation": min(o["cancellation"] for o in outputs),
        "negative_denominators": float(np.mean([o["negative"] for o in outputs])),
    }
    lost = [name for name, value in found.items() if value is not None and not _finite(value)]
    for name in lost:
        found[name] = None
    reason = f"not finite: {', '.join(lost)}. {maps[0].failure}" if lost else None
    return MapAccuracy(**found, reason=reason)


def output_error(module: FeatureMap, against: SoftmaxReference) -> float:
    """Return the error of attention with one draw of a map; infinite where it is not finite."""
    return _output(module, against)["error"]


def kernel_error(module: FeatureMap, q: Array, k: Array, absolute: bool = False) -> float:
    """Return the root mean square error of phi(q) . phi(k), over that of the kernel or not."""
    with np.errstate(all="ignore"):
        kernel = module.kernel_value(q, k)
        return _rms(products(module, q, k) - kernel) / (1.0 if absolute else _rms(kernel))


def _output(module: FeatureMap, against: SoftmaxReference) -> dict[str, float]:
    """Normalised attention without eps, head by head: what eps would hide is to be seen."""
    errors, sizes = [], []
    smallest, cancellation, negative = [], [], []
    for q, k, v, want in zip(
        against.samples.queries,
        against.samples.keys,
        against.samples.values,
        against.output,
        strict=True,
    ):
        with np.errstate(all="ignore"):
            scores = _scores(module, q[against.tokens], k, against.mask)
            denominator = scores.sum(-1)
            got = scores @ v / denominator[:, None]
            share = np.abs(denominator) / np.abs(scores).sum(-1)
        errors.append(((got - want) ** 2).sum())
        sizes.append((want**2).sum())
        smallest.append(denominator[np.abs(denominator).argmin()])
        cancellation.append(share.min())
        negative.append((denominator < 0).mean())
    return {
        "error": math.sqrt(sum(errors) / sum(sizes)) if _finite(sum(errors)) else math.inf,
        "smallest": float(min(smallest, key=abs)),
        "cancellation": float(min(cancellation)),
        "negative": float(np.mean(negative)),
    }


def _scores(module: FeatureMap, q: Array, k: Array, mask: NDArray[np.bool_]) -> Array:
    """phi(q) . phi(k) where the mask is, else 0; of an exponential map up to a factor per query."""
    frozen = _frozen(module)
    query, key = torch.from_numpy(q), torch.from_numpy(k)
    if isinstance(module, ExponentialMap):
        return _exponential(module.log_phi(query, *frozen), module.log_phi_key(key, *frozen), mask)
    if module.over_time:
        key = key[None]
    phi_q, phi_k = module.phi(query, *frozen), module.phi_key(key, *frozen)
    return np.where(mask, (phi_q @ phi_k.reshape(len(k), -1).T).numpy(), 0.0)


def _exponential(a: torch.Tensor, b: torch.Tensor, mask: NDArray[np.bool_]) -> Array:
    """exp(a) . exp(b) without overflow: relative to the largest keys of all.

    Queries whose own keys are all so much smaller that they vanish are done again, relative to
    the largest keys that they see.
    """
    scores = np.where(mask, _relative_to(b.amax(0), a, b), 0.0)
    for row in np.flatnonzero(scores.sum(-1) < LEAST):
        seen = b[torch.from_numpy(mask[row])]
        scores[row, mask[row]] = _relative_to(seen.amax(0), a[row : row + 1], seen)[0]
    return scores


def _relative_to(top: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Array:
    exponents = a + top
    phi_q = (exponents - exponents.amax(-1, keepdim=True)).exp()
    return np.asarray((phi_q @ (b - top).exp().T).numpy())


def _kernel(maps: Sequence[FeatureMap], samples: HeadSamples) -> dict[str, float | None]:
    """Measured and predicted, on random pairs of a query and a key; null for maps over time."""
    if maps[0].over_time:
        return {"kernel_error": None, "kernel_error_predicted": None}
    q, k = random_pairs(samples)
    with np.errstate(all="ignore"):
        kernel = maps[0].kernel_value(q, k)
        scale = _rms(kernel)
        measured = _rms([_rms(products(m, q, k) - kernel) for m in maps]) / scale
        squares = maps[0].theoretical_error(q, k)
        predicted = 0.0 if squares is None else math.sqrt(float(np.mean(squares))) / scale
    fitted = maps[0].exactness == "fitted"
    return {"kernel_error": measured, "kernel_error_predicted": None if fitted else predicted}


def random_pairs(samples: HeadSamples) -> tuple[Array, Array]:
    """``PAIRS`` queries and keys of the same heads, at any two tokens, (n, d) each."""
    random = np.random.default_rng(0)
    head = random.integers(len(samples.queries), size=PAIRS)
    at = random.integers(samples.queries.shape[1], size=(2, PAIRS))
    return samples.queries[head, at[0]], samples.keys[head, at[1]]


def products(module: FeatureMap, q: Array, k: Array) -> Array:
    """phi(q) . phi(k), row by row, in float64."""
    frozen = _frozen(module)
    phi_q = module.phi(torch.from_numpy(q), *frozen)
    return (phi_q * module.phi_key(torch.from_numpy(k), *frozen)).sum(-1).numpy()


def _frozen(module: FeatureMap) -> list[torch.Tensor]:
    return [t.double() if t.is_floating_point() else t for t in module.frozen()]


def _relative(got: Array, want: Array) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _rms(values: Any) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


def _finite(value: float) -> bool:
    return math.isfinite(value)
