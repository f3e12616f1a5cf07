"""linexport: export and deployment toolkit for PyTorch models with linear attention.

    linexport.convert("model.pt", "artifact")   convert, prove equal, measure
    linexport.load("artifact").run(x)           run it
    linexport.load("artifact").stream()         run it piece by piece
    linexport.load("artifact").pool(slots=16)   many sequences that share its calls
    linexport.quantize("artifact", "small")     weights in 8 or 4 bits, and what that changes
    linexport.build("prepared")                 its engine, on the machine of the GPU
    linexport.validate("artifact"), linexport.bench("artifact")
    linexport.inspect(module, (x,))             what is found in a model, before it is converted
    linexport.debug("artifact")                 where it first differs from the original
    linexport.compare_maps(d=64)                which feature map for which queries and keys
    linexport.choose_map(d=64, error=0.1)       the cheapest that keeps an error
    linexport.linearize(module, calibration)    trained softmax attention in linear form

Names are imported when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from linexport import errors
    from linexport.artifact import Artifact, NGramDraft, Stream, load
    from linexport.conversion.build import build
    from linexport.conversion.pipeline import convert
    from linexport.conversion.quantize import quantize
    from linexport.conversion.revalidate import bench, validate
    from linexport.debugging import debug
    from linexport.inspection import inspect
    from linexport.linearization import AutoSearch, Linearization, linearize
    from linexport.maps import choose_map, compare_maps
    from linexport.serving import Pool, PrefixCache

__all__ = [
    "Artifact",
    "AutoSearch",
    "Linearization",
    "NGramDraft",
    "Pool",
    "PrefixCache",
    "Stream",
    "__version__",
    "bench",
    "build",
    "choose_map",
    "compare_maps",
    "convert",
    "debug",
    "errors",
    "inspect",
    "linearize",
    "load",
    "quantize",
    "validate",
]

__version__ = "0.1.0"

_HOMES = {
    "Artifact": "linexport.artifact",
    "AutoSearch": "linexport.linearization",
    "Linearization": "linexport.linearization",
    "NGramDraft": "linexport.artifact",
    "Pool": "linexport.serving",
    "PrefixCache": "linexport.serving",
    "Stream": "linexport.artifact",
    "load": "linexport.artifact",
    "bench": "linexport.conversion.revalidate",
    "choose_map": "linexport.maps",
    "compare_maps": "linexport.maps",
    "build": "linexport.conversion.build",
    "convert": "linexport.conversion.pipeline",
    "debug": "linexport.debugging",
    "inspect": "linexport.inspection",
    "linearize": "linexport.linearization",
    "quantize": "linexport.conversion.quantize",
    "validate": "linexport.conversion.revalidate",
}


def __getattr__(name: str) -> Any:
    import importlib

    if name == "errors":
        return importlib.import_module("linexport.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'linexport' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
