"""Linear attention in graphs that were not written with it, found by algebra and proven by running.

What ``passes`` report: see ``Findings``.
"""

from linexport.recognise.findings import Findings, RejectedMatch, UnmatchedCandidate

__all__ = ["Findings", "RejectedMatch", "UnmatchedCandidate"]
