"""A trained model with softmax attention in linear form, and what that costs.

    result = linexport.linearize(module, calibration, map="favor+", features=128, distil=200)
    result.module                the linear form; weights are shared with the original
    result.report                errors, metric, multiply-adds, latency, memory: a plain dict
    result.save("linear.pt")     for ``linexport convert``

find -> fit maps and memories -> judge -> replace -> distil -> compare -> measure
"""

from linexport.linearization.auto import AutoSearch
from linexport.linearization.pipeline import Linearization, linearize

__all__ = ["AutoSearch", "Linearization", "linearize"]
