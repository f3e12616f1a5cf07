"""k-means in float64 by Lloyd's iteration, begun as k-means++ begins (Arthur, Vassilvitskii 2007).

    labels_i = argmin_j |x_i - c_j|^2        c_j = mean of the x_i labelled j

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
        inertia: sum of squared distances to the own centroid.
    """

    centroids: Array
    labels: NDArray[np.int64]
    inertia: float

    def means(self, rows: Array) -> Array:
        """Mean of the rows of each cluster, (count, width) of (n, width)."""
        return _means(rows, self.labels, len(self.centroids))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Rows in each cluster, (count,), all at least 1."""
        return np.bincount(self.labels, minlength=len(self.centroids))


def kmeans(rows: Array, count: int, seed: int = 0) -> Clusters:
    """``count`` clusters of (n, d) rows; the same seed gives the same bytes.

    Raises:
        UsageError: there are fewer distinct rows than clusters.
    """
    distinct = len(np.unique(rows, axis=0))
    if distinct < count:
        raise UsageError(
            f"{count} clusters of {len(rows)} rows, of which {distinct} are distinct: some "
            f"clusters would be empty. Ask for at most {distinct}."
        )
    centroids = _spread(rows, count, np.random.default_rng(seed))
    labels = np.full(len(rows), -1, dtype=np.int64)
    for _ in range(ITERATIONS):
        squared = _squared_distances(rows, centroids)
        found = squared.argmin(1)
        _fill_empty(found, squared)
        if (found == labels).all():
            break
        labels = found
        centroids = _means(rows, labels, count)
    inertia = float(((rows - centroids[labels]) ** 2).sum())
    return Clusters(centroids, labels, inertia)


def _spread(rows: Array, count: int, random: np.random.Generator) -> Array:
    """Rows far from each other: each next one drawn in proportion to its squared distance."""
    chosen = [rows[random.integers(len(rows))]]
    nearest = ((rows - chosen[0]) ** 2).sum(1)
    while len(chosen) < count:
        at = random.choice(len(rows), p=nearest / nearest.sum())
        chosen.append(rows[at])
        nearest = np.minimum(nearest, ((rows - rows[at]) ** 2).sum(1))
    return np.stack(chosen)


def _means(rows: Array, labels: NDArray[np.int64], count: int) -> Array:
    sums = np.zeros((count, rows.shape[1]))
    np.add.at(sums, labels, rows)
    return np.asarray(sums / np.bincount(labels, minlength=count)[:, None])


def _fill_empty(labels: NDArray[np.int64], squared: Array) -> None:
    """Give every empty cluster the row that lies farthest from the centroid it has."""
    own = squared[np.arange(len(labels)), labels]
    for empty in np.setdiff1d(np.arange(squared.shape[1]), labels):
        # A cluster of one would only move the gap.
        shared = np.bincount(labels, minlength=squared.shape[1])[labels] > 1
        farthest = np.where(shared, own, -1.0).argmax()
        labels[farthest], own[farthest] = empty, 0.0


def _squared_distances(rows: Array, centroids: Array) -> Array:
    """(n, count); expanded, so that no (n, count, d) array is made."""
    cross = rows @ centroids.T
    return np.asarray((rows**2).sum(1)[:, None] - 2 * cross + (centroids**2).sum(1))
