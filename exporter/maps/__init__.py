"""Which feature map for which model: what each is, and how each does on given queries and keys.

linexport.compare_maps(d=64, length=1024)            on unit-variance random ones
linexport.compare_maps(data="model.pt", length=512)  on a model's own
"""

from linexport.maps.catalogue import catalogue
from linexport.maps.comparison import compare_maps

__all__ = ["catalogue", "compare_maps"]
