"""Feature maps phi with sim(q, k) = phi(q) . phi(k), one file each."""

from linexport.models.feature_maps.base import FeatureMap, find, kinds

__all__ = ["FeatureMap", "find", "kinds"]
