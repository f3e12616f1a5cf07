"""Which feature map for which model: what each is, and how each does on given queries and keys.

linexport.compare_maps(d=64, length=1024)            on unit-variance random ones
linexport.compare_maps(data="model.pt", length=512)  on a model's own
linexport.choose_map(data="model.pt", error=0.1)     the cheapest that keeps an error
"""

from linexport.maps.catalogue import catalogue
from linexport.maps.comparison import compare_maps
from linexport.maps.planner import choose_map

__all__ = ["catalogue", "choose_map", "compare_maps"]
