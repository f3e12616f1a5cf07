"""k-means in float64 by Lloyd's iteration, begun as k-means++ begins (Arthur, Vassilvitskii 2007).

    labels_i = argmin_j |x_i - c_j|^2        c_j = mean of the x_i labelled j, weighed by w_i

Not scikit-learn's: what is fitted goes into checkpoints, and its threads make the last bits depend
on the machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from linexport.errors import UsageError

Array = NDArray[np.float64]

ITERATIONS = 100


@dataclass(frozen=True)
class Clusters:
    """A partition of rows.

    Attributes:
        centroids: (count, d).
        labels: which of them each row belongs to, (n,); every one has a row.
        inertia: weighted sum of squared distances to the own centroid.
        weights: of the rows, (n,), all above 0.
    """

    centroids: Array
    labels: NDArray[np.int64]
    inertia: float
    weights: Array

    def means(self, rows: Array) -> Array:
        """Weighted mean of the rows of each cluster, (count, width) of (n, width)."""
        return _means(rows, self.labels, self.weights, len(self.centroids))

    @property
    def sizes(self) -> Array:
        """Weight of each cluster over its heaviest row's, (count,): its rows, if they are equal."""
        count = len(self.centroids)
        heaviest = np.zeros(count)
        np.maximum.at(heaviest, self.labels, self.weights)
        return np.asarray(np.bincount(self.labels, self.weights, count) / heaviest)


def kmeans(rows: Array, count: int, seed: int = 0, weights: Array | None = None) -> Clusters:
    """Split (n, d) rows into ``count`` clusters; the same seed gives the same bytes.

    Where fewer rows than clusters are distinct, equal rows are split among equal centroids.

    Args:
        rows: (n, d).
        count: of clusters.
        seed: of the first centroids.
        weights: of the rows, above 0, (n,); None: all the same.

    Raises:
        UsageError: there are fewer rows than clusters.
    """
    if len(rows) < count:
        raise UsageError(
            f"{count} clusters of {len(rows)} rows: some clusters would be empty. Ask for at most "
            f"{len(rows)}."
        )
    weights = np.ones(len(rows)) if weights is None else weights
    centroids = _spread(rows, weights, count, np.random.default_rng(seed))
    labels = np.full(len(rows), -1, dtype=np.int64)
    for _ in range(ITERATIONS):
        squared = _squared_distances(rows, centroids)
        found = squared.argmin(1)
        _fill_empty(found, squared * weights[:, None])
        if (found == labels).all():
            break
        labels = found
        centroids = _means(rows, labels, weights, count)
    inertia = float((weights[:, None] * (rows - centroids[labels]) ** 2).sum())
    return Clusters(centroids, labels, inertia, weights)


def _spread(rows: Array, weights: Array, count: int, random: np.random.Generator) -> Array:
    """Rows far from each other: each next one drawn by its weight and its squared distance.

    Once every distinct row is chosen all distances are 0, and any row may be next.
    """
    chosen = [rows[random.integers(len(rows))]]
    nearest = weights * ((rows - chosen[0]) ** 2).sum(1)
    while len(chosen) < count:
        total = nearest.sum()
        at = random.choice(len(rows), p=nearest / total if total else None)
        chosen.append(rows[at])
        nearest = np.minimum(nearest, weights * ((rows - rows[at]) ** 2).sum(1))
    return np.stack(chosen)


def _means(rows: Array, labels: NDArray[np.int64], weights: Array, count: int) -> Array:
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, labels, weights[:, None] * rows)
    return np.asarray(sums / np.bincount(labels, weights, count)[:, None])


def _fill_empty(labels: NDArray[np.int64], squared: Array) -> None:
    """Give every empty cluster the row that lies farthest from the centroid it has."""
    own = squared[np.arange(len(labels)), labels]
    for empty in np.setdiff1d(np.arange(squared.shape[1]), labels):
        # A cluster of one would only move the gap.
        shared = np.bincount(labels, minlength=squared.shape[1])[labels] > 1
        farthest = np.where(shared, own, -np.inf).argmax()
        labels[farthest], own[farthest] = empty, 0.0


def _squared_distances(rows: Array, centroids: Array) -> Array:
    """(n, count); expanded, so that no (n, count, d) array is made."""
    cross = rows @ centroids.T
    return np.asarray((rows**2).sum(1)[:, None] - 2 * cross + (centroids**2).sum(1))
