"""Feature maps phi with sim(q, k) = phi(q) . phi(k), one file each.

Importing this package imports every map, so that a graph which names one is understood.
"""

from linexport.models.feature_maps.base import FeatureMap
from linexport.models.feature_maps.registry import find_map, kinds, make

__all__ = ["FeatureMap", "find_map", "kinds", "make"]

kinds()
