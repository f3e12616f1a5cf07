"""Attention to keys and values that never change, at the cost of a few of them.

    o = softmax(scale q K^T) V     K (L, d), V (L, d_v) fixed, q from a known distribution

``fit_pseudo_keys`` replaces the L keys by e; ``fit_svd`` is the published baseline it is held
against. ``StaticMemory`` is the layer that uses what was fitted.
"""

from linexport.models.static_memory.kmeans import Clusters, kmeans
from linexport.models.static_memory.layer import StaticMemory
from linexport.models.static_memory.problem import Fit
from linexport.models.static_memory.pseudo_keys import PseudoMemory, fit_pseudo_keys
from linexport.models.static_memory.svd import SvdMemory, fit_svd

__all__ = [
    "Clusters",
    "Fit",
    "PseudoMemory",
    "StaticMemory",
    "SvdMemory",
    "fit_pseudo_keys",
    "fit_svd",
    "kmeans",
]
